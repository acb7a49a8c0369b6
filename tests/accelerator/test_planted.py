"""Every fault that is planted in the engine's ordering is found, each time: bits differ, or a named error is raised.

Each mutant has a run and a schedule under which the engine is exact, and wrong without what the mutant takes away. The
schedule says which streams are starved or hurried; nothing depends on the speed of the machine.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from tests.support.planted_races import (
    direction_before_it_landed,
    early_signal,
    forgets_who_is_busy,
    given_back_at_once,
    given_back_by_the_first_reader,
    gradient_before_it_landed,
    hand_part_of_the_input_on,
    integers_written_at_once,
    late_look_aheads,
    late_updates,
    loss_read_before_it_landed,
    never_released,
    newest_buffers_first,
    on_stream,
    outgrown_slots_are_dropped,
    part_given_back_before_it_is_added,
    released_before_the_sends,
    rounding_on_the_compute_stream,
    temporary_without_a_ring,
    weights_released_at_the_start,
)
from tests.support.planting import Plant, both, call_sites, empty_event_at, no_wait_at, replaced, skipped
from tests.support.scheduled_run import Outcome, Schedule, ShortRun, execute, hurried, scheduled, starved
from tests.support.toy import KEPT
from torchround.engine.device import Stream
from torchround.engine.errors import PipelineError
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, BOUNDED
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.activation_transfers import ActivationTransfers, HostTensors
from torchround.engine.worker.bundle_transfers import GradientDownload
from torchround.engine.worker.slots import SlotRing

COMPUTE, WEIGHTS_UP, UP, DOWN, GRADIENTS_DOWN = Stream

ONE = ShortRun()
TWO = ShortRun(workers=2)
REUSED = ShortRun(workers=2, tight_pool=True)
REUSED_BY_ONE = ShortRun("one layer a stage", tight_pool=True)
ROUNDS = ShortRun(workers=2, tight_pool=True, rounds=2, steps=3, dtype=torch.bfloat16)
PARTS = ShortRun(workers=2, tight_pool=True, rounds=2, steps=3, tied=True)
LATE = ShortRun(workers=2, policy=ASYNC, steps=4)
EVALUATED = ShortRun("one stage", workers=3, evaluates=True, steps=3)
ROUNDED = ShortRun(dtype=torch.bfloat16)
BEHIND = ShortRun("backward coarser", workers=2, policy=BOUNDED, steps=3, stale_layers=5)
MATRICES = ShortRun(optimizer="muon")
KEEPS = ShortRun("one layer a stage", settings=(("kept", KEPT["all"]),))


def no_change(patch: pytest.MonkeyPatch) -> None:
    """Leave the engine as it is."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the run and schedule that show it. `change` changes the correct engine or its model too."""

    plant: Plant
    run: ShortRun
    schedule: Schedule
    change: Callable[[pytest.MonkeyPatch], None] = no_change


