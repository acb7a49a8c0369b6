"""Nested values between layers on an accelerator: training, outputs and constants are those of the CPU or of a plain loop."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.support.any_layers import any_batches, any_model, outputs
from tests.support.device_toy import device_engine
from tests.support.reference import Reference
from tests.support.toy import assert_same_state, toy_store, train
from torchround.pipeline.partition import Partition

PARTITION = Partition((2, 2), 2, (3, 1))
WORKERS = [(3, 1)]


@pytest.mark.parametrize("workers", WORKERS)
def test_training_is_bitwise_that_of_a_plain_loop_on_the_device(kind, workers):
    model, steps = (
        any_model(),
        [any_batches(3)] * 3,
    )  # the first pass measures the sizes, the later ones find their buffers
    store = toy_store(model, pinned=True)
    loop = Reference.of(model, store, device=kind)
    with device_engine(kind, model, store, PARTITION, *workers) as engine:
        assert train(engine, steps) == loop.train(steps)
    assert_same_state(store.named_views(), loop.state())
    store.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_frozen_model_gives_its_outputs(kind, workers):
    model, batches = any_model(outputs, trained=False), any_batches(4)
    store = toy_store(model, pinned=True)
    expected = [Reference.of(model, store, device=kind).outputs(batch)[-1] for batch in batches]
    with device_engine(kind, model, store, PARTITION, *workers) as engine:
        first = engine.forward(batches)
        found = engine.forward(batches).outputs()
        assert len(first.outputs()) == len(batches)
    for output, wanted in zip(found, expected, strict=True):
        for leaf, other in zip(pytree.tree_leaves(output), pytree.tree_leaves(wanted), strict=True):
            if isinstance(leaf, torch.Tensor):
                assert leaf.device.type == "cpu"
                assert torch.equal(leaf, other.cpu())
            else:
                assert leaf == other
    store.close()
