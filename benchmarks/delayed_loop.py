"""A plain PyTorch loop for each rule of the weights' age: what the engine computes, without its threads and copies.

The study of staleness trains with it, because a loop in one memory is the fastest way to many short runs. A test shows
that its losses and weights are the engine's, bit for bit.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchround.config import AdamWTable
from torchround.engine.store.bundles import Bundle, owner_of
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.optim import clip_scale, sum_of_squares
from torchround.optim.optimizer import make_optimizer
from torchround.optim.update_pass import update_


@dataclass(frozen=True)
class DelayRule:
    """Which weights a step reads, how their age is corrected, and how gradients are clipped.

    `update` is one of the values of `engine.update`. `stale_layers` is K of `bounded`: the forward of the first K
    layers reads weights that are one update old. `correction` "predict" gives devices weights that are one more update
    along the present direction. `clip` is the scope of the norm: "global", or "layer" for a share of each layer.
    """

    update: str
    stale_layers: int = 0
    correction: str = "none"
    clip: str = "global"


class DelayedLoop:
    """Ordinary autograd in fp32 and the engine's own update, on the buffers of a host store.

    `model` must be a plain one, without tied or frozen parameters, so that each layer has one bundle. `store` holds the
    newest state; the loop keeps the weights one update older itself.
    """

    def __init__(
        self,
        model: LayeredModel,
        store: HostStore,
        optimizer: AdamWTable,
        rule: DelayRule,
        max_norm: float,
    ) -> None:
        assert len(store.bundles) == len(model.layers), "the loop knows models of one bundle for each layer"
        assert store.dtype == torch.float32, "the loop computes in fp32"
        self._layers, self._store = model.layers, store
        store.assign_rules(model, make_optimizer(optimizer))
        self._rule, self._max_norm = rule, max_norm
        store.allocate_gradients(rounds=1)
        self._newest = [bundle.device_weights[0] for bundle in store.bundles]
        self._older = [weights.clone() for weights in self._newest]
        self._leaves = [self._bind(index) for index in range(len(model.layers))]

    def start_anew(self) -> None:
        """Forget the older weights, after the store's weights were replaced."""
        for newest, older in zip(self._newest, self._older, strict=True):
            older.copy_(newest)

    def step(self, micro_batches: Sequence[MicroBatch], lr: float) -> float:
        """Train one step and return its loss, the mean over all labels."""
        num_labels = sum(micro_batch.num_labels() for micro_batch in micro_batches)
        for bundle in self._store.bundles:
            _gradient(bundle).zero_()
        total = 0.0
        for micro_batch in micro_batches:
            total += self._differentiate(replace(micro_batch, loss_factor=1.0 / num_labels), 1.0 / num_labels)
        self._update(lr)
        return total / num_labels

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> float:
        """Return the mean loss over all labels with the fp32 weights, which no correction has touched."""
        total = 0.0
        for micro_batch in micro_batches:
            hidden = None
            for index, layer in enumerate(self._layers):
                self._read(index, self._store.bundles[index].fp32_weight)
                hidden = layer(hidden, micro_batch)
            total += float(hidden)  # type: ignore[arg-type]
        return total / sum(micro_batch.num_labels() for micro_batch in micro_batches)

    # One micro-batch.

    def _differentiate(self, micro_batch: MicroBatch, loss_gradient: float) -> float:
        """Add one micro-batch's gradients to the store's, and return the sum of its losses."""
        rule = self._rule
        stale = rule.stale_layers if rule.update == "bounded" else 0
        hidden: Tensor | None = None
        inputs: list[Tensor | None] = []
        with torch.no_grad():
            for index in range(stale):
                inputs.append(hidden)
                self._read(index, self._older[index])
                hidden = self._layers[index](hidden, micro_batch)
        first_input = hidden.requires_grad_() if hidden is not None else None
        hidden = first_input
        weights = self._older if rule.update == "async" else self._newest
        for index in range(stale, len(self._layers)):
            self._read(index, weights[index])
            hidden = self._layers[index](hidden, micro_batch)
        assert hidden is not None, "the model has no layers"
        hidden.backward(torch.full_like(hidden, loss_gradient))
        # Each of the first K layers starts anew from the input that the forward made, with the newer weights.
        gradient = first_input.grad if first_input is not None else None
        for index in reversed(range(stale)):
            self._read(index, self._newest[index])
            given = inputs[index]
            start = given.requires_grad_() if given is not None else None
            self._layers[index](start, micro_batch).backward(gradient)
            gradient = start.grad if start is not None else None
        return float(hidden.detach())

    def _bind(self, index: int) -> list[nn.Parameter]:
        """Give a layer parameters of its own, whose gradients add up in the store's buffer."""
        layer, bundle, leaves = self._layers[index], self._store.bundles[index], []
        for location in self._store.locations[index]:
            leaf = nn.Parameter(location.parameter.view(self._newest[index]))
            leaf.grad = location.parameter.view(_gradient(bundle))
            module, name = owner_of(layer, location.path)
            setattr(module, name, leaf)
            leaves.append(leaf)
        return leaves

    def _read(self, index: int, flat: Tensor) -> None:
        """Let a layer's parameters be views of these weights."""
        for location, leaf in zip(self._store.locations[index], self._leaves[index], strict=True):
            leaf.data = location.parameter.view(flat)

    # The update.

    def _update(self, lr: float) -> None:
        bundles = self._store.bundles
        squares = [_squared_norm(bundle) for bundle in bundles]
        scales = self._clip_scales(squares)
        self._store.applied_updates += 1
        self._store.step += 1
        for bundle, newest, older, scale in zip(bundles, self._newest, self._older, scales, strict=True):
            older.copy_(newest)
            self._update_bundle(bundle, newest, lr, scale)

    def _clip_scales(self, squares: list[float]) -> list[float]:
        """Return the factor on each layer's gradient."""
        if self._rule.clip == "global":
            return [clip_scale(math.sqrt(math.fsum(squares)), self._max_norm)] * len(squares)
        sizes = [sum(p.shape.numel() for p in bundle.parameters) for bundle in self._store.bundles]
        bounds = [self._max_norm * math.sqrt(size / sum(sizes)) for size in sizes]
        return [clip_scale(math.sqrt(square), bound) for square, bound in zip(squares, bounds, strict=True)]

    def _update_bundle(self, bundle: Bundle, device_weight: Tensor, lr: float, scale: float) -> None:
        for segment in bundle.segments:
            update_(
                bundle.update_buffers(segment, device_weight, self._store.step),
                lr=lr,
                update=self._store.applied_updates,
                gradient_scale=scale,
                predicts=self._rule.correction == "predict",
            )


def _gradient(bundle: Bundle) -> Tensor:
    assert bundle.gradient is not None, "the store has no gradients yet"
    return bundle.gradient


def _squared_norm(bundle: Bundle) -> float:
    gradient = _gradient(bundle)
    return math.fsum(float(sum_of_squares(p.view(gradient).reshape(-1))) for p in bundle.parameters)
