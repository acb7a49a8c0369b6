"""The value between two layers: its tensors in a fixed order, and its structure, which travels without them.

A value is a tensor, or tuples, lists, dicts and whatever else `torch.utils._pytree` knows, with tensors and plain
values as leaves. A tensor that comes twice travels once and is one object again on the other side, so that its
gradient adds up as if it had never left. Our own models hand on one tensor or a flat tuple; these take a short way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchround.layer import Hidden

# Plain values have the same meaning on every device and in every thread.
PLAIN = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.Size, range, slice, type, type(None))


@dataclass(frozen=True)
class Structure:
    """The form of a value without its tensors.

    `spec` is the tree of containers. For each leaf, `numbers` has the number of its tensor, or -1 for a plain value, which
    is at the same place of `plain`.
    """

    spec: Any
    numbers: tuple[int, ...]
    plain: tuple[Any, ...]


SINGLE: Final = Structure(None, (0,), (None,))  # a tensor by itself
FLAT: Final = Structure(None, (), ())  # a tuple of different tensors


def flatten(hidden: Hidden) -> tuple[tuple[Tensor, ...], Structure]:
    """Return the different tensors of a value and its structure.

    Raises `TypeError` for a leaf that is neither a tensor nor a plain value: it could not follow to another device.
    """
    if isinstance(hidden, Tensor):
        return (hidden,), SINGLE
    is_flat = type(hidden) is tuple and all(isinstance(part, Tensor) for part in hidden)
    if is_flat and len(set(map(id, hidden))) == len(hidden):
        return hidden, FLAT
    # PyTorch takes a size apart, and makes a tuple of it again.
    leaves, spec = pytree.tree_flatten(hidden, is_leaf=lambda part: isinstance(part, torch.Size))
    tensors: dict[int, tuple[int, Tensor]] = {}
    numbers = []
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            numbers.append(tensors.setdefault(id(leaf), (len(tensors), leaf))[0])
        elif isinstance(leaf, PLAIN):
            numbers.append(-1)
        else:
            raise TypeError(
                f"a {type(leaf).__module__}.{type(leaf).__qualname__} between two layers: only tensors and plain values "
                "(None, numbers, texts) can go there, in tuples, lists, dicts or named tuples"
            )
    plain = tuple(None if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return tuple(tensor for _, tensor in tensors.values()), Structure(spec, tuple(numbers), plain)


def unflatten(tensors: Sequence[Tensor], structure: Structure) -> Hidden:
    """Undo `flatten`, with other tensors if wanted."""
    if structure is SINGLE:
        return tensors[0]
    if structure is FLAT:
        return tuple(tensors)
    pairs = zip(structure.numbers, structure.plain, strict=True)
    leaves = [plain if number < 0 else tensors[number] for number, plain in pairs]
    return pytree.tree_unflatten(leaves, structure.spec)


def as_tuple(hidden: Hidden) -> tuple[Tensor, ...]:
    """Return the different tensors of a value."""
    return (hidden,) if isinstance(hidden, Tensor) else flatten(hidden)[0]


def as_hidden(tensors: Sequence[Tensor], single: bool) -> Hidden:
    """Undo `as_tuple` for a single tensor or a flat tuple."""
    return tensors[0] if single else tuple(tensors)


def has_gradient(tensor: Tensor) -> bool:
    """Tell whether a tensor of this dtype can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def kept_strides(tensor: Tensor) -> tuple[int, ...] | None:
    """Return the strides of a tensor that fills its memory in another order than its shape's, None for all others.

    A copy with the same strides lets the next layer run the same kernels as without the copy. A tensor that leaves gaps
    or covers memory twice is copied in the order of its shape. Strides of dimensions of size 1 count too: they change
    nothing in memory, but kernels are chosen by them. Raises `TypeError` for tensors without strides.
    """
    if tensor.layout is not torch.strided or tensor.is_nested:
        raise TypeError(
            f"a tensor of layout {tensor.layout} between two layers: only dense tensors can go there"
        )
    if tensor.is_contiguous() and (1 not in tensor.shape or _is_in_order(tensor)):
        return None
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.stride()


def _is_in_order(tensor: Tensor) -> bool:
    """Tell whether the strides, those of size 1 included, are as in a new tensor of the shape."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= size
    return True
