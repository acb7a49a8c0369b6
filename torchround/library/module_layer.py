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
from torchround.library.refusals import PipelineUsageError, layer_text
from torchround.library.sample_batch import LossFn, SampleBatch
from torchround.library.seeds import UnseededDrawError, drawing

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
        self.is_first = is_first
        self.is_last = is_last
        self.draws = True
        self.needs_graph = False
        self.receives: tuple[bool, ...] = ()
        self._trained = [path for path, parameter in self.named_parameters() if parameter.requires_grad]
        self._modes = {path: part.training for path, part in module.named_modules()}
        self._in_training = True
        # The engine binds each path of a parameter to a tensor of its own. Gradients of all uses must meet in one.
        first: dict[int, str] = {}
        self._same: list[tuple[str, str]] = []
        for path, parameter in self.named_parameters(remove_duplicate=False):
            if path != first.setdefault(id(parameter), path):
                self._same.append((path, first[id(parameter)]))

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
        if batch.is_training and not self.is_first:
            value = self._as_received(value, makes_graph)
        with self._drawing(batch, 0) if self.draws else nullcontext():
            if makes_graph:
                with torch.enable_grad():
                    output = self.module(value)
                output = _each_tensor_once(output, lambda tensor, _: tensor.detach())
            else:
                output = self.module(value)
        if not self.is_last or batch.loss_fn is None:
            return output
        with self._drawing(batch, 1):
            return loss_of(batch.loss_fn, output, batch.inputs_and_labels()[1])

    def _as_received(self, hidden: Any, makes_graph: bool) -> Any:
        """Return the input with a gradient for the tensors that receive one in a plain loop, and for no others."""
        if makes_graph:
            return _each_tensor_once(
                hidden, lambda tensor, wish: tensor.detach().requires_grad_(wish), self.receives, False
            )
        if all(self.receives) or not torch.is_grad_enabled():
            return hidden
        return _each_tensor_once(
            hidden, lambda tensor, wish: tensor if wish else tensor.detach(), self.receives, True
        )

    def _drawing(self, batch: SampleBatch, offset: int) -> AbstractContextManager[None]:
        device = batch.parts[0].device
        return drawing(batch.layer_seed(offset), device)

    def use_modes(self, is_training: bool) -> None:
        """Give each part the mode that the net had, or evaluation mode, if the last call was of the other kind."""
        if is_training != self._in_training:
            for path, mode in self._modes.items():
                self.module.get_submodule(path).training = mode and is_training
            self._in_training = is_training


def _each_tensor_once(
    value: Any,
    change: Callable[[Tensor, bool], Tensor],
    flags: Iterable[bool] = (),
    without: bool = False,
) -> Any:
    """Change each tensor by the next flag, or by `without` behind the last flag.

    A tensor that comes twice stays one, because the engine sends it once and takes one gradient for it.
    """
    changed: dict[int, Tensor] = {}
    left = iter(flags)

    def changed_once(tensor: Tensor) -> Tensor:
        flag = next(left, without)
        if id(tensor) not in changed:
            changed[id(tensor)] = change(tensor, flag)
        return changed[id(tensor)]

    return pytree.tree_map_only(Tensor, changed_once, value)


def loss_of(loss_fn: LossFn, output: Any, labels: Any) -> Tensor:
    """Return the loss of a micro-batch. Raises `PipelineUsageError` if it is not a single floating-point number."""
    if isinstance(loss_fn, nn.Module) and (buffer := next(loss_fn.buffers(), None)) is not None:
        devices = [leaf.device for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
        device = devices[0] if devices else buffer.device
        loss_fn = loss_fn if buffer.device == device else copy.deepcopy(loss_fn).to(device)
    name = getattr(loss_fn, "__name__", type(loss_fn).__name__)
    try:
        loss = loss_fn(output, labels)
    except (MemoryError, torch.OutOfMemoryError, UnseededDrawError):
        raise
    except Exception as error:
        raise PipelineUsageError(f"loss_fn ({name}) failed: {type(error).__name__}: {error}") from error
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        found = (
            f"{loss.dtype} {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        )
        raise PipelineUsageError(
            f"loss_fn ({name}) returned {found}; it must return one floating-point number as a tensor, "
            "such as the mean or the sum over the micro-batch"
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
        pairs = zip(self.model.names, self.layers(), strict=True)
        return {name: layer.module for name, layer in pairs}


def wrap(net: nn.Sequential, is_decayed: Callable[[str], bool]) -> WrappedNet:
    """Copy the structure of a net, not its weights. `is_decayed` says which of the net's parameters have weight decay.

    A tied parameter decays if it does under its first name. Raises `PipelineUsageError` if a layer cannot be copied.
    """
    shells = {
        id(parameter): nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad
        )
        for parameter in net.parameters()
    }
    buffers = {id(buffer): buffer for buffer in net.buffers()}
    names, layers = list(net._modules), []
    for index, (name, module) in enumerate(net._modules.items()):
        assert module is not None, "check_net refuses a layer that is no module"
        try:
            # A copy for each place: a module that the net holds twice is bound to other memory at each.
            shell = copy.deepcopy(module, {**shells, **buffers})
        except Exception as error:
            raise PipelineUsageError(
                f"{layer_text(name, module)} cannot be copied, which each device needs: {error}. Let its attributes be "
                "plain values, or give the class a __deepcopy__"
            ) from error
        layers.append(ModuleLayer(shell, index == 0, index == len(names) - 1))
    stored: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, layer in zip(names, layers, strict=True):
        for path, parameter in layer.named_parameters(remove_duplicate=False):
            stored_name = first.setdefault(id(parameter), f"{name}.{path}")
            stored[f"{name}.{path.removeprefix(MEMBER + '.')}"] = stored_name
    dtypes = {name: parameter.dtype for name, parameter in net.named_parameters(remove_duplicate=False)}
    widest = store_dtype(dtypes.values())
    model = LayeredModel(
        tuple(names),
        tuple(layers),
        own_dtypes={stored[name]: dtype for name, dtype in dtypes.items() if dtype != widest},
        decayed=frozenset(stored[name] for name, _ in net.named_parameters() if is_decayed(name)),
    )
    return WrappedNet(model, stored, dtypes)


def store_dtype(dtypes: Collection[torch.dtype]) -> torch.dtype:
    """Return the dtype that weights travel in: the net's if it has only one, otherwise float32."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else torch.float32
