"""Blocks of recognised parts for the compiler: one piece of code for all blocks of a kind.

A compiled layer is a function of tensors. The core of a borrowed block is called with more: plain values, and places of
masks. These are the same for each micro-batch, so they become part of the code. The number of a block, which `transformers`
needs for a cache, would make each block a kind of its own; it is replaced by an object that nothing may read.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from torchround.layer import MicroBatch
from torchround.models.borrowed.shell import BlockCall, with_modules
from torchround.models.common.attention import documents_of

TENSOR = "a tensor"


class Unread:
    """The place of a block's number. Comparing it, computing with it or looking something up by it raises."""

    __hash__ = None  # type: ignore[assignment]

    def __deepcopy__(self, _: Any) -> "Unread":
        return self

    def _raise(self, *_: Any) -> Any:
        raise TypeError("the block reads its number")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __index__ = __int__ = __float__ = _raise
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __truediv__ = __rtruediv__ = (
        _raise
    )
    __floordiv__ = __str__ = __format__ = _raise


UNREAD = Unread()


def take_numbers(blocks: Iterable[nn.Module]) -> list[tuple[Any, int]]:
    """Replace the numbers of blocks in all their modules. Returns these, each with its number."""
    modules: list[Any] = [module for block in blocks for module in block.modules()]
    taken = [
        (module, module.layer_idx)
        for module in modules
        if isinstance(getattr(module, "layer_idx", None), int)
    ]
    for module, _ in taken:
        module.layer_idx = UNREAD
    return taken


class CoreOfTensors(nn.Module):
    """A core that is called with the hidden state, all other tensors, and the micro-batch."""

    # The hidden state alone gets a gradient.
    differentiable = 1
    leaves: tuple[Any, ...]
    structure: Any
    entries: int

    def forward(self, inputs: tuple[Tensor, ...], micro_batch: MicroBatch) -> Tensor:
        hidden, *others = inputs
        tensors = iter(others)
        leaves = [next(tensors) if leaf == TENSOR else leaf for leaf in self.leaves]
        call = BlockCall(*torch.utils._pytree.tree_unflatten(leaves, self.structure))
        call = call.with_documents(documents_of(micro_batch))
        found: Any = super().forward(hidden, *call.args, **call.kwargs)
        result: Tensor = found[0] if self.entries else found
        return result


def core_of_tensors(core: nn.Module, call: BlockCall, entries: int) -> Any:
    """Make a twin of `core` that is called as in `CoreOfTensors`, and otherwise as in `call`."""
    twin = with_modules(core, {})
    twin._modules.pop("shell", None)  # a child of the layer, which shares its children with the core
    kind: Any = type(core)
    twin.__class__ = _class_of(kind)
    leaves, twin.structure = torch.utils._pytree.tree_flatten((call.args, call.kwargs))
    twin.leaves = tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    twin.entries = entries
    if hasattr(twin, "layer_idx"):
        twin.layer_idx = UNREAD
    return twin


@cache
def _class_of(core: type) -> type:
    return type(f"{core.__name__}OfTensors", (CoreOfTensors, core), {})
