"""What cannot work in `torchround.Pipeline`, found before a layer runs: each message names the layer and the remedy."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from torchround.accelerators import known_kinds
from torchround.engine.errors import EngineUsageError
from torchround.planning.partition import Partition

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Attributes of a module that hold its hooks, with what each kind is called.
HOOKS = {
    "_forward_hooks": "a forward hook",
    "_forward_pre_hooks": "a forward pre-hook",
    "_backward_hooks": "a backward hook",
    "_backward_pre_hooks": "a backward pre-hook",
}
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)


# Calls of a plain loop on its module or its optimizer, with what takes their place.
CALLS_OF_A_LOOP = {
    **dict.fromkeys(
        ("train", "eval"),
        "leave it out: forward_backward() computes in the mode that the net had, forward() in evaluation mode",
    ),
    **dict.fromkeys(("to", "cpu", *known_kinds()), "leave it out: Pipeline(devices=..) takes the devices"),
    "zero_grad": "leave it out: step() leaves no gradient",
    "backward": "forward_backward(inputs, labels, loss_fn) computes loss and gradients",
}
# Arguments that RoundPipe's forward_backward has, with ours.
ROUNDPIPE_ARGUMENTS = {
    "input_args": "inputs, the one argument of the first layer",
    "input_kwargs": "inputs, the one argument of the first layer",
    "label": "labels",
    "run_config": "num_micro_batches",
}
P = ParamSpec("P")
T = TypeVar("T")


class PipelineUsageError(EngineUsageError):
    """A net, batch, loss or setting that cannot work on stateless devices. The message says why and what to do."""


def names_arguments(method: Callable[P, T]) -> Callable[P, T]:
    """Let a method answer RoundPipe's names of its arguments with a `PipelineUsageError` that names ours."""

    @wraps(method)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        if found := sorted(kwargs.keys() & ROUNDPIPE_ARGUMENTS.keys()):
            pairs = "; ".join(f"{name}: give {ROUNDPIPE_ARGUMENTS[name]}" for name in found)
            raise PipelineUsageError(f"{method.__name__}() has other arguments: {pairs}")
        return method(*args, **kwargs)

    return checked


def layer_text(name: str, module: nn.Module) -> str:
    """Return how messages name a layer: its place in the net, and its class."""
    return f"layer {name} ({type(module).__name__})"


def check_net(net: nn.Module) -> None:
    """Raise `PipelineUsageError` if `net` is no `nn.Sequential` whose layers can run on other devices."""
    if type(net).__name__ == "OptimizedModule" or isinstance(net, WRAPPERS):
        raise PipelineUsageError(
            f"the net is wrapped in {type(net).__name__}; give the plain nn.Sequential that it wraps"
        )
    if not isinstance(net, nn.Sequential):
        raise PipelineUsageError(
            f"the net is a {type(net).__name__}; give an nn.Sequential, whose members are the layers"
        )
    if type(net).forward is not nn.Sequential.forward:
        raise PipelineUsageError(
            f"{type(net).__name__} has a forward of its own, which would not be called; "
            "put what it does into a layer of the nn.Sequential"
        )
    if not len(net):
        raise PipelineUsageError("the nn.Sequential has no layer")
    own = [name for name, _ in (*net.named_parameters(recurse=False), *net.named_buffers(recurse=False))]
    if own:
        raise PipelineUsageError(
            f"{', '.join(own)} belongs to the nn.Sequential itself; put it into the layer that uses it"
        )
    for found in hooks_of("the net", net):
        raise PipelineUsageError(found)
    for name, module in net._modules.items():
        _check_layer(name, module)


def _check_layer(name: str, layer: Any) -> None:
    if not isinstance(layer, nn.Module):
        raise PipelineUsageError(f"layer {name} is {layer!r}, not an nn.Module")
    what = layer_text(name, layer)
    tensors = (*layer.named_parameters(remove_duplicate=False), *layer.named_buffers(remove_duplicate=False))
    for path, tensor in tensors:
        if problem := tensor_problem(tensor):
            raise PipelineUsageError(f"{what}: {path} {problem}")
    for path, module in layer.named_modules():
        where = f"{what}, {path}" if path else what
        if type(module).__name__ == "OptimizedModule" or isinstance(module, WRAPPERS):
            raise PipelineUsageError(
                f"{where} is wrapped in {type(module).__name__}; give the plain module that it wraps"
            )
        if module._compiled_call_impl is not None:
            raise PipelineUsageError(f"{where} was compiled by compile(); give the module before that")
        for found in (*hooks_of(where, module), *hidden_members(where, module)):
            raise PipelineUsageError(found)


