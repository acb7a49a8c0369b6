"""Weights between machines: at the start of a run, after each update, and rewritten for a validation."""

import threading
from dataclasses import replace

import pytest
import torch

from tests.support.faults import kind_of, this_thread
from tests.support.frozen_base import frozen_model, mapped_store, write_base
from tests.support.machines import run_machines
from tests.support.shared_steps import Case, assert_equal_to_one_machine, train_shared
from tests.support.toy import PARTITIONS, toy_batches, toy_engine, toy_model, toy_store
from torchround.engine.board import Observer
from torchround.engine.exchange.start import received_bytes, share_weights
from torchround.engine.exchange.weights import WEIGHT_JOB
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, SYNC
from torchround.engine.store.ownership import Ownership
from torchround.engine.store.prediction import Prediction
from torchround.machines.links import Purpose
from torchround.pipeline.machine_shares import step_share

BATCHES = toy_batches(4, micro_batches=8)
HELD_OUT = toy_batches(1, micro_batches=2, seed=5)[0]
POLICIES = {"sync": SYNC, "async": ASYNC, "predict": ASYNC_PREDICT}


def device_weights(store):
    """Return clones of each bundle's device weights, newest first."""
    return [
        [bundle.version(store.step - age).clone() for age in range(len(bundle.device_weights))]
        for bundle in store.bundles
    ]


def assert_same_weights(found, expected):
    for ours, theirs in zip(found, expected, strict=True):
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


# At the start.


@pytest.mark.parametrize(("policy", "num_machines"), [("async", 2), ("predict", 3)])
def test_every_machine_starts_with_the_weights_of_one(policy, num_machines):
    """Older versions that differ from the newest, as after a resume, arrive too; the step may be odd."""

    def fill(store):
        for bundle in store.owned:
            generator = torch.Generator().manual_seed(bundle.index)
            for buffer in (*bundle.state(), *bundle.device_weights):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 9)
        store.resume(3, applied_updates=3, prediction=Prediction(1e-2, {"betas": (0.9, 0.95), "eps": 1e-8}).state())
        return store

    options = {"dtype": torch.bfloat16, "policy": POLICIES[policy]}
    expected = device_weights(fill(toy_store(toy_model(tied=True), **options)))

    def start(group):
        store = fill(toy_store(toy_model(tied=True), **options, ownership=Ownership(group.rank, group.size)))
        received = []
        share_weights(store, group, received.append)
        return device_weights(store), sum(received), received_bytes(store)

    for found, received, announced in run_machines(num_machines, start):
        assert_same_weights(found, expected)
        assert received == announced > 0


def test_frozen_weights_travel_only_where_they_differ(tmp_path):
    """Machine 1 has another value in one frozen layer; the mapped base stays in its file."""

    def start(group):
        store = toy_store(frozen_model(), ownership=Ownership(group.rank, group.size))
        frozen = [bundle for bundle in store.bundles if not bundle.trainable and bundle.owner == 0]
        if group.rank == 1:
            frozen[0].device_weights[0][3] += 1.0
        received = []
        share_weights(store, group, received.append)
        unlike = frozen[0].device_weights[0].nbytes if group.rank == 1 else 0
        return device_weights(store), sum(received), received_bytes(store) + unlike

    def start_mapped(group):
        store = mapped_store(frozen_model(), base, ownership=Ownership(group.rank, group.size))
        received = []
        share_weights(store, group, received.append)
        return device_weights(store), sum(received), received_bytes(store)

    base = write_base(tmp_path / "base.safetensors")
    for function, expected in (
        (start, device_weights(toy_store(frozen_model()))),
        (start_mapped, device_weights(mapped_store(frozen_model(), base))),
    ):
        for found, received, announced in run_machines(2, function):
            assert_same_weights(found, expected)
            assert received == announced


# After updates.


class LateWeights(Observer):
    """An observer that lets no thread receive the weights of an exchange before it is due."""

    def __init__(self, num_steps):
        # All are made here: threads that ask for a missing one at the same time would each make their own.
        self.due = {step: threading.Event() for step in range(-2, num_steps)}

    def waited(self, token):
        if kind_of(token) is WEIGHT_JOB and this_thread().startswith("torchround weights from"):
            assert self.due[token.number].wait(20.0)


