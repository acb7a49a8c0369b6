"""The plain loop that `torchround.Pipeline` is compared with, on one thread and without the engine.

Gradients add up as docs/library.md says: those of one call over its micro-batches, for each layer that uses a parameter
apart; then over the layers that share it, the last one first; then over calls.
"""

import copy

import numpy as np
import torch
from torch import nn

from tests.support.reference import adamw_moments
from torchround.library.sample_batch import cut
from torchround.library.seeds import drawing, layer_seed


class OurAdamW(torch.optim.Optimizer):
    def __init__(self, named, lr, weight_decay=0.0):
        super().__init__(named, {"lr": lr, "weight_decay": weight_decay})

    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                number, first, second = self.state[parameter].get("kept", (0, np.float32(0), np.float32(0)))
                gradient, weight = parameter.grad.numpy(), parameter.detach().numpy()
                lr, number = group["lr"], number + 1
                first, second, step = adamw_moments(first, second, gradient, lr, (0.9, 0.999), 1e-8, number)
                weight[:] = weight * np.float32(1 - lr * group["weight_decay"]) + step(first, second)
                self.state[parameter]["kept"] = number, first, second


class PlainNet:
    """A copy of an `nn.Sequential` that trains in a loop. `make` makes its optimizer from named float32 weights.

    Weights of other dtypes are copies of those, as in the engine.
    """

    def __init__(self, net, make=None, seed=0):
        self.net = copy.deepcopy(net)
        self.seed = seed
        self.calls = 0
        self._weights = {
            name: (parameter, parameter if parameter.dtype == torch.float32 else nn.Parameter(parameter.float()))
            for name, parameter in self.net.named_parameters()
            if parameter.requires_grad
        }
        named = [(name, weight) for name, (_, weight) in self._weights.items()]
        self.optimizer = make(named) if make is not None else None
        self._gradients = {}

    def forward_backward(self, inputs, labels, loss_fn, num_micro_batches=3):
        layers, uses = self._layers_of_their_own()
        losses = []
        batches = cut(inputs, labels, num_micro_batches, loss_fn, is_training=True, seed=self.seed, call=self.calls)
        for batch in batches:
            loss = self._loss(layers, batch)
            loss.backward()
            losses.append(loss.item())
        for key, leaves in uses.items():
            for leaf in reversed(leaves):
                found = torch.zeros(leaf.shape) if leaf.grad is None else leaf.grad
                self._gradients[key] = found + self._gradients[key] if key in self._gradients else found
        self.calls += 1
        return sum(losses)

    def step(self):
        assert self.optimizer is not None, "an optimizer is needed to step"
        for parameter, weight in self._weights.values():
            weight.grad = self._gradients[id(parameter)]
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._gradients = {}
        with torch.no_grad():
            for parameter, weight in self._weights.values():
                parameter.copy_(weight)

    def _loss(self, layers, batch):
        # Devices have a micro-batch in memory of its own. At another alignment kernels may round otherwise.
        own = batch.rebuild()([part.clone() for part in batch.tensors()])
        hidden, labels = own.inputs_and_labels()
        for index, layer in enumerate(layers):
            with drawing(layer_seed(self.seed, self.calls, batch.micro_batch, index)):
                hidden = layer(hidden)
        with drawing(layer_seed(self.seed, self.calls, batch.micro_batch, len(layers))):
            assert batch.loss_fn is not None, "a training batch has a loss"
            return batch.loss_fn(hidden, labels)

    def _layers_of_their_own(self):
        """Return copies of the layers that share nothing, and for each parameter its leaves in the layers' order."""
        layers = []
        uses = {}
        for layer in self.net._modules.values():
            assert layer is not None, "every member is a module"
            memo = {}
            layers.append(copy.deepcopy(layer, memo))
            for parameter in layer.parameters():
                if parameter.requires_grad:
                    leaf = memo[id(parameter)]
                    leaf.grad_dtype = torch.float32  # devices add gradients up in float32
                    uses.setdefault(id(parameter), []).append(leaf)
        return layers, uses


def assert_same_state(found, net):
    expected = net.state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), f"{name} differs by {(found[name] - value).abs().max()}"
