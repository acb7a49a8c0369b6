"""The plain loop that `torchround.Pipeline` is compared with, on one thread and without the engine.

Gradients add up as docs/library.md says: those of one call over its micro-batches, for each layer that uses a parameter
apart; then over the layers that share it, the last one first; then over calls.
"""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchround.library.sample_batch import SampleBatch, cut
from torchround.library.seeds import drawing, layer_seed

Optimizer = torch.optim.Optimizer


class PlainNet:
    """A copy of an `nn.Sequential` that trains in a loop. `make` makes its optimizer from named parameters."""

    def __init__(
        self, net: nn.Sequential, make: Callable[..., Optimizer] | None = None, seed: int = 0
    ) -> None:
        self.net = copy.deepcopy(net)
        self.seed = seed
        self.calls = 0
        self.optimizer = make(list(self.net.named_parameters())) if make is not None else None

    def forward_backward(self, inputs: Any, labels: Any, loss_fn: Any, num_micro_batches: int = 3) -> float:
        """Add a call's gradients to `.grad` and return the sum of its losses."""
        layers, uses = self._layers_of_their_own()
        losses = []
        batches = cut(
            inputs, labels, num_micro_batches, loss_fn, is_training=True, seed=self.seed, call=self.calls
        )
        for batch in batches:
            loss = self._loss(layers, batch)
            loss.backward()
            losses.append(loss.item())
        for parameter, leaves in uses:
            for leaf in reversed(leaves):
                if leaf.grad is not None:
                    before = parameter.grad
                    parameter.grad = leaf.grad if before is None else before + leaf.grad
        self.calls += 1
        return sum(losses)

    def step(self) -> None:
        """Update the weights, and forget the gradients. A parameter without a gradient has zeros, as in the engine."""
        assert self.optimizer is not None, "an optimizer is needed to step"
        for parameter in self.net.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, layers: Sequence[nn.Module], batch: SampleBatch) -> Tensor:
        hidden, labels = batch.inputs_and_labels()
        for index, layer in enumerate(layers):
            with drawing(layer_seed(self.seed, self.calls, batch.micro_batch, index)):
                hidden = layer(hidden)
        with drawing(layer_seed(self.seed, self.calls, batch.micro_batch, len(layers))):
            assert batch.loss_fn is not None, "a training batch has a loss"
            return batch.loss_fn(hidden, labels)

    def _layers_of_their_own(self) -> tuple[list[nn.Module], list[tuple[nn.Parameter, list[Tensor]]]]:
        """Return copies of the layers that share nothing, and for each parameter its leaves in the layers' order."""
        layers: list[nn.Module] = []
        uses: dict[int, tuple[nn.Parameter, list[Tensor]]] = {}
        for layer in self.net:
            memo: dict[int, Any] = {}
            layers.append(copy.deepcopy(layer, memo))
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    leaf = memo[id(parameter)]
                    leaf.grad = None  # copies of parameters take the gradient along
                    uses.setdefault(id(parameter), (parameter, []))[1].append(leaf)
        return layers, list(uses.values())


def assert_same_state(found: dict[str, Tensor], net: nn.Module) -> None:
    """Assert that a state dict has the net's names, dtypes and bits."""
    expected = net.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"
