"""Nets that would train wrongly without any error: each is refused by one message that names the layer."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchround.engine.errors import EngineUsageError

COMPUTE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
WRAPPERS = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.jit.ScriptModule)


class PipelineUsageError(EngineUsageError):
    """A net, batch, loss or setting that cannot work on stateless devices. The message says why and what to do."""


def layer_text(name: str, module: nn.Module) -> str:
    """Return the name of a layer in messages: its place in the net, and its class."""
    return f"layer {name} ({type(module).__name__})"


def check_net(net: nn.Module) -> None:
    """Raise `PipelineUsageError` if `net` is no `nn.Sequential` whose layers can run on other devices."""
    for problem in _problems(net):
        raise PipelineUsageError(problem)


def _problems(net: nn.Module) -> Iterator[str]:
    if not isinstance(net, nn.Sequential) or type(net).forward is not nn.Sequential.forward or not len(net):
        yield f"the net is a {type(net).__name__}; give an nn.Sequential of layers, without a forward of its own"
        return
    for name, _ in (*net.named_parameters(recurse=False), *net.named_buffers(recurse=False)):
        yield f"{name} belongs to the nn.Sequential itself; put it into the layer that uses it"
    for path, module in net.named_modules():
        name, _, inner = path.partition(".")
        where = layer_text(name, net.get_submodule(name)) if name else "the net"
        yield from _module_problems(where + (f", {inner}" if inner else ""), module)


def _module_problems(where: str, module: nn.Module) -> Iterator[str]:
    for name, tensor in {**module._parameters, **module._buffers}.items():
        if getattr(tensor, "_backward_hooks", None) or getattr(tensor, "_post_accumulate_grad_hooks", None):
            yield f"{where}: {name} has a hook, which would be lost; change gradients in the optimizer"
        if tensor is not None and not _can_be_stored(tensor):
            yield (
                f"{where}: {name} is a {type(tensor).__name__} of {tensor.dtype} and {tensor.layout} on {tensor.device}; "
                "give plain dense tensors with values on the CPU, and parameters in float32, bfloat16 or float16"
            )
    is_compiled = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    if is_compiled or isinstance(module, WRAPPERS):
        yield f"{where} is compiled or wrapped in {type(module).__name__}; give the plain module"
    for kind in HOOKS:
        if getattr(module, kind, None):
            name = kind.strip("_").replace("_", " ")
            yield f"{where} has {name}, which devices would run on copies and twice; do it in the forward"
    for name, value in vars(module).items():
        # A recurrent module keeps its weights in a list, too, which follows its parameters.
        if name in ("_parameters", "_buffers", "_modules") or (
            isinstance(module, nn.RNNBase) and name == "_flat_weights"
        ):
            continue
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, (nn.Module, Tensor)):
                kind = type(leaf).__name__
                yield f"{where}: attribute {name} holds a {kind}; use nn.ModuleList, ParameterList or a buffer"


def _can_be_stored(tensor: Tensor) -> bool:
    return (
        type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and (tensor.dtype in COMPUTE_DTYPES or not isinstance(tensor, nn.Parameter))
    )


def check_number(name: str, value: object) -> None:
    """Raise `PipelineUsageError` if a setting is no finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise PipelineUsageError(f"{name} = {value!r}; legal: a finite number from 0 on")


def check_loss(loss_fn: Any) -> None:
    """Raise `PipelineUsageError` for a loss with parameters, which would not be trained."""
    if isinstance(loss_fn, nn.Module) and (names := [name for name, _ in loss_fn.named_parameters()]):
        raise PipelineUsageError(
            f"loss_fn ({type(loss_fn).__name__}) has parameters ({', '.join(names)}), which would not be trained; "
            "make it the last layer of the net, and let loss_fn pick its result"
        )
