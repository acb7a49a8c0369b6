"""Activations that are kept on the host instead of being recomputed: equal bits, counted memory, and what travels."""

import pytest
import torch

from tests.support.toy import (
    KEPT,
    PARTITIONS,
    PlainLoop,
    assert_same_state,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.store.bundles import SYNC

LR = 1e-2


def trained(
    partition, num_devices, policy=SYNC, dtype=torch.float32, micro_batches=4, tied=False, **settings
):
    """Return the losses and the state after four steps."""
    model = toy_model(tied)
    store = toy_store(model, dtype, policy=policy)
    with toy_engine(model, store, PARTITIONS[partition], num_devices, **settings) as engine:
        losses = train(engine, toy_batches(4, micro_batches), LR)
    return losses, store.named_views()


@pytest.fixture(scope="module")
def plain():
    """Return the losses and the state of a plain loop over the same four steps."""
    model = toy_model(tied=True)
    loop = PlainLoop(model, {n: view.clone() for n, view in toy_store(model).weights().items()}, tied=True)
    return loop.train(toy_batches(4, micro_batches=4), LR), loop.state()


@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
def test_training_is_bitwise_that_of_a_plain_loop(plain, num_devices, partition, kept):
    losses, state = trained(partition, num_devices, tied=True, kept=KEPT[kept])
    assert losses == plain[0]
    assert_same_state(state, plain[1])
