"""The race checker finds nothing in any mode, and reports a race for each ordering rule whose wait is removed.

A recorded run is judged by what was synchronised, so these verdicts do not depend on timing.
"""

import threading

import pytest
import torch

from tests.support.planting import empty_event_at, no_wait_at
from tests.support.toy import (
    BLOCKS,
    KEPT,
    PARTITIONS,
    ToyBlock,
    ToyEmbedding,
    ToyHead,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    watched,
)
from torchround.engine.board import HandOver
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, BOUNDED, SYNC
from torchround.engine.watch.race_checker import AccessLog, Entry, Region, find_races
from torchround.engine.worker.activation_transfers import ActivationTransfers
from torchround.engine.worker.bundle_transfers import GradientDownload
from torchround.engine.worker.slots import StageSlots
from torchround.layer import LayeredModel

ONE_STAGE = PARTITIONS["one stage"]


def record(
    partition,
    num_devices,
    policy=SYNC,
    tied=False,
    steps=4,
    dtype=torch.float32,
    evaluate=False,
    frozen=(),
    poisoned=False,
    model=None,
    **settings,
):
    """Return the races of a short recorded run. If `poisoned`, no gradient is finite and every update is skipped."""
    log = AccessLog()
    model = model or toy_model(tied)
    for layer in frozen:
        model.layers[layer].requires_grad_(False)
    store = toy_store(model, dtype, policy=policy)
    if poisoned:
        for device_weight in store.bundles[1].device_weights:
            device_weight.fill_(torch.inf)

    def wrap(device):
        return watched(linked(device), log)

    with toy_engine(model, store, partition, num_devices, observer=log, wrap=wrap, **settings) as engine:
        for step, micro_batches in enumerate(toy_batches(steps, micro_batches=4)):
            train_step(engine, micro_batches, evaluate and step == 1)
        engine.drain()
    assert sum(entry.action == "access" for entry in log.entries) > 100
    return find_races(log.entries)


def train_step(engine, micro_batches, evaluate):
    if evaluate:
        engine.evaluate(micro_batches)  # not awaited, so that it runs beside the next step
    result = engine.forward_backward(micro_batches)
    engine.step(1e-2)
    if evaluate:
        result.update()  # first: asking for the evaluation's loss would order the two


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_no_race_for_any_partition_and_device_count(num_devices, partition, policy):
    assert record(PARTITIONS[partition], num_devices, policy, evaluate=True) == []


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize(
    "options",
    [
        {"tied": True},
        {"rounds": 2},
        {"tied": True, "rounds": 2},
        {"frozen": (0, 2, 3)},
        {"dtype": torch.bfloat16},
        {"dtype": torch.bfloat16, "layerwise_recompute": True, "rounds": 4},
    ],
    ids=str,
)
def test_no_race_with_tied_frozen_rounded_and_several_rounds(options, policy):
    assert record(PARTITIONS["backward coarser"], 3, policy, **options) == []


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=lambda policy: policy.name)
@pytest.mark.parametrize("num_devices", [1, 3])
@pytest.mark.parametrize("kept", KEPT)
def test_no_race_with_kept_activations(kept, num_devices, policy):
    """Micro-batches of the next round or step find buffers and slots that kept activations have left."""
    options = {"kept": KEPT[kept], "rounds": 2, "evaluate": True, "steps": 3}
    for partition in ("one layer a stage", "backward coarser"):
        assert record(PARTITIONS[partition], num_devices, policy, **options) == []


@pytest.mark.parametrize(("policy", "stale_layers"), [(BOUNDED, 3), (ASYNC_PREDICT, 0)], ids=["stale", "predict"])
@pytest.mark.parametrize("num_devices", [1, 3])
def test_no_race_around_an_evaluation_of_the_true_weights(monkeypatch, num_devices, policy, stale_layers):
    """Evaluations before and inside it are not awaited, so that their uploads may run when the weights are replaced."""
    assert evaluate_true_weights(policy, num_devices, stale_layers) == []
    monkeypatch.setattr(Ordering, "before_rewrite", lambda *arguments: None)
    assert evaluate_true_weights(policy, num_devices, stale_layers) != []


def evaluate_true_weights(policy, num_devices, stale_layers):
    log, model, batches = AccessLog(), toy_model(tied=True), toy_batches(3, micro_batches=4)
    store = toy_store(model, policy=policy)
    options = {"observer": log, "wrap": lambda device: watched(linked(device), log), "stale_layers": stale_layers}
    with toy_engine(model, store, PARTITIONS["backward coarser"], num_devices, **options) as engine:
        for micro_batches in batches:
            train_step(engine, micro_batches, evaluate=False)
            engine.evaluate(micro_batches)
            with engine.true_device_weights():
                engine.evaluate(micro_batches)
    return find_races(log.entries)


