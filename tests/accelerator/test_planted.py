"""Every fault that is planted in the order of a device's streams is found: bits differ, or a named error is raised.

Each fault has a run and a schedule under which the engine is exact, and wrong with the fault. The schedule says which
streams are starved or hurried; nothing depends on the speed of the machine. A fault is at a place as the engine names it
(`what` of `Device.wait` and `Device.record`).
"""

import functools
from dataclasses import replace

import pytest
import torch

from tests.support.faults import Unordered
from tests.support.scheduled_run import Outcome, ShortRun, execute, hurried, scheduled, starved
from tests.support.toy import watched
from torchround.engine.board import Observer
from torchround.engine.device import AcceleratorDevice, Stream
from torchround.engine.errors import PipelineError
from torchround.planning.update_modes import ASYNC, BOUNDED

COMPUTE, WEIGHTS_UP, UP, DOWN, GRADIENTS_DOWN = Stream


ONE = ShortRun()
REUSED = ShortRun(workers=2, tight_pool=True)
# Which worker takes a host buffer first is chance, so there are many of them, and this fault has several tries.
REUSED_OFTEN = replace(REUSED, partition="one layer a stage", micro_batches=4, steps=3)
TRIES = 5
LATE = ShortRun(workers=2, mode=ASYNC, steps=4)
EVALUATED = ShortRun("one stage", workers=3, evaluates=True, steps=3)
MATRICES = ShortRun(optimizer="muon")

WAITS = {
    "a free slot to pack into": (ONE, hurried(COMPUTE)),
    "packed tensors": (ONE, starved(COMPUTE)),
    "a free host buffer": (REUSED_OFTEN, hurried(DOWN)),
    "a free slot for an input": (ONE, hurried(UP)),
    "an input in host memory": (ONE, hurried(UP)),
    "an uploaded input": (ONE, starved(UP)),
    "a free slot for weights": (ONE, starved(COMPUTE)),
    "final gradients": (ONE, starved(COMPUTE)),
    "a free slot for a look-ahead": (MATRICES, starved(GRADIENTS_DOWN)),
    "an uploaded look-ahead": (MATRICES, starved(UP)),
    "a direction": (MATRICES, starved(COMPUTE)),
    "uploaded weights": (ONE, starved(WEIGHTS_UP)),
    "a free slot for gradients": (ONE, starved(GRADIENTS_DOWN)),
}
EVENTS = {
    "inputs that are read": (ONE, hurried(UP)),
    "sent tensors": (ONE, starved(DOWN)),
    "an uploaded input": (ONE, starved(UP)),
    "uploaded weights": (ONE, starved(WEIGHTS_UP)),
    "an uploaded version": (EVALUATED, starved(WEIGHTS_UP, seed=1)),
    "sent gradients": (ONE, starved(GRADIENTS_DOWN)),
    "a landed gradient": (ONE, starved(GRADIENTS_DOWN)),
    "a sent direction": (MATRICES, starved(GRADIENTS_DOWN)),
    "landed directions": (MATRICES, starved(GRADIENTS_DOWN)),
    "weights that are read": (ONE, starved(COMPUTE)),
}
# These stand for a wait for an event that is recorded on the spot: without either, the same is missing.
ON_THE_SPOT = {"packed tensors", "final gradients", "an uploaded look-ahead", "a direction"}
# It decides which copy goes first. Bits do not depend on it, and tests of the worker show the order.
ONLY_FOR_SPEED = {"activations on their way"}
FINEST = ShortRun("one layer a stage", workers=3)

FAULTS = {
    **{f"no wait for {place}": (Unordered(place, "no wait"), *shown) for place, shown in WAITS.items()},
    **{f"no event for {place}": (Unordered(place, "empty event"), *shown) for place, shown in EVENTS.items()},
}
# Runs in which what the engine does itself shows if it is wrong: who gives a buffer back, and when.
EXACT = {
    "buffers with two readers": (replace(REUSED, partition="one layer a stage", workers=1), starved(UP)),
    "integers of one step after the other": (replace(LATE, workers=1, tight_pool=True), starved(UP)),
    "rounded gradients": (ShortRun(dtype=torch.bfloat16), starved(COMPUTE)),
    "slots that grow": (replace(LATE, workers=1, growing=True), starved(COMPUTE)),
    "an allocating stream that is late": (ONE, starved(allocating="late")),
}


class Seen(Observer):
    def __init__(self):
        self.waits_for, self.events = set(), set()

    def waits(self, device, stream, event, what):
        self.waits_for.add(what)
        return event

    def recorded(self, device, stream, event, what):
        self.events.add(what)
        return event


@functools.cache
def expected(run):
    seen = Seen()
    return execute(run, lambda device, worker: watched(AcceleratorDevice(device, worker), seen)), seen


def outcome(simulator, run, schedule, fault=None):
    try:
        with scheduled(simulator, schedule) as make:
            return execute(run, make if fault is None else lambda *which: watched(make(*which), fault))
    except (PipelineError, RuntimeError) as error:
        return error
    finally:
        simulator.reset()


FOUND_EXACT = set()


def assert_exact(simulator, run, schedule):
    wanted, _ = expected(run)
    if (run, str(schedule)) not in FOUND_EXACT:
        right = outcome(simulator, run, schedule)
        assert isinstance(right, Outcome) and right.equals(wanted), f"the engine itself: {right}"
        FOUND_EXACT.add((run, str(schedule)))
    return wanted


def is_wrong(found, wanted):
    return not (isinstance(found, Outcome) and found.equals(wanted))


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_and_without_it_the_run_is_exact(simulator, name):
    fault, run, schedule = FAULTS[name]
    wanted = assert_exact(simulator, run, schedule)
    tries = TRIES if run is REUSED_OFTEN else 1
    assert any(is_wrong(outcome(simulator, run, schedule, fault), wanted) for _ in range(tries))
    assert fault.times > 0, "the fault came to no effect"


@pytest.mark.parametrize("name", EXACT)
def test_the_engine_is_exact_where_its_buffers_are_used_again_at_once(simulator, name):
    assert_exact(simulator, *EXACT[name])


class OnlyForSpeed(Unordered):
    """All waits at once that only choose which copy goes first."""

    def waits(self, device, stream, event, what):
        self.place = what if what in ONLY_FOR_SPEED else None
        return super().waits(device, stream, event, what)


@pytest.mark.parametrize("stream", Stream)
def test_what_only_makes_copies_wait_for_their_turn_changes_no_bit(simulator, stream):
    fault = OnlyForSpeed(None, "no wait")
    right = outcome(simulator, FINEST, hurried(stream), fault)
    assert fault.times > 0 and right.equals(expected(FINEST)[0])


def test_every_wait_and_every_event_of_the_engine_is_in_the_tables(simulator):
    runs = {run for _, run, _ in FAULTS.values()} | {FINEST, ShortRun(workers=2, mode=BOUNDED)}
    seen = [expected(run)[1] for run in runs]
    waits, events = (set().union(*(getattr(one, name) for one in seen)) for name in ("waits_for", "events"))
    assert waits - ONLY_FOR_SPEED == WAITS.keys()
    assert events - ONLY_FOR_SPEED == EVENTS.keys() | ON_THE_SPOT