def test_weights_that_arrive_as_late_as_they_may_stop_no_step():
    """Machine 0 receives the weights that a step reads only when the step is to be dispatched."""
    batches = [batch[:1] for batch in BATCHES]
    expected = Case(batches, store={"policy": ASYNC}, rounds=3).run().losses

    def run(group):
        model, late, results = toy_model(), LateWeights(len(batches)), []
        store = toy_store(model, policy=ASYNC, ownership=Ownership(group.rank, group.size))
        share_weights(store, group)
        options = {"machines": group, "observer": late if group.rank == 0 else None}
        with toy_engine(model, store, PARTITIONS["forward coarser"], 2, **options) as engine:
            for step, batch in enumerate(batches):
                late.due[step - 2].set()
                share = step_share(1, 1, group.rank, group.size)
                own = [batch[index] for index in share.micro_batches]
                results.append(engine.forward_backward(own, share, batch[0].num_labels()))
                engine.step(1e-2)
            for step in range(len(batches)):
                late.due[step].set()
            engine.drain()
        return [result.loss() for result in results]

    assert run_machines(3, run) == [expected] * 3


# Only what an update changed.


@pytest.mark.parametrize("policy", ["async", pytest.param("sync", marks=pytest.mark.nightly)])
def test_compressed_weights_have_the_same_bits_and_fewer_bytes(policy):
    """Small steps in bfloat16 change few weights, and a spike skips one. A large step sends the weights themselves."""
    case = Case([batch[:4] for batch in BATCHES], store={"policy": POLICIES[policy]}, dtype=torch.bfloat16)
    sent = {}
    for compresses in (False, True):
        settings = {"compress_weights": compresses}
        found = assert_equal_to_one_machine(replace(case, lr=1e-5, spikes=(0.01, 1), settings=settings), 2)
        assert 0 < sum(update.skipped for update in found[0].updates) < 4
        updates = [update for outcome in found for update in outcome.updates]
        sent[compresses] = sum(update.sent_bytes for update in updates)
        assert (sum(update.saved_bytes for update in updates) > 0) is compresses
    assert sent[True] < 0.8 * sent[False]  # gradients are half of all bytes
    found = assert_equal_to_one_machine(replace(case, settings=settings), 2)
    assert found[0].updates[1].saved_bytes == 0


# Rewritten for a validation.


def validated(group, model, rounds):
    """Train and validate in turn. Every machine computes the same validation here."""
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    layers = model()
    store = toy_store(layers, torch.bfloat16, policy=ASYNC_PREDICT, ownership=Ownership(rank, size))
    if group is not None:
        share_weights(store, group)
    found = []
    with toy_engine(layers, store, PARTITIONS["forward coarser"], 2, machines=group, rounds=rounds) as engine:
        for batch in BATCHES[:3]:
            found += [result.loss() for result in train_shared(engine, [batch], rank, size)]
            found.append(engine.evaluate(HELD_OUT).loss())
            with engine.true_device_weights():
                found.append(engine.evaluate(HELD_OUT).loss())
            assert found[-1] != found[-2], "the predictions equal the true weights"
    return found


def test_a_validation_of_the_true_weights_gives_the_losses_of_one_machine():
    expected = validated(None, toy_model, rounds=2)
    for found in run_machines(2, lambda group: validated(group, toy_model, rounds=1)):
        assert found == expected


@pytest.mark.parametrize("policy", [SYNC, ASYNC], ids=["sync", "async"])
def test_a_validation_sends_nothing_if_the_device_weights_are_the_true_ones(policy):
    def run(group):
        model = toy_model()
        store = toy_store(model, policy=policy, ownership=Ownership(group.rank, group.size))
        share_weights(store, group)
        with toy_engine(model, store, PARTITIONS["forward coarser"], 2, machines=group) as engine:
            train_shared(engine, BATCHES[:1], group.rank, group.size)
            link, sent = group.links.sender(1 - group.rank, Purpose.WEIGHTS), []
            for _ in range(2):
                sent.append(link.bytes_sent)
                with engine.true_device_weights():
                    engine.evaluate(HELD_OUT).loss()
            sent.append(link.bytes_sent)
        return sent

    for sent in run_machines(2, run):
        assert len(set(sent)) == 1 and sent[0] > 0


def test_an_exception_in_a_validation_does_not_wait_for_the_other_machines():
    def run(group):
        model = toy_model()
        store = toy_store(model, policy=ASYNC_PREDICT, ownership=Ownership(group.rank, group.size))
        share_weights(store, group)
        with toy_engine(model, store, PARTITIONS["forward coarser"], 2, machines=group) as engine:
            train_shared(engine, BATCHES[:1], group.rank, group.size)
            with engine.true_device_weights():
                if group.rank == 0:
                    raise ValueError("machine 0 ends here")
                group.channel("validation").gather(None, "what machine 0 never gives")

    with pytest.raises(ValueError, match="machine 0 ends here"):
        run_machines(2, run)