KEPT_SITES = [
    no_wait_at("kept_transfers.bring: self._device.wait(Stream.COMPUTE, staged.uploaded)"),
    no_wait_at("kept_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, slot.released)"),
    no_wait_at("kept_transfers._upload: device.wait(Stream.ACTIVATION_UPLOAD, value.landed)"),
    empty_event_at("kept_transfers.end_micro_batch: self._device.record(Stream.COMPUTE)"),
    empty_event_at("kept_transfers._upload: device.record(Stream.ACTIVATION_UPLOAD)"),
    no_wait_at("activation_transfers.send: device.wait(Stream.COMPUTE, slot.released)"),
    no_wait_at("activation_transfers.send: device.wait(Stream.ACTIVATION_DOWNLOAD, device.record(Stream.COMPUTE))"),
]


@pytest.mark.parametrize("plant", KEPT_SITES)
def test_each_wait_of_kept_activations_orders_something(monkeypatch, plant):
    planted = plant(monkeypatch)
    assert record(PARTITIONS["backward coarser"], 3, kept=KEPT["all"], steps=2) != []
    assert planted.times > 0


class PassingBlock(ToyBlock):
    """A block that hands the second tensor of its input on as it came."""

    def forward(self, hidden, micro_batch):
        first, second = hidden
        return super().forward(first, micro_batch), second


class TwoTensorEmbedding(ToyEmbedding):
    def forward(self, hidden, micro_batch):
        embedded = super().forward(hidden, micro_batch)
        return embedded, embedded.detach() * 0.5


class TwoTensorHead(ToyHead):
    def forward(self, hidden, micro_batch):
        return super().forward(hidden[0] + hidden[1], micro_batch)


def passing_model():
    """Return a toy model whose blocks pass a part of their input on, so that what they send lies in a ring slot."""
    blocks = [PassingBlock() for _ in range(BLOCKS)]
    return LayeredModel(toy_model().names, (TwoTensorEmbedding(), *blocks, TwoTensorHead(None)))


@pytest.mark.parametrize("released_early", [False, True])
@pytest.mark.parametrize("partition", ["one layer a stage", "forward coarser"])
def test_a_ring_slot_is_released_after_its_content_is_sent_on(monkeypatch, partition, released_early):
    """The next upload but one would overwrite what `send` still copies."""
    if released_early:
        end, send = ActivationTransfers.end_micro_batch, ActivationTransfers.send

        def release_and_send(transfers, *arguments, **options):
            staged = list(transfers.inputs)
            end(transfers)
            transfers.inputs += staged  # `send` is to know them still, but their release stays the early one
            send(transfers, *arguments, **options)
            transfers.inputs.clear()

        monkeypatch.setattr(ActivationTransfers, "send", release_and_send)
    assert bool(record(PARTITIONS[partition], 1, model=passing_model())) is released_early


@pytest.mark.parametrize("what", ["for_weights", "for_gradients"])
@pytest.mark.parametrize("partition", ["one layer a stage", "backward coarser"])
def test_a_stage_slot_is_written_only_after_the_one_before_the_last_is_released(monkeypatch, partition, what):
    take = getattr(StageSlots, what)

    def taken_at_once(slots, stage):
        found = take(slots, stage)
        (found if what == "for_gradients" else found[1]).released = None
        return found

    monkeypatch.setattr(StageSlots, what, taken_at_once)
    assert record(PARTITIONS[partition], 1) != []


@pytest.mark.parametrize("too_early", [False, True])
def test_a_layers_gradients_leave_early_but_not_before_its_own_backward(monkeypatch, too_early):
    if too_early:
        final = GradientDownload.layers_final
        monkeypatch.setattr(
            GradientDownload, "layers_final", lambda download, first: final(download, max(first - 1, 0))
        )
    assert bool(record(ONE_STAGE, 1, steps=2)) is too_early


def test_rule_1_a_version_is_overwritten_only_after_its_uploads(monkeypatch):
    """The evaluation on device 0 still reads the version that the step on device 1 replaces."""
    assert record(ONE_STAGE, 3, evaluate=True, steps=2) == []
    monkeypatch.setattr(Ordering, "before_device_weight_write", lambda *_: None)
    assert record(ONE_STAGE, 3, evaluate=True, steps=2)


@pytest.mark.parametrize("stale_layers", [0, 1, 3, 5])
@pytest.mark.parametrize(
    "options",
    [{"evaluate": True}, {"tied": True, "dtype": torch.bfloat16}, {"layerwise_recompute": True}, {"poisoned": True}],
    ids=str,
)
def test_no_race_with_bounded_updates(options, stale_layers):
    """Gradients leave early at every stage, and device weights that lag are written between two kinds of uploads."""
    for num_devices, partition in ((1, "backward coarser"), (3, "one layer a stage"), (8, "backward coarser")):
        options = {**options, "policy": BOUNDED, "stale_layers": stale_layers, "steps": 3}
        assert record(PARTITIONS[partition], num_devices, **options) == []


def test_no_race_with_bounded_updates_and_kept_activations():
    kept = tuple(() if layer < 2 else names for layer, names in enumerate(KEPT["all"]))
    options = {"policy": BOUNDED, "stale_layers": 2, "kept": kept, "steps": 3}
    assert record(PARTITIONS["forward coarser"], 3, **options) == []


