"""The rivals of a training step: two plain PyTorch loops, and the random tokens that they and the engine train on.

`SameArithmeticLoop` computes exactly what the engine computes, on the CPU. `ResidentLoop` is what a user would write
for one GPU that holds everything: device weights in the model's dtype, gradients and AdamW state in fp32.
Neither recomputes anything.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchround.config import AdamWTable, TrainingTable
from torchround.engine.store.bundles import owner_of
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch, decayed_names
from torchround.optim import EXACT, UpdateBuffers, clip_scale, sum_of_squares, update_
from torchround.optim.rules.adamw import AdamWRule

LR = 1e-4
MAX_NORM = 1.0


def random_step(training: TrainingTable, vocab_size: int, generator: torch.Generator) -> list[MicroBatch]:
    """Draw one step of random tokens; each sequence is one document."""
    size, tokens = training.micro_batch_size, training.seq_len
    positions = torch.arange(tokens).expand(size, -1).contiguous()
    micro_batches = []
    for _ in range(training.global_batch_size // size):
        drawn = torch.randint(vocab_size, (size, tokens + 1), generator=generator)
        micro_batches.append(
            MicroBatch(
                drawn[:, :-1].contiguous(),
                drawn[:, 1:].contiguous(),
                positions,
                torch.zeros_like(positions),
                max_documents=1,
            )
        )
    return micro_batches


class SameArithmeticLoop:
    """Ordinary autograd over the whole model in fp32 and the engine's own AdamW, all in one memory."""

    def __init__(self, model: LayeredModel, store: HostStore, optimizer: AdamWTable) -> None:
        self._layers = model.layers
        self._optimizer = optimizer
        self._parameters = materialise(model, store.weights())
        self._decayed = decayed_names(model)
        self._moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in self._parameters.values()]
        self._updates = 0

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Train one step and return its loss, the mean over all labels."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        total = 0.0
        for micro_batch in micro_batches:
            hidden: Tensor | None = None
            for layer in self._layers:
                hidden = layer(hidden, micro_batch)
            assert hidden is not None, "the model has no layers"
            hidden.backward(torch.full_like(hidden, 1.0 / num_labels))
            total += hidden.item()
        self._update()
        return total / num_labels

    def _update(self) -> None:
        squares = (float(sum_of_squares(_gradient(p).reshape(-1))) for p in self._parameters.values())
        scale = clip_scale(math.sqrt(math.fsum(squares)), MAX_NORM)
        self._updates += 1
        for (name, parameter), (first, second) in zip(self._parameters.items(), self._moments, strict=True):
            decay = self._optimizer.weight_decay if name in self._decayed else 0.0
            weight = parameter.data.view(-1)
            buffers = UpdateBuffers(
                AdamWRule(self._optimizer.betas, self._optimizer.eps, decay),
                EXACT,
                weight,
                residual=None,
                current=None,
                written=weight,
                parts={"exp_avg": first.view(-1), "exp_avg_sq": second.view(-1)},
                gradient=_gradient(parameter).reshape(-1),
            )
            update_(buffers, lr=LR, update=self._updates, gradient_scale=scale)
            parameter.grad = None


def materialise(model: LayeredModel, weights: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Give the model memory of its own with these weights, by stored name. A tied parameter stays one parameter."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    stored: dict[str, nn.Parameter] = {}
    for name, layer in zip(model.names, model.layers, strict=True):
        for path, parameter in list(layer.named_parameters()):
            if parameter not in real:
                real[parameter] = stored[f"{name}.{path}"] = nn.Parameter(weights[f"{name}.{path}"].clone())
            module, attribute = owner_of(layer, path)
            setattr(module, attribute, real[parameter])
    return stored


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, "backward has not run"
    return parameter.grad


class ResidentLoop:
    """Training with the whole model on one device.

    `weights` are named as `HostStore.weights()` names them. The model's own parameters stay on `meta`.
    """

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
        self._pairs: list[tuple[nn.Parameter, Tensor]] = []  # device weight in `dtype`, its fp32 master
        by_parameter: dict[nn.Parameter, nn.Parameter] = {}
        decayed = decayed_names(model)
        groups: list[dict[str, Any]] = [{"params": [], "weight_decay": decay} for decay in (0.0, 0.1)]
        for name, layer in zip(model.names, model.layers, strict=True):
            for path, parameter in layer.named_parameters():
                if parameter not in by_parameter:
                    stored = f"{name}.{path}"
                    by_parameter[parameter] = self._leaf(weights[stored], dtype)
                    groups[stored in decayed]["params"].append(self._pairs[-1][1])
            self._leaves.append(
                {path: by_parameter[parameter] for path, parameter in layer.named_parameters()}
            )
        self._optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=device.type == "cuda")

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Train one step and return its loss, the mean over all labels."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        # Summed on the device: reading each loss would make the host wait for every micro-batch.
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
        """Make a device weight whose gradient adds up in fp32, and keep its fp32 master."""
        leaf = nn.Parameter(value.to(self._device, dtype, copy=True))
        leaf.grad_dtype = torch.float32
        self._pairs.append((leaf, value.to(self._device, torch.float32, copy=True)))
        return leaf

    def _update(self) -> None:
        for leaf, master in self._pairs:
            master.grad, leaf.grad = leaf.grad, None
        torch.nn.utils.clip_grad_norm_([master for _, master in self._pairs], MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for leaf, master in self._pairs:
                leaf.copy_(master)
