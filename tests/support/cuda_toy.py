"""The toy model on CUDA: workers that share one card, and the plain loop with its compute on that card.

Importable without CUDA, and the loop runs on any device, so that its arithmetic is tested on the CPU.
"""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.support.toy import PlainLoop, toy_engine
from torchround.engine.device import AcceleratorDevice
from torchround.layer import LayeredModel, MicroBatch


def cuda_engine(model, store, partition, num_workers, **options):
    """Make a toy engine whose workers share the first card."""
    counted = iter(range(num_workers))
    return toy_engine(
        model,
        store,
        partition,
        num_workers,
        wrap=lambda _: AcceleratorDevice("cuda:0", next(counted)),
        **options,
    )


class DeviceLoop(PlainLoop):
    """A plain loop that computes on `device` in `dtype`, adds gradients up there in fp32, and updates on the host.

    One module, one stream, one thread, ordinary autograd without recomputation. Each gradient is rounded to
    `dtype` once; a tied weight is two leaves.
    """

    def __init__(
        self,
        model: LayeredModel,
        weights: dict[str, Tensor],
        tied: bool,
        device: str = "cuda",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(model, weights, tied)
        self._model = LayeredModel(model.names, tuple(copy.deepcopy(layer) for layer in model.layers))
        self._device, self._dtype = device, dtype

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        leaves = {name: self._leaf(parameter) for name, parameter in self._name.items()}
        total = 0.0
        for micro_batch in micro_batches:
            hidden = self._loss(
                micro_batch.with_tensors(t.to(self._device) for t in micro_batch.tensors()), leaves
            )
            hidden.backward(torch.full_like(hidden, 1.0 / labels))
            total += hidden.item()
        rounded = {name: leaf.grad.to(self._dtype).cpu() for name, leaf in leaves.items()}
        gradients = {name: rounded[name] for name in self.owned}
        if self.tied:
            parts = (rounded["head.weight"].float(), rounded["embedding.weight"].float())
            gradients["embedding.weight"] = parts[0] + parts[1]
        return total / labels, gradients

    def _leaf(self, parameter: nn.Parameter) -> nn.Parameter:
        leaf = nn.Parameter(parameter.data.to(self._device, self._dtype, copy=True))
        leaf.grad_dtype = torch.float32
        leaf.grad = torch.zeros_like(leaf, dtype=torch.float32)
        return leaf

    def _loss(self, micro_batch: MicroBatch, leaves: dict[str, nn.Parameter]) -> Tensor:
        hidden = None
        for name, layer in zip(self._model.names, self._model.layers, strict=True):
            own = {path: leaves[f"{name}.{path}"] for path, _ in layer.named_parameters()}
            hidden = torch.func.functional_call(layer, own, (hidden, micro_batch))
        return hidden
