"""Weights between machines: at the start of a run, after each update, and rewritten for a validation."""

import operator
import threading
from dataclasses import replace

import pytest
import torch

from tests.support.engine_rows import Row, assert_same, together, validate_true_weights
from tests.support.faults import DECIDED, kind_of, this_thread
from tests.support.frozen_base import frozen_model, mapped_store, write_base
from tests.support.machines import run_machines
from tests.support.toy import toy_batches, toy_model, toy_store
from torchround.engine.board import Observer
from torchround.engine.exchange import share_weights
from torchround.engine.store.bundles import Ownership
from torchround.machines.links import Purpose
from torchround.planning.update_modes import ASYNC, ASYNC_PREDICT

BATCHES = toy_batches(4, micro_batches=4)
MODES = {"async": ASYNC, "predict": ASYNC_PREDICT}


def device_weights(store):
    return [
        [bundle.version(store.step - age).clone() for age in range(len(bundle.device_weights))]
        for bundle in store.bundles
    ]


def assert_same_weights(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def shared(store, group, unlike_bytes=0):
    share_weights(store, group)
    own = sum(weights.nbytes for bundle in store.owned for weights in bundle.device_weights)
    sent = sum(group.link(peer, Purpose.WEIGHTS).bytes_sent for peer in group.peers)
    return device_weights(store), sent, own * len(group.peers) + unlike_bytes


@pytest.mark.parametrize(("mode", "num_machines"), [("async", 2), ("predict", 3)])
def test_every_machine_starts_with_the_weights_of_one(mode, num_machines):
    """Older versions that differ from the newest, as after a resume, arrive too; the step may be odd."""

    def fill(store):
        for bundle in store.owned:
            generator = torch.Generator().manual_seed(bundle.index)
            for buffer in (*bundle.state(), *bundle.device_weights):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 9)
        store.resume(3, applied_updates=3, prediction={"lr": 1e-2})
        return store

    options = {"dtype": torch.bfloat16, "mode": MODES[mode]}
    expected = device_weights(fill(toy_store(toy_model(tied=True), **options)))

    def start(group):
        store = fill(toy_store(toy_model(tied=True), **options, ownership=Ownership(group.rank, group.size)))
        return shared(store, group)

    for found, sent, expected_bytes in run_machines(num_machines, start):
        assert_same_weights(found, expected)
        assert sent == expected_bytes > 0


def test_frozen_weights_travel_only_where_they_differ(tmp_path):
    def start(group):
        store = toy_store(frozen_model(), ownership=Ownership(group.rank, group.size))
        frozen = [bundle for bundle in store.bundles if not bundle.trainable and bundle.owner == 0]
        if group.rank == 1:
            frozen[0].device_weights[0][3] += 1.0
        return shared(store, group, frozen[0].device_weights[0].nbytes if group.rank == 0 else 0)

    def start_mapped(group):
        return shared(mapped_store(frozen_model(), base, ownership=Ownership(group.rank, group.size)), group)

    base = write_base(tmp_path / "base.safetensors")
    for function, expected in (
        (start, device_weights(toy_store(frozen_model()))),
        (start_mapped, device_weights(mapped_store(frozen_model(), base))),
    ):
        for found, sent, expected_bytes in run_machines(2, function):
            assert_same_weights(found, expected)
            assert sent == expected_bytes


class LateWeights(Observer):
    def __init__(self, num_steps):
        # All are made here: threads that ask for a missing one at the same time would each make their own.
        self.due = {step: threading.Event() for step in range(-2, num_steps)}

    def waited(self, token):
        if kind_of(token) == DECIDED and this_thread().startswith("torchround weights from"):
            assert self.due[token.task.step].wait(20.0)


def test_weights_that_arrive_as_late_as_they_may_stop_no_step():
    row = Row(2, 3, "forward", "async", batches=[batch[:1] for batch in BATCHES])

    def run(group):
        late, steps = LateWeights(len(BATCHES)), iter(range(len(BATCHES)))

        def set_due(engine):
            step = next(steps)
            late.due[step - 1].set()
            if step == len(BATCHES) - 1:
                late.due[step].set()
            return []

        late.due[-2].set()
        return replace(row, after_step=set_due).run(group, observer=late if group.rank == 0 else None)

    assert_same(together(run_machines(3, run)), row.alone().run())


def test_a_spike_skips_the_step_on_all_machines():
    row = Row(2, 2, "forward", "async", batches=BATCHES, spikes=(0.01, 1))
    alone = row.alone().run()
    assert 0 < sum(alone.skipped) < len(BATCHES)
    assert_same(row.run_all(), alone)


def test_a_validation_of_the_true_weights_gives_the_losses_of_one_machine():
    row = Row(2, 2, "forward", "predict", dtype="bf16", batches=BATCHES[:3], after_step=validate_true_weights)
    found = row.run_all()
    assert_same(found, row.alone().run())
    predicted, true = found.evaluated[0:-1:2], found.evaluated[1::2]
    assert list(map(operator.ne, predicted, true)) == [True] * 3


@pytest.mark.parametrize("update", ["sync", "async"])
def test_a_validation_sends_nothing_if_the_device_weights_are_the_true_ones(update):
    def run(group):
        link, sent = group.link(1 - group.rank, Purpose.WEIGHTS), []

        def validate(engine):
            engine.drain()
            sent.append(link.bytes_sent)
            for _ in range(2):
                validate_true_weights(engine)
                sent.append(link.bytes_sent)
            return []

        Row(2, 2, "forward", update, batches=BATCHES[:1], after_step=validate).run(group)
        return sent

    for sent in run_machines(2, run):
        assert len(set(sent)) == 1 and sent[0] > 0


def test_an_exception_in_a_validation_does_not_wait_for_the_other_machines():
    def run(group):
        def leave(engine):
            engine.drain()
            with engine.true_device_weights():
                if group.rank == 0:
                    raise ValueError("machine 0 ends here")
                group.channel("validation").gather(None, "what machine 0 never gives")

        Row(2, 2, "forward", "predict", batches=BATCHES[:1], after_step=leave).run(group)

    with pytest.raises(ValueError, match="machine 0 ends here"):
        run_machines(2, run)
