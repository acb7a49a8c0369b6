"""Random numbers of layers: each step, micro-batch and layer draws from a seed of its own.

A layer runs again in its backward stage, perhaps on another device and beside other layers, and must then draw the same
numbers. PyTorch's default generator of the CPU is one for all threads, so on the CPU the random operations of a layer
get a generator of their own. An accelerator's default generator is seeded before the layer.

A plain loop draws the same numbers if it runs each layer inside `drawing(layer_seed(seed, call, micro_batch, layer))`.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Number of the first call without gradients: an evaluation must not change what the next step draws.
INFERENCE = 1 << 39


def layer_seed(seed: int, call: int, micro_batch: int, layer: int) -> int:
    """Compute the 63-bit seed of a layer for one micro-batch of call number `call`, all counted from 0.

    Calls without gradients count from `INFERENCE`. `seed` is the pipeline's. The loss function draws as one more layer.
    """
    number = (seed * 2**40 + call) * 2**20 + micro_batch
    # Odd constants spread neighbouring numbers and layers over all 63 bits.
    return (number * 0xD1342543DE82EF95 + layer * 0xAF251AF3B0F025B5) % 2**63


@contextmanager
def drawing(seed: int, device: torch.device | str = "cpu") -> Iterator[None]:
    """Let random operations in the block draw from `seed`, whatever other threads draw meanwhile.

    On an accelerator the block seeds the default generator of the current device of that kind.
    """
    kind = torch.device(device).type
    if kind == "cpu":
        with _OwnGenerator(torch.Generator().manual_seed(seed)):
            yield
    else:
        torch.get_device_module(kind).manual_seed(seed)
        yield


def is_random(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Check whether an operator draws random numbers in this call."""
    if torch.Tag.nondeterministic_seeded not in function.tags:
        return False
    # Attention kernels carry the tag for their dropout, which may be 0.
    given = {**dict(zip(_arguments(function), args, strict=False)), **kwargs}
    return "attention" not in function.name() or bool(given.get("dropout_p", 0.0))


class _OwnGenerator(TorchDispatchMode):
    """A mode in which every random operation of this thread draws from one generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_random(func, args, kwargs) and kwargs.get("generator") is None:
            func, kwargs = _with_generator(func), {**kwargs, "generator": self._generator}
        return func(*args, **kwargs)


def _with_generator(function: Any) -> Any:
    """Find the overload of a random operator that takes a generator. Raises `RuntimeError` if it has none."""
    packet, wanted = function.overloadpacket, {*_arguments(function), "generator"}
    for overload in (function, *(getattr(packet, name) for name in packet.overloads())):
        if set(_arguments(overload)) == wanted:
            return overload
    raise RuntimeError(f"{function} takes no generator, so its random numbers cannot be seeded by layer")


def _arguments(function: Any) -> list[str]:
    return [argument.name for argument in function._schema.arguments]
