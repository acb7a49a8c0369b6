"""Every optimizer and state format: the bits of a plain loop, on any number of devices, in each mode that it may train in."""

import pytest
import torch

from tests.support.optimizers import OPTIMIZERS, POLICIES
from tests.support.stateful_loop import StatefulLoop
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.store.bundles import ASYNC, BOUNDED, SYNC
from torchround.optim import make_optimizer

LR = 1e-2
BATCHES = toy_batches(4, micro_batches=4)
PLAIN = [(name, policy) for name in OPTIMIZERS for policy in POLICIES[name] if policy is not BOUNDED]


def label(value):
    return value.name + "-predict" * value.predicts if hasattr(value, "predicts") else None


def trained(
    name, policy, num_devices, partition="backward coarser", tied=False, dtype=torch.bfloat16, **settings
):
    """Return the losses of a run and the store that it leaves."""
    model = toy_model(tied)
    store = toy_store(model, dtype, policy=policy, optimizer=make_optimizer(OPTIMIZERS[name]))
    options = {"optimizer": OPTIMIZERS[name], **settings}
    with toy_engine(model, store, PARTITIONS[partition], num_devices, **options) as engine:
        return train(engine, BATCHES, LR), store


def looped(name, policy, tied=False, dtype=torch.bfloat16, rounds=1):
    """Return the losses and the state of the plain loop."""
    model = toy_model(tied)
    weights = {key: view.float().clone() for key, view in toy_store(model, dtype).weights().items()}
    loop = StatefulLoop(model, weights, tied, OPTIMIZERS[name], dtype, rounds, policy.predicts)
    losses = loop.train(BATCHES, LR) if policy is SYNC else loop.train_late(BATCHES, LR)
    return losses, loop.state()


def assert_equal_to_the_loop(store, state):
    views = store.named_views()
    newest = {key: view for key, view in views.items() if not key.startswith("master_")}
    assert_same_state(newest, state)


@pytest.mark.parametrize(("name", "policy"), PLAIN, ids=label)
def test_any_number_of_devices_gives_the_bits_of_a_plain_loop(name, policy):
    losses, state = looped(name, policy)
    for num_devices, partition in ((1, "one stage"), (2, "one layer a stage"), (3, "forward coarser")):
        found, store = trained(name, policy, num_devices, partition)
        assert found == losses
        assert_equal_to_the_loop(store, state)
    found, store = trained(name, policy, 8)
    assert found == losses
    assert_equal_to_the_loop(store, state)


@pytest.mark.parametrize(("name", "policy"), PLAIN, ids=label)
@pytest.mark.parametrize("rounds", [1, 2])
def test_tied_weights_and_rounds_add_up_as_in_a_plain_loop(name, policy, rounds):
    losses, state = looped(name, policy, tied=True, rounds=rounds)
    found, store = trained(name, policy, 2, tied=True, rounds=rounds)
    assert found == losses
    assert_equal_to_the_loop(store, state)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_float32_weights_are_not_split_and_keep_any_state(name):
    losses, state = looped(name, ASYNC, dtype=torch.float32)
    found, store = trained(name, ASYNC, 3, dtype=torch.float32)
    assert found == losses
    assert_equal_to_the_loop(store, state)
    assert not any(key.startswith("residual/") for key in state)


@pytest.mark.parametrize("stale_layers", [0, 3])
@pytest.mark.parametrize("name", [name for name, policies in POLICIES.items() if BOUNDED in policies])
def test_bounded_updates_do_not_depend_on_devices_and_cuts(name, stale_layers):
    runs = [
        trained(name, BOUNDED, num_devices, partition, stale_layers=stale_layers)
        for num_devices, partition in (
            (1, "one layer a stage"),
            (3, "forward coarser"),
            (8, "backward coarser"),
        )
    ]
    for losses, store in runs[1:]:
        assert losses == runs[0][0]
        assert_same_state(store.named_views(), runs[0][1].named_views())
