"""The rivals of a training step: two plain PyTorch loops, and the random tokens that they and the engine train on.

`SameArithmeticLoop` computes exactly what the engine computes, on the CPU. `ResidentLoop` is what a user would write
for one GPU that holds everything: device weights in the model's dtype, gradients and AdamW state in fp32.
Neither recomputes anything.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from torchround.config import AdamWTable, TrainingTable
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
        inputs, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
        documents = torch.zeros_like(positions)
        micro_batches.append(MicroBatch(inputs, labels, positions, documents, max_documents=1))
    return micro_batches


class PlainLoop:
    """Ordinary autograd over the whole model in the memory of one device.

    `weights` are named as `HostStore.weights()` names them. `_leaves` has a parameter of `dtype` for each, whose gradient
    adds up in fp32. The model's own parameters stay on `meta`.
    """

    def __init__(
        self, model: LayeredModel, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        self._device, self._layers = device, model.layers
        self._leaves: dict[str, nn.Parameter] = {}
        self._by_layer: list[dict[str, nn.Parameter]] = []
        leaf_of: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter stays one parameter
        for name, layer in zip(model.names, model.layers, strict=True):
            for path, parameter in layer.named_parameters():
                if parameter not in leaf_of:
                    stored = f"{name}.{path}"
                    leaf = nn.Parameter(weights[stored].to(device, dtype, copy=True))
                    leaf.grad_dtype = torch.float32
                    leaf_of[parameter] = self._leaves[stored] = leaf
            self._by_layer.append({path: leaf_of[parameter] for path, parameter in layer.named_parameters()})

    def step(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Train one step and return its loss, the mean over all labels."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        # Summed on the device: reading each loss would make the host wait for every micro-batch.
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for host in micro_batches:
            micro_batch = host.rebuild()(tensor.to(self._device) for tensor in host.tensors())
            hidden: Tensor | None = None
            for layer, leaves in zip(self._layers, self._by_layer, strict=True):
                hidden = torch.func.functional_call(layer, leaves, (hidden, micro_batch))
            assert hidden is not None, "the model has no layers"
            hidden.backward(torch.full_like(hidden, 1.0 / num_labels))
            total += hidden.detach()
        self._update()
        return float(total) / num_labels

    def _update(self) -> None:
        """Update the leaves and drop their gradients."""
        raise AssertionError("each loop has its own update")


class SameArithmeticLoop(PlainLoop):
    """The engine's own AdamW in fp32 on the CPU."""

    def __init__(self, model: LayeredModel, store: HostStore, optimizer: AdamWTable) -> None:
        super().__init__(model, store.weights(), torch.device("cpu"), torch.float32)
        self._optimizer, self._decayed = optimizer, decayed_names(model)
        self._moments = [(torch.zeros_like(leaf), torch.zeros_like(leaf)) for leaf in self._leaves.values()]
        self._updates = 0

    def _update(self) -> None:
        squares = (float(sum_of_squares(_gradient(leaf))) for leaf in self._leaves.values())
        scale = clip_scale(math.sqrt(math.fsum(squares)), MAX_NORM)
        self._updates += 1
        for (name, leaf), (first, second) in zip(self._leaves.items(), self._moments, strict=True):
            decay = self._optimizer.weight_decay if name in self._decayed else 0.0
            weight = leaf.data.view(-1)
            buffers = UpdateBuffers(
                AdamWRule(self._optimizer.betas, self._optimizer.eps, decay),
                EXACT,
                weight,
                residual=None,
                current=None,
                written=weight,
                parts={"exp_avg": first.view(-1), "exp_avg_sq": second.view(-1)},
                gradient=_gradient(leaf),
            )
            update_(buffers, lr=LR, update=self._updates, gradient_scale=scale)
            leaf.grad = None


class ResidentLoop(PlainLoop):
    """PyTorch's AdamW over fp32 copies of the weights, on one device."""

    def __init__(
        self, model: LayeredModel, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__(model, weights, device, dtype)
        decayed = decayed_names(model)
        self._masters = {name: weights[name].to(device, torch.float32, copy=True) for name in self._leaves}
        groups = [
            {"params": [master for name, master in self._masters.items() if (name in decayed) is decays]}
            | {"weight_decay": 0.1 if decays else 0.0}
            for decays in (False, True)
        ]
        self._optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), fused=device.type == "cuda")

    def _update(self) -> None:
        for name, leaf in self._leaves.items():
            self._masters[name].grad, leaf.grad = leaf.grad, None
        torch.nn.utils.clip_grad_norm_(list(self._masters.values()), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad()
        with torch.no_grad():
            for name, leaf in self._leaves.items():
                leaf.copy_(self._masters[name])


def _gradient(leaf: nn.Parameter) -> Tensor:
    assert leaf.grad is not None, "backward has not run"
    return leaf.grad.reshape(-1)