def tensor_problem(tensor: Tensor) -> str | None:
    """Return why a parameter or buffer cannot be kept in the host store, or None."""
    is_parameter = isinstance(tensor, nn.Parameter)
    if isinstance(tensor, (UninitializedParameter, UninitializedBuffer)):
        return "has no shape yet; run the net once on one sample, so that its lazy layers take their shapes"
    if tensor.is_meta:
        return "is on meta and has no values; fill it first (net.to_empty, then your initialisation)"
    if tensor.device.type != "cpu":
        return f"is on {tensor.device}; call net.cpu() first: the weights stay in host memory"
    if tensor.layout is not torch.strided:
        return f"has the layout {tensor.layout}; only dense tensors can be stored"
    if tensor.is_quantized:
        return f"is quantised ({tensor.dtype}); give the net with floating-point weights"
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        return f"is a {type(tensor).__name__}, a kind of tensor of its own; give a plain tensor"
    if not is_parameter:
        return None
    if tensor.dtype not in COMPUTE_DTYPES:
        remedy = (
            "call net.float() first" if tensor.is_floating_point() else "make it a buffer (register_buffer)"
        )
        return f"is {tensor.dtype}; parameters may be float32, bfloat16 or float16: {remedy}"
    if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "has a hook, which would be lost: gradients add up on devices; change them in the optimizer instead"
    return None


def hooks_of(where: str, module: nn.Module) -> Iterator[str]:
    """Yield what is wrong with the hooks of a module."""
    for attribute, kind in HOOKS.items():
        if getattr(module, attribute, None):
            yield (
                f"{where} has {kind}: each device has a copy of the layer and may run it twice, so a hook would run "
                "at other times and more often; remove it, or do its work inside the forward"
            )


def hidden_members(where: str, module: nn.Module) -> Iterator[str]:
    """Yield the attributes of a module that hold tensors or modules which PyTorch does not know of."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            continue
        if isinstance(module, nn.RNNBase) and name == "_flat_weights":
            continue  # it follows the module's parameters
        found = hidden_in(value)
        if isinstance(found, (nn.Module, nn.Parameter)):
            kind = "module" if isinstance(found, nn.Module) else "parameter"
            yield (
                f"{where}: attribute {name} holds a {kind} outside nn.Module's own lists, so it would not be trained "
                "with the layer; use nn.ModuleList, nn.ParameterList or a plain attribute"
            )
        elif found is not None:
            yield (
                f"{where}: attribute {name} holds a tensor, which would stay behind when the layer moves to a "
                f'device; use self.register_buffer("{name}", ...)'
            )


def hidden_in(value: Any, depth: int = 3) -> Any:
    """Return the first module or tensor inside a value of plain containers, or None."""
    if isinstance(value, (nn.Module, Tensor)):
        return value
    members: Any = ()
    if isinstance(value, dict):
        members = value.values()
    elif isinstance(value, (list, tuple, set, frozenset)):
        members = value
    for member in members if depth else ():
        if (found := hidden_in(member, depth - 1)) is not None:
            return found
    return None


def check_settings(update: object, partition: object, **numbers: object) -> None:
    """Raise `PipelineUsageError` for settings of a pipeline that are not legal. `numbers` must not be negative."""
    if update not in ("sync", "async"):
        raise PipelineUsageError(f'update = {update!r}; legal: "sync", "async"')
    if partition is not None and not isinstance(partition, Partition):
        raise PipelineUsageError(f"partition = {partition!r}; give a torchround.Partition, or None")
    for name, value in numbers.items():
        check_number(name, value)


def check_number(name: str, value: object) -> None:
    """Raise `PipelineUsageError` if a setting is no finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise PipelineUsageError(f"{name} = {value!r}; legal: a finite number from 0 on")


def check_training(net_layers: Mapping[str, nn.Module]) -> None:
    """Raise `PipelineUsageError` for layers, by name, that change their own state while they train."""
    for name, layer in net_layers.items():
        for path, module in layer.named_modules():
            tracks = getattr(module, "track_running_stats", False) and module.training
            if tracks and isinstance(module, nn.modules.batchnorm._NormBase):
                where = f"{layer_text(name, layer)}, {path}" if path else layer_text(name, layer)
                raise PipelineUsageError(
                    f"{where} keeps running statistics in training, which would differ between devices and "
                    "micro-batches; use nn.GroupNorm or nn.LayerNorm, or freeze the statistics with .eval() "
                    "before the net is given"
                )


def check_trained(net: Iterable[nn.Module]) -> None:
    """Raise `PipelineUsageError` if no layer has a parameter to train."""
    if not any(parameter.requires_grad for layer in net for parameter in layer.parameters()):
        raise PipelineUsageError(
            "no parameter of the net is trained (requires_grad); forward() computes outputs without training"
        )


def check_loss(loss_fn: Any) -> None:
    """Raise `PipelineUsageError` for a loss that is not callable, or that has parameters to train."""
    if not callable(loss_fn):
        raise PipelineUsageError(
            f"loss_fn is {loss_fn!r}; give a callable of (outputs, labels) that returns a number"
        )
    if isinstance(loss_fn, nn.Module):
        names = [name for name, _ in loss_fn.named_parameters()]
        if names:
            raise PipelineUsageError(
                f"loss_fn ({type(loss_fn).__name__}) has parameters ({', '.join(names)}), which would not be trained; "
                "make it the last layer of the net, and let loss_fn pick its result"
            )
