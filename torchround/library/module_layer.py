"""Ordinary modules as layers of the engine: each member of an `nn.Sequential` becomes a `ModuleLayer` on `meta`."""

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchround.engine.errors import EngineUsageError
from torchround.engine.store.bundles import WEIGHTS, owner_of
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.slots import flatten, unflatten
from torchround.layer import LayeredModel
from torchround.library.sample_batch import LossFn, SampleBatch, tensors_of
from torchround.library.seeds import drawing

# The attribute of a `ModuleLayer` that holds the user's module, and so the first part of its parameters' paths.
MEMBER = "module"
COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ModuleLayer(nn.Module):
    """A layer that calls a copy of a user's module. The last one also calls the loss function.

    PyTorch chooses some kernels by what requires a gradient, and by whether there is a graph. Parameters and inputs therefore
    require one exactly if they do in a plain loop, and forward stages make a graph, which is dropped at once. The probe finds
    out the rest:

    - `draws`: whether the module draws random numbers. Until then it is true.
    - `receives`: which tensors of its input receive a gradient in a plain loop.
    """

    def __init__(self, module: nn.Module, is_first: bool, is_last: bool) -> None:
        super().__init__()
        self.module = module
        self.is_first, self.is_last = is_first, is_last
        self.draws = True
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
        """Compute the module's output for its input; the last layer returns the loss if the batch has a loss function."""
        for path, first in self._same:
            owner, name = owner_of(self, path)
            setattr(owner, name, self.get_parameter(first))
        for path in self._trained:
            self.get_parameter(path).requires_grad_(True)
        self.use_modes(batch.is_training)
        in_forward_stage = batch.is_training and not torch.is_grad_enabled()
        if self.is_first:
            hidden = batch.inputs_and_labels()[0]
        elif batch.is_training and self.receives:
            tensors, structure = flatten(hidden)
            pairs = zip(tensors, self.receives, strict=True)
            # Without a graph the stage's input requires no gradient, and with one each floating-point tensor of it does.
            made = [
                one if wish and not in_forward_stage else one.detach().requires_grad_(wish)
                for one, wish in pairs
            ]
            hidden = unflatten(made, structure)
        seeded = self._drawing(batch, 0) if self.draws else nullcontext()
        with seeded, torch.set_grad_enabled(batch.is_training):
            output = self.module(hidden)
        if in_forward_stage:
            tensors, structure = flatten(output)
            output = unflatten([tensor.detach() for tensor in tensors], structure)
        if not self.is_last or batch.loss_fn is None:
            return output
        with self._drawing(batch, 1):
            return _on_device_of(output, batch.loss_fn)(output, batch.inputs_and_labels()[1])

    def _drawing(self, batch: SampleBatch, offset: int) -> AbstractContextManager[None]:
        return drawing(batch.layer_seed(offset), batch.parts[0].device)

    def use_modes(self, is_training: bool) -> None:
        """Give each part the mode that the net had, or evaluation mode, if the last call was of the other kind."""
        if is_training != self._in_training:
            for path, mode in self._modes.items():
                self.module.get_submodule(path).training = mode and is_training
            self._in_training = is_training


def _on_device_of(output: Any, loss_fn: LossFn) -> LossFn:
    """Copy a loss function with tensors of its own, such as weights of classes, to the device of the output."""
    if not isinstance(loss_fn, nn.Module) or (own := next(loss_fn.buffers(), None)) is None:
        return loss_fn
    device = next((tensor.device for tensor in tensors_of(output)), own.device)
    return loss_fn if own.device == device else copy.deepcopy(loss_fn).to(device)


