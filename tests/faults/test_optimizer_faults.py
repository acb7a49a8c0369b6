"""Updates that fail half-way, with every optimizer and state format."""

import functools

import pytest
import torch

from tests.support import toy
from tests.support.faults import Bomb, before, copied
from tests.support.optimizers import OPTIMIZERS
from tests.support.toy import assert_same_state, toy_batches, toy_engine, toy_model, toy_store, train
from torchround.engine.errors import PipelineError
from torchround.optim import make_optimizer, update_pass
from torchround.planning.update_modes import ASYNC, SYNC

BATCHES = toy_batches(3, micro_batches=3)
PARTITION = toy.PARTITIONS["one layer a stage"]
# By default each optimizer with one mode: async with compact state, sync with exact.
MODES = [
    pytest.param(name, mode, marks=() if ("compact" in name) == (mode is ASYNC) else pytest.mark.nightly)
    for name in OPTIMIZERS
    for mode in (SYNC, ASYNC)
]


def made(name, mode, dtype=torch.bfloat16, **options):
    return toy_store(toy_model(), dtype, mode=mode, optimizer=make_optimizer(OPTIMIZERS[name]), **options)


def engine_of(name, store, num_devices=2):
    return toy_engine(PARTITION, num_devices, store=store, optimizer=OPTIMIZERS[name])


@functools.cache
def undisturbed(name, mode):
    store = made(name, mode)
    states, losses = [copied(store)], []
    with engine_of(name, store, 1) as engine:
        for batch in BATCHES:
            losses += train(engine, [batch])
            states.append(copied(store))
    return states, losses


@pytest.mark.parametrize(("name", "mode"), MODES, ids=str)
@pytest.mark.parametrize("hit", [10, pytest.param(1, marks=pytest.mark.nightly)])
def test_an_update_that_fails_half_way_is_completed_and_training_continues_from_it(monkeypatch, name, mode, hit):
    bomb, store = Bomb("commit_", hit=hit), made(name, mode)
    with monkeypatch.context() as patch:
        patch.setattr(update_pass, "CHUNK_ELEMENTS", 256)
        before(patch, update_pass, "commit_", bomb)
        with pytest.raises(PipelineError, match="planted") as raised, engine_of(name, store) as engine:
            train(engine, BATCHES)
    assert raised.value.__cause__ is bomb.raised is not None
    states, losses = undisturbed(name, mode)
    assert store.is_consistent and store.step == 1
    assert_same_state(copied(store), states[1])
    with engine_of(name, store, 3) as engine:
        assert train(engine, BATCHES[1:]) == losses[1:]
    assert_same_state(copied(store), states[-1])
