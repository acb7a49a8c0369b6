"""The toy model on an accelerator: workers that share devices, and the plain loop with its compute on one device.

Importable without an accelerator. The loop runs on any device, so that its arithmetic is tested on the CPU.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.rounding import ties_up
from tests.support.toy import PlainLoop, toy_engine
from torchround.engine.device import AcceleratorDevice, Device
from torchround.engine.engine import Engine
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.partition import Partition, split_evenly


def device_engine(
    kind: str,
    model: LayeredModel,
    store: HostStore,
    partition: Partition,
    num_workers: int,
    num_devices: int = 1,
    make: Callable[[torch.device, int], Device] = AcceleratorDevice,
    **options: Any,
) -> Engine:
    """Make a toy engine whose workers share the first `num_devices` devices of a kind."""
    workers = iter(range(num_workers))

    def next_worker(_: Device) -> Device:
        worker = next(workers)
        return make(torch.device(kind, worker % num_devices), worker)

    return toy_engine(model, store, partition, num_workers, wrap=next_worker, **options)


class DeviceLoop(PlainLoop):
    """A plain loop that computes on `device` in `dtype`, adds gradients up there in fp32, and updates on the host.

    One module, one stream, one thread, ordinary autograd without recomputation. Each gradient is rounded to
    `dtype` once in each of the `rounds`; rounds and the two leaves of a tied weight add up in fp32.
    """

    def __init__(
        self,
        model: LayeredModel,
        weights: dict[str, Tensor],
        tied: bool,
        device: str,
        dtype: torch.dtype = torch.float32,
        rounds: int = 1,
    ) -> None:
        super().__init__(model, weights, tied)
        self._model = LayeredModel(model.names, tuple(copy.deepcopy(layer) for layer in model.layers))
        self._device, self._dtype, self._rounds = device, dtype, rounds

    def gradients(self, micro_batches: Sequence[MicroBatch], scale: float = 1.0) -> tuple[float, dict[str, Tensor]]:
        """Return the loss, and the gradient of the loss times `scale`."""
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        losses, sums = [], {}
        for part in split_evenly(len(micro_batches), self._rounds):
            leaves = {name: self._leaf(parameter) for name, parameter in self._name.items()}
            for index in part:
                # As the engine does: a fused loss makes its gradients in the forward.
                micro_batch = replace(micro_batches[index], loss_factor=scale / labels)
                loss = self._loss(self._on_device(micro_batch), leaves)
                loss.backward(torch.full_like(loss, scale / labels))
                losses.append(loss.item())
            # The head before the embedding: the order in which a backward pass makes the parts of a tied weight.
            for name in reversed([name for name, leaf in leaves.items() if leaf.requires_grad]):
                owner = "embedding.weight" if self.tied and name == "head.weight" else name
                gradient = leaves[name].grad.to(self._dtype).cpu()
                sums[owner] = sums[owner].float() + gradient.float() if owner in sums else gradient
        return sum(losses) / labels, {name: sums[name] for name in self.owned}

    def _on_device(self, micro_batch: MicroBatch) -> MicroBatch:
        return micro_batch.with_tensors(tensor.to(self._device) for tensor in micro_batch.tensors())

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the loss of micro-batches at the present weights."""
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        leaves = {name: self._leaf(parameter) for name, parameter in self._name.items()}
        with torch.no_grad():
            losses = [self._loss(self._on_device(micro_batch), leaves).item() for micro_batch in micro_batches]
        return sum(losses) / labels

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        # Frozen weights are not split, so PyTorch rounds them.
        rounded = ties_up(parameter.data, self._dtype) if parameter.requires_grad else parameter.data
        data = rounded.to(self._device, self._dtype, copy=True)
        leaf = nn.Parameter(data, requires_grad=parameter.requires_grad)
        if leaf.requires_grad:
            leaf.grad_dtype = torch.float32
            leaf.grad = torch.zeros_like(leaf, dtype=torch.float32)
        return leaf

    def _loss(self, micro_batch: MicroBatch, leaves: dict[str, nn.Parameter]) -> Tensor:
        hidden = None
        for index, (name, layer) in enumerate(zip(self._model.names, self._model.layers, strict=True)):
            own = {path: leaves[f"{name}.{path}"] for path, _ in layer.named_parameters()}
            hidden = torch.func.functional_call(layer, own, (hidden, micro_batch.for_layer(index)))
        return hidden
