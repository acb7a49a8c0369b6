"""The plain loop of bounded updates: no engine, no threads, one version of each weight and autograd layer by layer.

A step's forward reads the previous version in the first K layers. The inputs that it makes are kept. The backward runs
each layer anew from its own input, with the newest version, and differentiates it.
"""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.support.plain_adamw import adamw_update_
from tests.support.toy import MAX_NORM, OPTIMIZER
from torchround.layer import LayeredModel, MicroBatch, decayed_names
from torchround.optim import clip_scale, layer_max_norm, sum_of_squares


class BoundedLoop:
    """Training of a model by the rule of bounded updates, in `dtype` with fp32 state, clipped layer by layer.

    `weights` are the first fp32 weights by the names of `HostStore.weights`; a tied weight has the name of its first
    use. `stale_layers` is K.
    """

    def __init__(
        self,
        model: LayeredModel,
        weights: Mapping[str, Tensor],
        stale_layers: int,
        dtype: torch.dtype = torch.float32,
        max_norm: float = MAX_NORM,
        device: str = "cpu",
    ) -> None:
        self._device = device
        self._layers = [copy.deepcopy(layer) for layer in model.layers]
        self._stale_layers, self._dtype, self._max_norm = stale_layers, dtype, max_norm
        # By parameter: its name, and all places that use it.
        names: dict[int, str] = {}
        self._uses: dict[str, list[tuple[int, str]]] = defaultdict(list)
        trained: dict[str, bool] = {}
        for index, (prefix, layer) in enumerate(zip(model.names, model.layers, strict=True)):
            for path, parameter in layer.named_parameters():
                name = names.setdefault(id(parameter), f"{prefix}.{path}")
                self._uses[name].append((index, path))
                trained[name] = parameter.requires_grad
        self._decayed = decayed_names(model)
        self._frozen = {name: weights[name].to(dtype) for name in self._uses if not trained[name]}
        self.weights = {name: weights[name].float().clone() for name in self._uses if trained[name]}
        self.older = {name: weight.to(dtype, copy=True) for name, weight in self.weights.items()}
        self.moments = {
            name: (torch.zeros_like(weight), torch.zeros_like(weight)) for name, weight in self.weights.items()
        }
        self.updates = 0

    def train(self, batches: Sequence[Sequence[MicroBatch]], lr: float = 1e-2) -> list[float]:
        return [self.step(micro_batches, lr) for micro_batches in batches]

    def step(self, micro_batches: Sequence[MicroBatch], lr: float) -> float:
        loss, gradients = self.gradients(micro_batches)
        self.apply(gradients, lr)
        return loss

    def apply(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Make the next version. The next step's forward reads the one before in its first layers."""
        self.older = {name: weight.to(self._dtype, copy=True) for name, weight in self.weights.items()}
        self.update(gradients, lr)

    def gradients(self, micro_batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
        """Return the mean loss, and each weight's gradient, a tied one added up from the deepest use on."""
        labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        newest = {name: weight.to(self._dtype) for name, weight in self.weights.items()}
        sums: dict[tuple[int, str], Tensor] = {}
        total = 0.0
        for micro_batch in micro_batches:
            inputs: list[object] = [None]
            with torch.no_grad():
                for index in range(len(self._layers) - 1):
                    self._bind(index, self.older if index < self._stale_layers else newest)
                    inputs.append(self._call(index, inputs[-1], micro_batch))
            gradient: Sequence[Tensor | None] = ()
            micro_batch = replace(micro_batch, loss_factor=1.0 / labels)
            for index in reversed(range(len(self._layers))):
                leaves = self._bind(index, newest)
                leaf = _leaf(inputs.pop())
                output = self._call(index, leaf, micro_batch)
                if index == len(self._layers) - 1:
                    total += output.item()
                    gradient = (torch.full_like(output, 1.0 / labels),)
                outputs = [t for t in _tensors(output) if t.is_floating_point()]
                pairs = [(t, g) for t, g in zip(outputs, gradient, strict=True) if t.requires_grad and g is not None]
                torch.autograd.backward([t for t, _ in pairs], [g for _, g in pairs])
                for path, parameter in leaves.items():
                    if parameter.grad is not None:
                        found = sums.setdefault(
                            (index, path), torch.zeros(parameter.shape, dtype=torch.float32, device=self._device)
                        )
                        found.add_(parameter.grad)
                gradient = [t.grad for t in _tensors(leaf) if t.is_floating_point()] if leaf is not None else ()
        # Each use's sum is rounded to the gradient's format before the host adds the uses in fp32.
        gradients = {}
        for name in self.weights:
            parts = [
                sums.get(use, torch.zeros_like(self.weights[name])).to(self._dtype).cpu()
                for use in reversed(self._uses[name])
            ]
            gradients[name] = parts[0]
            for part in parts[1:]:
                gradients[name] = gradients[name].float() + part.float()
        return total / labels, gradients

    def update(self, gradients: Mapping[str, Tensor], lr: float) -> None:
        """Apply AdamW to each layer, clipped by the layer's own norm."""
        self.updates += 1
        groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
        for name in self.weights:
            groups[tuple(index for index, _ in self._uses[name])].append(name)
        all_numel = sum(weight.numel() for weight in self.weights.values())
        for names in groups.values():
            norm = math.sqrt(math.fsum(float(sum_of_squares(gradients[name].reshape(-1))) for name in names))
            numel = sum(self.weights[name].numel() for name in names)
            if not math.isfinite(norm):
                continue
            scale = clip_scale(norm, layer_max_norm(self._max_norm, numel, all_numel))
            for name in names:
                flat = self.weights[name].view(-1)
                first, second = (moment.view(-1) for moment in self.moments[name])
                adamw_update_(
                    *(flat, first, second, gradients[name].reshape(-1), flat),
                    lr=lr,
                    betas=OPTIMIZER.betas,
                    eps=OPTIMIZER.eps,
                    weight_decay=OPTIMIZER.weight_decay if name in self._decayed else 0.0,
                    bias_correction_step=self.updates,
                    gradient_scale=scale,
                )

    def state(self) -> dict[str, Tensor]:
        """Return the trained state under the names of `HostStore.named_views`."""
        views = {f"weights/{name}": weight for name, weight in self.weights.items()}
        for name, (first, second) in self.moments.items():
            views[f"exp_avg/{name}"], views[f"exp_avg_sq/{name}"] = first, second
        for name, weight in self.older.items():
            if self._uses[name][0][0] < self._stale_layers:
                views[f"master_1_old/{name}"] = weight
        return views

    def _bind(self, index: int, version: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
        """Give a layer fresh leaves of a version. Returns the trained ones by path."""
        leaves = {}
        for name, uses in self._uses.items():
            for layer, path in uses:
                if layer != index:
                    continue
                value = version[name] if name in version else self._frozen[name]
                leaf = nn.Parameter(value.to(self._device, copy=True), requires_grad=name in version)
                owner, _, attribute = path.rpartition(".")
                setattr(self._layers[index].get_submodule(owner), attribute, leaf)
                if name in version:
                    leaf.grad_dtype = torch.float32
                    leaves[path] = leaf
        return leaves

    def _call(self, index: int, hidden: object, micro_batch: MicroBatch) -> Tensor:
        moved = micro_batch.with_tensors(tensor.to(self._device) for tensor in micro_batch.tensors())
        return self._layers[index](hidden, moved.for_layer(index))

    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the loss between steps: a weight that one of the first K layers uses is of the version before."""
        newest = {name: weight.to(self._dtype) for name, weight in self.weights.items()}
        held = {
            name: self.older[name] if self._uses[name][0][0] < self._stale_layers else newest[name] for name in newest
        }
        losses = []
        with torch.no_grad():
            for micro_batch in micro_batches:
                hidden: object = None
                for index in range(len(self._layers)):
                    self._bind(index, held)
                    hidden = self._call(index, hidden, micro_batch)
                losses.append(hidden.item())
        return sum(losses) / sum(micro_batch.num_labels() for micro_batch in micro_batches)


def _tensors(hidden: object) -> tuple[Tensor, ...]:
    return (hidden,) if isinstance(hidden, Tensor) else tuple(hidden)


def _leaf(hidden: object) -> object:
    if hidden is None:
        return None
    leaves = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in _tensors(hidden))
    return leaves[0] if isinstance(hidden, Tensor) else leaves