# Waits of a stream, by their call site in the engine, and the events that they are for.
WAITS = {
    "activation_transfers.send: device.wait(Stream.COMPUTE, slot.released)": (ONE, hurried(COMPUTE)),
    "activation_transfers.send: device.wait(Stream.ACTIVATION_DOWNLOAD, device.record(Stream.COMPUTE))": (
        *(ONE, starved(COMPUTE)),
    ),
    "activation_transfers.send: device.wait(Stream.ACTIVATION_DOWNLOAD, event)": (REUSED, hurried(DOWN)),
    "activation_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, slot.released)": (ONE, hurried(UP)),
    "activation_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, boundary.landed)": (ONE, hurried(UP)),
    "activation_transfers._upload: device.wait(Stream.COMPUTE, uploaded)": (ONE, starved(UP)),
    "bundle_transfers.__init__: device.wait(Stream.WEIGHT_UPLOAD, slot.released)": (ONE, starved(COMPUTE)),
    "bundle_transfers.layers_final: self._device.wait(Stream.GRADIENT_DOWNLOAD, self._device.record(Stream.COMPUTE))": (
        ONE,
        starved(COMPUTE),
    ),
    "bundle_transfers._open_landing: self._device.wait(Stream.GRADIENT_DOWNLOAD, event)": (
        *(PARTS, hurried(GRADIENTS_DOWN)),
    ),
    "kept_transfers.bring: self._device.wait(Stream.COMPUTE, staged.uploaded)": (KEEPS, starved(UP)),
    "kept_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, slot.released)": (*(KEEPS, starved(COMPUTE)),),
    "kept_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, value.landed)": (
        *(replace(KEEPS, workers=3, micro_batches=1), starved(DOWN)),
    ),
    "orthogonalise._enqueue: device.wait(Stream.ACTIVATION_UPLOAD, slot.released)": (
        *(MATRICES, starved(GRADIENTS_DOWN)),
    ),
    "orthogonalise._enqueue: device.wait(Stream.COMPUTE, device.record(Stream.ACTIVATION_UPLOAD))": (
        *(MATRICES, starved(UP)),
    ),
    "orthogonalise._enqueue: device.wait(Stream.GRADIENT_DOWNLOAD, device.record(Stream.COMPUTE))": (
        *(MATRICES, starved(COMPUTE)),
    ),
    "device_worker._run: self._device.wait(Stream.COMPUTE, filled)": (ONE, starved(WEIGHTS_UP)),
    "device_worker._clear_gradients: self._device.wait(Stream.COMPUTE, slot.released)": (
        *(ONE, starved(GRADIENTS_DOWN)),
    ),
}
EVENTS = {
    "activation_transfers.end_stage: self._device.record(Stream.COMPUTE)": (LATE, starved(COMPUTE)),
    "activation_transfers.end_micro_batch: self._device.record(Stream.COMPUTE)": (ONE, hurried(UP)),
    "activation_transfers.send: device.record(Stream.ACTIVATION_DOWNLOAD)": (ONE, starved(DOWN)),
    "activation_transfers.send: device.record(Stream.COMPUTE)": (ONE, starved(COMPUTE)),
    "activation_transfers._upload: device.record(Stream.ACTIVATION_UPLOAD)": (ONE, starved(UP)),
    "kept_transfers.end_micro_batch: self._device.record(Stream.COMPUTE)": (KEEPS, hurried(UP)),
    "kept_transfers._upload: device.record(Stream.ACTIVATION_UPLOAD)": (KEEPS, starved(UP)),
    "bundle_transfers.finish: self._device.record(Stream.WEIGHT_UPLOAD)": (ONE, starved(WEIGHTS_UP)),
    "bundle_transfers._enqueue: self._device.record(Stream.WEIGHT_UPLOAD)": (EVALUATED, starved(WEIGHTS_UP, seed=1)),
    "bundle_transfers.layers_final: self._device.record(Stream.COMPUTE)": (ONE, starved(COMPUTE)),
    "bundle_transfers.finish: self._device.record(Stream.GRADIENT_DOWNLOAD)": (ONE, starved(GRADIENTS_DOWN)),
    "bundle_transfers._enqueue: self._device.record(Stream.GRADIENT_DOWNLOAD)": (ONE, starved(GRADIENTS_DOWN)),
    "orthogonalise._enqueue: device.record(Stream.ACTIVATION_UPLOAD)": (MATRICES, starved(UP)),
    "orthogonalise._enqueue: device.record(Stream.COMPUTE)": (MATRICES, starved(COMPUTE)),
    "orthogonalise._enqueue: device.record(Stream.GRADIENT_DOWNLOAD)": (MATRICES, starved(GRADIENTS_DOWN)),
    "orthogonalise.run: self._device.record(Stream.GRADIENT_DOWNLOAD)": (MATRICES, starved(GRADIENTS_DOWN)),
    "device_worker._finish: self._device.record(Stream.COMPUTE)": (ONE, starved(COMPUTE)),
}
# These decide which copy goes first. Bits do not depend on them, and tests of link turns and of the worker show the
# order that they make.
ONLY_FOR_SPEED = {
    (
        "device_worker.layer_final: "
        "self._device.wait(Stream.GRADIENT_DOWNLOAD, self._device.record(Stream.ACTIVATION_DOWNLOAD))"
    ),
    "device_worker.layer_final: self._device.record(Stream.ACTIVATION_DOWNLOAD)",
    (
        "device_worker._advance_transfers: "
        "self._device.wait(Stream.WEIGHT_UPLOAD, self._device.record(Stream.ACTIVATION_UPLOAD))"
    ),
    "device_worker._advance_transfers: self._device.record(Stream.ACTIVATION_UPLOAD)",
    (
        "device_worker._advance_transfers: "
        "self._device.wait(Stream.GRADIENT_DOWNLOAD, self._device.record(Stream.ACTIVATION_DOWNLOAD))"
    ),
    "device_worker._advance_transfers: self._device.record(Stream.ACTIVATION_DOWNLOAD)",
    "link_turns.turn: device.wait(Stream.WEIGHT_UPLOAD, event)",
    "link_turns.turn: device.record(Stream.WEIGHT_UPLOAD)",
}
# `test_weights_in_files.py` plants this one.
OF_MAPPED_WEIGHTS = {"bundle_transfers._enqueue_piece: self._device.record(Stream.WEIGHT_UPLOAD)"}

