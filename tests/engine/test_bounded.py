"""Bounded updates equal, bit for bit, a plain loop with the same rule; what they skip, save and report."""

import pytest
import torch

from tests.support.bounded_loop import BoundedLoop
from tests.support.toy import (
    PARTITIONS,
    assert_same_state,
    linked,
    toy_batches,
    toy_engine,
    toy_model,
    toy_store,
    train,
)
from torchround.engine.store.bundles import BOUNDED

STEPS = 4


def run_both(partition, num_devices, stale_layers, tied=False, dtype=torch.float32, model=None, **settings):
    """Train with the engine and with the plain loop, and compare every loss and every saved tensor."""
    model, batches = model or toy_model(tied), toy_batches(STEPS, micro_batches=3)
    store = toy_store(model, dtype, policy=BOUNDED)
    loop = BoundedLoop(
        model, {name: view.clone() for name, view in store.weights().items()}, stale_layers, dtype
    )
    with toy_engine(model, store, partition, num_devices, stale_layers=stale_layers, **settings) as engine:
        losses = train(engine, batches)
    assert losses == loop.train(batches)
    assert_same_state(trained(store), loop.state())
    return losses, store


def trained(store):
    frozen = {p.name for bundle in store.bundles if not bundle.trainable for p in bundle.parameters}
    return {name: view for name, view in store.named_views().items() if name.split("/")[1] not in frozen}


# Every K that a partition allows: the layers before its fused stage.
CASES = [
    (name, stale_layers)
    for name, partition in PARTITIONS.items()
    for stale_layers in range(sum(partition.forward) + 1)
]


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize(("partition", "stale_layers"), CASES)
def test_bounded_training_is_bitwise_that_of_a_plain_loop(partition, stale_layers, tied):
    num_devices = (1, 2, 3, 8)[stale_layers % 4]
    run_both(PARTITIONS[partition], num_devices, stale_layers, tied, wrap=linked)


@pytest.mark.parametrize("num_devices", [1, 2, 3, 8])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_results_depend_on_k_alone(num_devices, tied):
    losses = [
        run_both(PARTITIONS[name], num_devices, 4, tied)[0]
        for name in ("one layer a stage", "forward coarser", "backward coarser")
    ]
    assert losses[0] == losses[1] == losses[2]
    assert losses[0] != run_both(PARTITIONS["forward coarser"], 1, 3, tied)[0]


@pytest.mark.parametrize("options", [{"layerwise_recompute": True}, {"times_layers": True}], ids=str)
def test_other_ways_to_recompute_give_the_same_bits(options):
    run_both(PARTITIONS["backward coarser"], 2, 4, **options)
    run_both(PARTITIONS["forward coarser"], 3, 6, tied=True, **options)


@pytest.mark.parametrize("stale_layers", [0, 3, 5])
def test_bf16_has_fp32_state_and_older_device_weights(stale_layers):
    run_both(PARTITIONS["backward coarser"], 3, stale_layers, dtype=torch.bfloat16)
    run_both(PARTITIONS["forward coarser"], 2, stale_layers, tied=True, dtype=torch.bfloat16)
