"""Ordinary modules as layers of the engine: each member of an `nn.Sequential` becomes a `ModuleLayer` on `meta`."""

import copy
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchround.engine.store.bundles import owner_of
from torchround.layer import LayeredModel
from torchround.library.refusals import PipelineUsageError
from torchround.library.sample_batch import LossFn, SampleBatch, tensors_of
from torchround.library.seeds import drawing

# The attribute of a `ModuleLayer` that holds the user's module, and so the first part of its parameters' paths.
MEMBER = "module"


class ModuleLayer(nn.Module):
    """A layer that calls a copy of a user's module. The last one also calls the loss function.

    PyTorch chooses some kernels by what requires a gradient. Parameters and inputs therefore require one exactly if they
    do in a plain loop, in every stage. The probe finds out the rest:

    - `draws`: whether the module draws random numbers. Until then it is true.
    - `receives`: which tensors of its input receive a gradient in a plain loop.
    - `needs_graph`: whether it gives other values without a graph than with one. Its forward stages then make one.
    """

    def __init__(self, module: nn.Module, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self.is_first, self.is_last = is_first, is_last
        self.forget_probe()
        self._trained = [path for path, parameter in self.named_parameters() if parameter.requires_grad]
        self._modes = {path: part.training for path, part in module.named_modules()}
        self._in_training = True
        # The engine binds each path of a parameter to a tensor of its own. Gradients of all uses must meet in one.
        first: dict[int, str] = {}
        self._same: list[tuple[str, str]] = []
        for path, parameter in self.named_parameters(remove_duplicate=False):
            if path != first.setdefault(id(parameter), path):
                self._same.append((path, first[id(parameter)]))

    def forget_probe(self) -> None:
        """Forget what a probe has found."""
        self.draws, self.needs_graph = True, False
        self.receives: tuple[bool, ...] = ()

    def forward(self, hidden: Any, batch: SampleBatch) -> Any:
        """Return the module's output for its input; the last layer returns the loss if the batch has a loss function."""
        for path, first in self._same:
            owner, name = owner_of(self, path)
            setattr(owner, name, self.get_parameter(first))
        for path in self._trained:
            self.get_parameter(path).requires_grad_(True)
        self.use_modes(batch.is_training)
        value = batch.inputs_and_labels()[0] if self.is_first else hidden
        makes_graph = self.needs_graph and batch.is_training and not torch.is_grad_enabled()
        if makes_graph and not self.is_first:
            value = _each_tensor_once(
                value, lambda tensor, wish: tensor.detach().requires_grad_(wish), self.receives
            )
        elif batch.is_training and not all(self.receives) and torch.is_grad_enabled():
            value = _each_tensor_once(
                value, lambda tensor, wish: tensor if wish else tensor.detach(), self.receives
            )
        seeded = self._drawing(batch, 0) if self.draws else nullcontext()
        with seeded, torch.enable_grad() if makes_graph else nullcontext():
            output = self.module(value)
        if makes_graph:
            output = _each_tensor_once(output, lambda tensor, _: tensor.detach())
        if not self.is_last or batch.loss_fn is None:
            return output
        with self._drawing(batch, 1):
            return loss_of(batch.loss_fn, output, batch.inputs_and_labels()[1])

    def _drawing(self, batch: SampleBatch, offset: int) -> AbstractContextManager[None]:
        return drawing(batch.layer_seed(offset), batch.parts[0].device)

    def use_modes(self, is_training: bool) -> None:
        """Give each part the mode that the net had, or evaluation mode, if the last call was of the other kind."""
        if is_training != self._in_training:
            for path, mode in self._modes.items():
                self.module.get_submodule(path).training = mode and is_training
            self._in_training = is_training


def _each_tensor_once(
    value: Any, change: Callable[[Tensor, bool], Tensor], flags: Iterable[bool] = ()
) -> Any:
    """Change each tensor by the next flag, one for each tensor.

    A tensor that comes twice stays one, because the engine sends it once and takes one gradient for it.
    """
    changed: dict[int, Tensor] = {}
    left = iter(flags)

    def changed_once(tensor: Tensor) -> Tensor:
        flag = next(left, True)
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor, flag)
        return changed[id(tensor)]

    return pytree.tree_map_only(Tensor, changed_once, value)


def loss_of(loss_fn: LossFn, output: Any, labels: Any) -> Tensor:
    """Return the loss of a micro-batch. Raises `PipelineUsageError` if it is not a single floating-point number."""
    if isinstance(loss_fn, nn.Module) and (buffer := next(loss_fn.buffers(), None)) is not None:
        device = next((tensor.device for tensor in tensors_of(output)), buffer.device)
        loss_fn = loss_fn if buffer.device == device else copy.deepcopy(loss_fn).to(device)
    loss = loss_fn(output, labels)
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = (
            f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        )
        raise PipelineUsageError(
            f"loss_fn returned {found}; it must return a tensor of one floating-point number"
        )
    return loss


@dataclass(frozen=True)
class WrappedNet:
    """A net in the form of the engine.

    - `model`: the layers, with parameters on `meta`. Buffers are the net's own.
    - `stored`: for each name of the plain net's parameters, tied ones under each of their names, the name in the store.
    - `dtypes`: for each of these names the dtype that the plain net has.
    """

    model: LayeredModel
    stored: dict[str, str]
    dtypes: dict[str, torch.dtype]

    def layers(self) -> list[ModuleLayer]:
        """Return the layers in their order."""
        return [layer for layer in self.model.layers if isinstance(layer, ModuleLayer)]

    def members(self) -> dict[str, nn.Module]:
        """Return the copies of the user's modules by their names in the net."""
        return {name: layer.module for name, layer in zip(self.model.names, self.layers(), strict=True)}


def wrap(net: nn.Sequential, undecayed: Collection[str] = ()) -> WrappedNet:
    """Copy the structure of a net, not its weights. `undecayed` names parameters without weight decay, tied or not."""
    named = dict(net.named_parameters(remove_duplicate=False))
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    spared = {id(named[name]) for name in undecayed}
    meta = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        for parameter in named.values()
    }
    buffers = {id(buffer): buffer for buffer in net.buffers()}
    layers: list[ModuleLayer] = []
    stored: dict[str, str] = {}
    first: dict[int, str] = {}
    for index, (name, module) in enumerate(zip(net._modules, net, strict=True)):
        # A copy for each place: a module that the net holds twice is bound to other memory at each.
        shell = copy.deepcopy(module, {**meta, **buffers})
        layers.append(ModuleLayer(shell, index == 0, index == len(net) - 1))
        for path, parameter in shell.named_parameters(remove_duplicate=False):
            stored[f"{name}.{path}"] = first.setdefault(id(parameter), f"{name}.{MEMBER}.{path}")
    widest = store_dtype(dtypes.values())
    model = LayeredModel(
        tuple(net._modules),
        tuple(layers),
        own_dtypes={stored[name]: dtype for name, dtype in dtypes.items() if dtype != widest},
        decayed=frozenset(stored[name] for name, value in named.items() if id(value) not in spared),
    )
    return WrappedNet(model, stored, dtypes)


def store_dtype(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """Return the dtype that weights travel in: the net's if it has only one, otherwise float32."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else torch.float32