OTHERS = {
    # Ordering rules.
    "rule 1: a version is overwritten under an upload": Mutant(
        skipped(Ordering, "before_device_weight_write"), EVALUATED, starved(WEIGHTS_UP)
    ),
    "rule 1: uploads are not announced": Mutant(skipped(Ordering, "expect_upload"), EVALUATED, starved(WEIGHTS_UP)),
    "rule 2: a version is uploaded before it is complete": Mutant(
        skipped(Ordering, "before_upload"), TWO, starved(GRADIENTS_DOWN)
    ),
    "rule 2: a version is posted before its update": Mutant(early_signal("updated"), TWO, hurried(WEIGHTS_UP)),
    "rule 1: device weights that lag are written under the forward's upload": Mutant(
        skipped(Ordering, "before_device_weight_write"), BEHIND, starved(WEIGHTS_UP)
    ),
    "rule 2: a backward uploads device weights that still lag": Mutant(
        skipped(Ordering, "before_upload"), BEHIND, starved(GRADIENTS_DOWN)
    ),
    "rule 3: a layer is updated before its gradient has landed": Mutant(
        gradient_before_it_landed, BEHIND, starved(GRADIENTS_DOWN)
    ),
    "rule 3: a gradient is read before it has landed": Mutant(gradient_before_it_landed, ONE, starved(GRADIENTS_DOWN)),
    "rule 4: a gradient is overwritten before it was consumed": Mutant(
        both(skipped(Ordering, "may_write_gradient", True), skipped(Ordering, "before_gradient_write")),
        LATE,
        starved(),
        late_updates,
    ),
    "rule 4: a gradient is consumed before its update": Mutant(early_signal("gradient_consumed"), LATE, starved()),
    "rule 4: a part is given back before it is added": Mutant(part_given_back_before_it_is_added, PARTS, starved()),
    "rule 9: a look-ahead is uploaded before it is written": Mutant(
        skipped(Ordering, "before_look_ahead_upload"), MATRICES, starved(), late_look_aheads
    ),
    "rule 10: a direction is read before it has landed": Mutant(
        direction_before_it_landed, MATRICES, starved(GRADIENTS_DOWN)
    ),
    # Buffers of the host.
    "a pool forgets which streams still read a buffer": Mutant(
        replaced(HostPool, "give", forgets_who_is_busy), REUSED, starved(UP)
    ),
    "a buffer is given back by the first of two readers": Mutant(
        replaced(HostTensors, "reader_ends", given_back_by_the_first_reader),
        REUSED_BY_ONE,
        starved(UP),
        newest_buffers_first,
    ),
    "a boundary's buffer is given back when it is sent": Mutant(
        replaced(ActivationTransfers, "send", given_back_at_once), REUSED, starved(UP)
    ),
    "integers are written under an upload": Mutant(
        integers_written_at_once, replace(LATE, workers=1, tight_pool=True), starved(UP), newest_buffers_first
    ),
    "a loss is read before it has landed": Mutant(loss_read_before_it_landed, ONE, starved(DOWN)),
    # Memory of devices.
    "a result is copied without a ring": Mutant(
        replaced(ActivationTransfers, "send", temporary_without_a_ring), ONE, starved(DOWN)
    ),
    "a ring's entry is released before the sends": Mutant(
        released_before_the_sends, ONE, starved(COMPUTE), hand_part_of_the_input_on
    ),
    "slots are taken as if they were free, and computation is late": Mutant(
        replaced(SlotRing, "next", never_released), ONE, starved(COMPUTE)
    ),
    "slots are taken as if they were free, and downloads are late": Mutant(
        replaced(SlotRing, "next", never_released), ONE, starved(DOWN)
    ),
    "slots are taken as if they were free, and gradients are late": Mutant(
        replaced(SlotRing, "next", never_released), ONE, starved(GRADIENTS_DOWN)
    ),
    "weights are released when their stage begins": Mutant(weights_released_at_the_start, ONE, starved(COMPUTE)),
    "slots are dropped when they are outgrown": Mutant(
        replaced(SlotRing, "_slot", outgrown_slots_are_dropped),
        replace(LATE, workers=1, growing=True),
        starved(COMPUTE),
    ),
    # Streams.
    "computation on the stream that allocates": Mutant(
        on_stream("_run", COMPUTE, None), ONE, starved(allocating="late")
    ),
    "rounding on the compute stream": Mutant(
        replaced(GradientDownload, "_copy", rounding_on_the_compute_stream), ROUNDED, starved(COMPUTE)
    ),
}
for _asked, _run in ((WEIGHTS_UP, ONE), (UP, ONE), (DOWN, ONE), (GRADIENTS_DOWN, ONE)):
    OTHERS[f"{_asked.value} on the stream that allocates"] = Mutant(
        on_stream("_copy", _asked, None), _run, starved(allocating="late")
    )