@dataclass(frozen=True)
class WrappedNet:
    """A net in the form of the engine.

    - `net`: the copies of the user's modules, with parameters on `meta` and the net's own buffers.
    - `model`, `layers`: the same as layers.
    - `stored`: for each name of the plain net's parameters, tied ones under each of their names, the name in the store.
    - `dtypes`: for each of these names the dtype that the plain net has.
    - `store_dtype`: the dtype that weights travel in: the net's if it has only one, otherwise float32.
    """

    net: nn.Sequential
    model: LayeredModel
    layers: tuple[ModuleLayer, ...]
    stored: dict[str, str]
    dtypes: dict[str, torch.dtype]
    store_dtype: torch.dtype

    def fill(self, store: HostStore, state: Mapping[str, Tensor]) -> None:
        """Copy a state dict of the plain net into the store and the buffers, and derive the device weights from it."""
        with torch.no_grad():
            store.write_weights({stored: state[name] for name, stored in self.stored.items()})
            for name, value in self.net.state_dict().items():
                if name not in self.stored:
                    value.copy_(state[name])

    def weights(self, store: HostStore) -> dict[str, Tensor]:
        """Copy weights and buffers as a state dict of the plain net. A tied tensor is one tensor under its names."""
        weights = store.weights()
        keys = {name: (stored, self.dtypes[name]) for name, stored in self.stored.items()}
        copies = {key: weights[key[0]].to(key[1], copy=True) for key in set(keys.values())}
        return {
            name: copies[keys[name]] if name in keys else value.clone()
            for name, value in self.net.state_dict().items()
        }

    def kept_views(self, store: HostStore) -> dict[str, Tensor]:
        """View what the store keeps beside the weights: the optimizer's state, and further bits of weights."""
        names = {} if store.splits_weights else self.stored
        exact = {f"{WEIGHTS}/{stored}": self.dtypes[name] for name, stored in names.items()}
        return {key: view for key, view in store.named_views().items() if view.dtype != exact.get(key)}


def wrap(net: nn.Sequential) -> WrappedNet:
    """Copy the structure of a net, not its weights."""
    named = dict(net.named_parameters(remove_duplicate=False))
    dtypes = {name: parameter.dtype for name, parameter in named.items()}
    meta = {
        id(value): nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)
        for value in named.values()
    }
    buffers = {id(buffer): buffer for buffer in net.buffers()}
    shells: dict[str, nn.Module] = {}
    stored: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, module in zip(net._modules, net, strict=True):
        # A copy for each place: a module that the net holds twice is bound to other memory at each.
        shells[name] = shell = copy.deepcopy(module, {**meta, **buffers})
        for path, parameter in shell.named_parameters(remove_duplicate=False):
            stored[f"{name}.{path}"] = first.setdefault(id(parameter), f"{name}.{MEMBER}.{path}")
    last = len(net) - 1
    layers = tuple(
        ModuleLayer(shell, index == 0, index == last) for index, shell in enumerate(shells.values())
    )
    found = set(dtypes.values())
    widest = found.pop() if len(found) == 1 else torch.float32
    own_dtypes = {stored[name]: dtype for name, dtype in dtypes.items() if dtype != widest}
    model = LayeredModel(tuple(shells), layers, own_dtypes=own_dtypes)
    return WrappedNet(nn.Sequential(OrderedDict(shells)), model, layers, stored, dtypes, widest)


def layer_text(name: str, module: nn.Module) -> str:
    """Name a layer in messages: its place in the net, and its class."""
    return f"layer {name} ({type(module).__name__})"


def check_net(net: nn.Module) -> None:
    """Raise `EngineUsageError` if `net` is no `nn.Sequential` whose layers can run on other devices."""
    is_plain = isinstance(net, nn.Sequential) and type(net).forward is nn.Sequential.forward and len(net) > 0
    if not is_plain or net._parameters or net._buffers:
        raise EngineUsageError(
            f"the net is a {type(net).__name__}; give an nn.Sequential of layers, without a forward or tensors of its own"
        )
    for path, module in net.named_modules():
        name, _, inner = path.partition(".")
        where = layer_text(name, net.get_submodule(name)) if name else "the net"
        for problem in _problems(module):
            raise EngineUsageError(f"{where}{f', {inner}' if inner else ''} {problem}")


def _problems(module: nn.Module) -> Iterator[str]:
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if tensor is None:
            continue
        is_legal = tensor.dtype in COMPUTE_DTYPES or name in module._buffers
        if not is_legal or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
            yield (
                f"has {name} in {tensor.dtype}, {tensor.layout}, on {tensor.device}; legal: dense tensors on the CPU, "
                "parameters in float32, bfloat16 or float16"
            )
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            yield f"has a hook of {name}, which would be lost; change gradients in the optimizer"
    if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
        yield "is compiled; give the plain module"
    if any(getattr(module, kind, None) for kind in HOOKS):
        yield "has hooks, which devices would run on copies and twice; do it in the forward"