@pytest.mark.parametrize("rule", ["before_device_weight_write", "before_upload"])
def test_rules_1_and_2_order_the_late_write_of_device_weights(monkeypatch, rule):
    """Rule 1 holds it back for the step's forward, rule 2 holds back the backward. No evaluation is needed to see it."""
    options = {"policy": BOUNDED, "stale_layers": 5, "steps": 3}
    monkeypatch.setattr(Ordering, rule, lambda *_: None)
    assert record(PARTITIONS["backward coarser"], 3, **options)


def test_the_input_of_a_layer_that_begins_anew_stays_until_its_backward_has_read_it(monkeypatch):
    """The first backward stage of the model shows it: elsewhere the wait for the stage's own input comes before."""
    bring_hidden = ActivationTransfers.bring_hidden

    def bring(transfers, boundary, restarts=False):
        found = bring_hidden(transfers, boundary, restarts)
        if restarts:
            transfers.inputs.pop()
        return found

    options = {"policy": BOUNDED, "stale_layers": 5, "steps": 2}
    assert record(PARTITIONS["forward coarser"], 2, **options) == []
    monkeypatch.setattr(ActivationTransfers, "bring_hidden", bring)
    assert record(PARTITIONS["forward coarser"], 2, **options)


def test_rule_2_an_upload_waits_for_the_complete_version(monkeypatch):
    monkeypatch.setattr(Ordering, "before_upload", lambda *_: None)
    assert record(PARTITIONS["forward coarser"], 3)


def test_rule_3_a_gradient_is_read_only_after_it_landed(monkeypatch):
    monkeypatch.setattr(
        Ordering, "retire", lambda *_: None
    )  # otherwise hand-overs are forgotten that the optimizer runs past
    monkeypatch.setattr(Ordering, "before_gradient_read", lambda *_: None)
    assert record(PARTITIONS["forward coarser"], 3)


def test_rule_4_a_gradient_is_overwritten_only_after_it_was_consumed(monkeypatch):
    """Rule 2 implies it in sync; in async the next step's backward overtakes the update."""
    monkeypatch.setattr(Ordering, "before_gradient_write", lambda *_: None)
    assert record(PARTITIONS["forward coarser"], 3, ASYNC)


@pytest.mark.parametrize("rule_holds", [True, False])
def test_rule_5_updates_of_a_layer_follow_each_other(monkeypatch, rule_holds):
    """One optimizer thread orders its own updates. With a thread for each update, only the rule does.

    An update that reads its gradient follows the previous one by rules 3 and 4 alone. A skipped one, which
    carries the weights over to the next version, does not.
    """
    monkeypatch.setattr(OptimizerWorker, "_update", on_a_thread_of_its_own(OptimizerWorker._update))
    if not rule_holds:
        monkeypatch.setattr(Ordering, "before_update", lambda *_: None)
    races = record(PARTITIONS["forward coarser"], 3, ASYNC, poisoned=True)
    assert bool(races) is not rule_holds


HANDED_OVER = HandOver[None]("step {0} to be updated")


def on_a_thread_of_its_own(update):
    def start(worker, step, lr):
        def run():
            worker._board.wait(HANDED_OVER(step))
            update(worker, step, lr)

        worker._board.signal(HANDED_OVER(step))
        threading.Thread(target=run, name=f"update {step}").start()

    return start


def region(start, stop):
    return (Region(0, start, stop),)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        pytest.param(
            [Entry("a", "access", writes=region(0, 8)), Entry("b", "access", reads=region(4, 12))],
            1,
            id="unordered overlap",
        ),
        pytest.param(
            [Entry("a", "access", writes=region(0, 8)), Entry("b", "access", reads=region(8, 12))],
            0,
            id="disjoint bytes",
        ),
        pytest.param(
            [Entry("a", "access", reads=region(0, 8)), Entry("b", "access", reads=region(0, 8))], 0, id="two reads"
        ),
        pytest.param(
            [
                Entry("a", "access", writes=region(0, 8)),
                Entry("a", "signal", "done"),
                Entry("c", "wait", "done"),
                Entry("c", "signal", "passed on"),
                Entry("b", "wait", "passed on"),
                Entry("b", "access", writes=region(0, 8)),
            ],
            0,
            id="ordered through a third actor",
        ),
        pytest.param(
            [
                Entry("a", "signal", "too early"),
                Entry("a", "access", writes=region(0, 8)),
                Entry("b", "wait", "too early"),
                Entry("b", "access", reads=region(0, 8)),
            ],
            1,
            id="signal before the write",
        ),
        pytest.param(
            [
                Entry("a", "access", writes=region(0, 4)),
                Entry("b", "access", writes=region(4, 8)),
                Entry("a", "signal", "a"),
                Entry("c", "wait", "a"),
                Entry("c", "access", reads=region(0, 8)),
            ],
            1,
            id="one of two writers heard of",
        ),
    ],
)
def test_the_checker_itself_on_hand_written_logs(entries, expected):
    assert len(find_races(entries)) == expected
