"""Faults with every optimizer and state format: updates that fail half-way, and steps that are left out."""

import functools
import math

import pytest
import torch

from tests.support import toy
from tests.support.faults import Bomb, before, copied
from tests.support.optimizers import OPTIMIZERS
from tests.support.reference import Reference
from tests.support.toy import ToyHead, assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.errors import PipelineError
from torchround.engine.store.bundles import ASYNC, SYNC
from torchround.optim import make_optimizer, update_pass

LR = 1e-2
BATCHES = toy_batches(4, micro_batches=3)
PARTITION = toy.PARTITIONS["one layer a stage"]
# By default each optimizer with one policy: async with compact state, sync with exact.
MODES = [
    pytest.param(name, policy, marks=() if ("compact" in name) == (policy is ASYNC) else pytest.mark.nightly)
    for name in OPTIMIZERS
    for policy in (SYNC, ASYNC)
]


def made(name, policy, dtype=torch.bfloat16, **options):
    return toy_store(toy_model(), dtype, policy=policy, optimizer=make_optimizer(OPTIMIZERS[name]), **options)


def engine_of(name, store, num_devices=2):
    return toy_engine(toy_model(), store, PARTITION, num_devices, optimizer=OPTIMIZERS[name])


@functools.cache
def undisturbed(name, policy):
    """Return the state after 0, 1, .. steps and each step's loss."""
    store = made(name, policy)
    states, losses = [copied(store)], []
    with engine_of(name, store, 1) as engine:
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(copied(store))
    return states, losses


@pytest.mark.parametrize(("name", "policy"), MODES, ids=str)
@pytest.mark.parametrize("hit", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_update_that_fails_half_way_is_completed_and_training_continues_from_it(monkeypatch, name, policy, hit):
    bomb, store = Bomb("commit_", hit=hit), made(name, policy)
    with monkeypatch.context() as patch:
        patch.setattr(update_pass, "CHUNK_ELEMENTS", 256)
        before(patch, update_pass, "commit_", bomb)
        with pytest.raises(PipelineError, match="planted") as raised, engine_of(name, store) as engine:
            train(engine, BATCHES)
    assert raised.value.__cause__ is bomb.raised is not None
    states, losses = undisturbed(name, policy)
    assert store.is_consistent and store.step == 1
    assert_same_state(copied(store), states[1])
    with engine_of(name, store, 3) as engine:
        assert train(engine, BATCHES[1:]) == losses[1:]
    assert_same_state(copied(store), states[-1])


BAD = 1  # the step whose gradient is not finite


def break_a_gradient(monkeypatch):
    """Let the gradient of step `BAD` be infinite, and leave its loss as it is."""
    forward, bad = ToyHead.forward, BATCHES[BAD][0].tokens

    def breaking(head, hidden, micro_batch):
        passed = hidden * 1.0
        if passed.requires_grad and torch.equal(micro_batch.tokens, bad):
            passed.register_hook(lambda gradient: gradient * math.inf)
        return forward(head, passed, micro_batch)

    monkeypatch.setattr(ToyHead, "forward", breaking)


@pytest.mark.parametrize(("name", "policy"), MODES, ids=str)
def test_a_step_whose_gradient_is_not_finite_touches_no_state(monkeypatch, name, policy):
    break_a_gradient(monkeypatch)
    store, states = made(name, policy), []
    loop = Reference.of(toy_model(), store, OPTIMIZERS[name])
    with engine_of(name, store, 3) as engine:
        for step, batch in enumerate(BATCHES):
            result = engine.forward_backward(batch)
            engine.step(LR)
            assert result.update().skipped is (step == BAD)
            engine.drain()
            states.append({key: view for key, view in copied(store).items() if not key.startswith("master_")})
    assert (store.step, store.applied_updates) == (4, 3)
    assert_same_state(states[BAD], states[BAD - 1])
    loop.train(BATCHES, LR)
    assert loop.skipped == [step == BAD for step in range(len(BATCHES))]
    state = loop.state()
    assert_same_state(states[-1], {key: state[key] for key in state if not key.startswith("master_")})
