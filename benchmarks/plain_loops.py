"""A plain training loop that keeps the whole model on one device: what offloading is measured against.

Compute weights in the model's dtype, gradients and AdamW state in fp32, ordinary autograd without recomputation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import LayeredModel, MicroBatch
from torchround.optim import decayed_names


class ResidentLoop:
    """`weights` by name as `HostStore.weights()` gives them. The model's own parameters stay on `meta`."""

    def __init__(
        self,
        model: LayeredModel,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        lr: float,
    ) -> None:
        self._device = device
        self._layers = model.layers
        self._leaves: list[dict[str, nn.Parameter]] = []
        self._masters: list[tuple[nn.Parameter, Tensor]] = []
        by_parameter: dict[nn.Parameter, nn.Parameter] = {}
        decayed = decayed_names(model)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.0, 0.1)]
        for name, layer in zip(model.names, model.layers, strict=True):
            for path, parameter in layer.named_parameters():
                if parameter not in by_parameter:
                    stored = f"{name}.{path}"
                    by_parameter[parameter] = self._leaf(weights[stored], dtype)
                    groups[stored in decayed]["params"].append(self._masters[-1][1])
            self._leaves.append(
                {path: by_parameter[parameter] for path, parameter in layer.named_parameters()}
            )
        self._optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.type == "cuda")

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Loss of one step, after its update."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for host in micro_batches:
            micro_batch = host.with_tensors(tensor.to(self._device) for tensor in host.tensors())
            hidden: Tensor | None = None
            for layer, leaves in zip(self._layers, self._leaves, strict=True):
                hidden = torch.func.functional_call(layer, leaves, (hidden, micro_batch))
            assert hidden is not None, "the model has no layers"
            hidden.backward(torch.full_like(hidden, 1.0 / num_labels))
            total += hidden.detach()
        self._update()
        return float(total) / num_labels

    def _leaf(self, value: Tensor, dtype: torch.dtype) -> nn.Parameter:
        """A compute weight whose gradient adds up in fp32, and its fp32 master."""
        leaf = nn.Parameter(value.to(self._device, dtype, copy=True))
        leaf.grad_dtype = torch.float32
        self._masters.append((leaf, value.to(self._device, torch.float32, copy=True)))
        return leaf

    def _update(self) -> None:
        for leaf, master in self._masters:
            master.grad, leaf.grad = leaf.grad, None
        torch.nn.utils.clip_grad_norm_([master for _, master in self._masters], 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for leaf, master in self._masters:
                leaf.copy_(master)
