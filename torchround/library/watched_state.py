"""What a module remembers between calls: its buffers, parameters and attributes, before a call and after it."""

import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules")
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
# Containers and objects inside each other are followed this deep.
_DEPTH = 4


def remember(module: nn.Module) -> dict[str, Any]:
    """Return a token for everything that the module and its parts hold, by name. Buffers are copied."""
    return dict(_tokens(module))


def changes(module: nn.Module, before: dict[str, Any]) -> str:
    """Return what differs from `before`, in words; an empty text if nothing does."""
    after = dict(_tokens(module))
    names = [name for name in {**before, **after} if not _alike(before.get(name), after.get(name))]
    return ", ".join(names)


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, _Buffer) and isinstance(other, _Buffer):
        return one.alike(other)
    return bool(one == other)


class _Buffer:
    """A tensor at one moment: which object it is, and its values."""

    def __init__(self, tensor: Tensor) -> None:
        self._identity = (id(tensor), tensor._version)
        self._values = tensor.detach().clone()

    def alike(self, other: "_Buffer") -> bool:
        return self._identity == other._identity and torch.equal(
            *(each._values.contiguous().reshape(-1).view(torch.uint8) for each in (self, other))
        )


def _tokens(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for name, buffer in part._buffers.items():
            yield f"buffer {prefix}{name}", None if buffer is None else _Buffer(buffer)
        for name, parameter in part._parameters.items():
            yield (
                f"parameter {prefix}{name}",
                None if parameter is None else (id(parameter), parameter._version),
            )
        for name, member in part._modules.items():
            yield f"module {prefix}{name}", id(member)
        for name, value in vars(part).items():
            # A recurrent module finds out in its forward that its weights were exchanged, and lists them anew.
            is_list_of_weights = isinstance(part, nn.RNNBase) and name.startswith("_flat_weight")
            if name not in _OWN and not is_list_of_weights:
                yield f"attribute {prefix}{name}", _token(value, _DEPTH)


def _token(value: Any, depth: int) -> Any:
    """Return something that is equal again if and only if, as far as can be seen, the value has not changed."""
    if isinstance(value, Tensor):
        return id(value), value._version
    if isinstance(value, torch.Generator):
        return bytes(value.get_state().tolist())
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value), repr(value)
    if not depth or isinstance(value, (*_CODE, nn.Module)):
        return id(value)
    if isinstance(value, dict):
        return id(value), tuple((_token(key, 0), _token(each, depth - 1)) for key, each in value.items())
    if isinstance(value, (list, tuple)):
        # A tuple that is made anew with the same members is no change.
        identity = 0 if isinstance(value, tuple) else id(value)
        return identity, tuple(_token(each, depth - 1) for each in value)
    if isinstance(value, (set, frozenset)):
        return id(value), len(value)
    return id(value), _token(dict(vars(value)), depth - 1)[1] if hasattr(value, "__dict__") else 0
