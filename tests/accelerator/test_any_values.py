"""Nested values between layers on an accelerator: training, outputs and constants are those of the CPU or of a plain loop."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.support.any_layers import PlainAny, any_batches, any_model, outputs
from tests.support.device_toy import device_engine
from tests.support.toy import toy_store
from torchround.pipeline.partition import Partition

PARTITION = Partition((2, 2), 2, (3, 1))
WORKERS = [(3, 1)]


class OnDevice(PlainAny):
    """The plain loop with weights, constants and batches on a device."""

    def __init__(self, model, store, kind):
        super().__init__(model, store)
        for layer in self.layers:
            layer.to(kind)
        self.kind = kind

    def run(self, batch):
        tensors = [tensor.to(self.kind) for tensor in batch.tensors()]
        return super().run(batch.rebuild()(tensors))


@pytest.mark.parametrize("workers", WORKERS)
def test_training_is_bitwise_that_of_a_plain_loop_on_the_device(kind, workers):
    model, batches = any_model(), any_batches(3)
    store = toy_store(model, pinned=True)
    loss, expected = OnDevice(model, store, kind).gradients(batches)
    with device_engine(kind, model, store, PARTITION, *workers, max_norm=0.0) as engine:
        for _ in range(3):  # the first pass measures the sizes, the later ones find their buffers
            result = engine.forward_backward(batches)
            engine.step(0.0)
        engine.drain()
        assert sum(result.loss_sums()) == loss
        found = {p.name: p.view(bundle.gradient) for bundle in store.bundles for p in bundle.parameters}
        for name, gradient in zip(model.names, expected, strict=True):
            wanted = torch.zeros(8, 8) if gradient is None else gradient.cpu()
            assert torch.equal(found[f"{name}.weight"], wanted), name
    store.close()


@pytest.mark.parametrize("workers", WORKERS)
def test_a_frozen_model_gives_its_outputs(kind, workers):
    model, batches = any_model(outputs, trained=False), any_batches(4)
    store = toy_store(model, pinned=True)
    expected = [OnDevice(model, store, kind).run(batch) for batch in batches]
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