for _asked in (COMPUTE, WEIGHTS_UP, UP, DOWN, GRADIENTS_DOWN):
    _taken = DOWN if _asked is not DOWN else UP
    OTHERS[f"events of {_asked.value} recorded on {_taken.value}"] = Mutant(
        on_stream("_record", _asked, _taken), ONE, starved(_asked)
    )

MUTANTS = {
    **{f"no wait at {site}": Mutant(no_wait_at(site), *shown) for site, shown in WAITS.items()},
    **{f"empty event at {site}": Mutant(empty_event_at(site), *shown) for site, shown in EVENTS.items()},
    **OTHERS,
}


@functools.cache
def expected(run: ShortRun, change: Callable[[pytest.MonkeyPatch], None]) -> Outcome:
    with pytest.MonkeyPatch.context() as patch:
        change(patch)
        return execute(run)


def outcome(simulator, mutant, is_planted):
    """Return what comes of a run, and how often the fault came to effect."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.change(patch)
        planted = mutant.plant(patch) if is_planted else None
        try:
            with scheduled(simulator, mutant.schedule) as make:
                return execute(mutant.run, make), planted
        except (PipelineError, RuntimeError) as error:
            return error, planted
        finally:
            simulator.reset()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_and_without_it_the_run_is_exact(simulator, name):
    mutant = MUTANTS[name]
    wanted = expected(mutant.run, mutant.change)
    right, _ = outcome(simulator, mutant, is_planted=False)
    assert isinstance(right, Outcome) and right.equals(wanted), f"the engine itself: {right}"
    for again in range(2):
        wrong, planted = outcome(simulator, mutant, is_planted=True)
        assert planted.times > 0, "the fault came to no effect"
        assert not (isinstance(wrong, Outcome) and wrong.equals(wanted)), f"not seen, try {again}"


@pytest.mark.parametrize("site", sorted(ONLY_FOR_SPEED))
def test_what_only_makes_copies_wait_for_their_turn_changes_no_bit(simulator, site):
    plant = no_wait_at(site) if "device.wait(" in site else empty_event_at(site)
    run = ShortRun("one layer a stage", workers=3, settings=(("turns", ((0, 1, 2),)),))
    for stream in Stream:
        right, planted = outcome(simulator, Mutant(plant, run, hurried(stream)), is_planted=True)
        assert planted.times > 0 and right.equals(expected(run, no_change))


def test_every_wait_and_every_event_of_the_engine_is_in_the_tables():
    sites = {str(site) for method in ("wait", "record") for site in call_sites(method).values()}
    assert sites == WAITS.keys() | EVENTS.keys() | ONLY_FOR_SPEED | OF_MAPPED_WEIGHTS
    assert len(MUTANTS) >= 40
