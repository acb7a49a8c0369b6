"""The operations whose results are worth keeping: products and attention kernels, with what each of them returns.

`torchround/keeping.py` collects these results and hands them out again.

Shapes: B sequences, T tokens, H heads, C channels of a head, N = B T.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class CollectedResult:
    """A result of an operation, as it is collected.

    `shape` and `dtype` are those of the collected tensor; None is not known before. `order` lists the result's dimensions
    in the order of its memory, which is the order of the collected tensor's dimensions; None means as they are.
    """

    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    order: tuple[int, ...] | None = None

    def in_memory_order(self, output: Tensor) -> Tensor:
        """Return what is collected of the operation's `output`: the same memory if it has the expected order."""
        return (output.detach() if self.order is None else output.permute(self.order)).contiguous()

    def as_returned(self, kept: Tensor) -> Tensor:
        if self.order is None:
            return kept.detach()
        return kept.permute([self.order.index(dimension) for dimension in range(len(self.order))])

    def fits(self, kept: Tensor) -> bool:
        return self.shape in (None, tuple(kept.shape)) and self.dtype in (None, kept.dtype)


Results = tuple[CollectedResult, ...]


def _product(left: Tensor, right: Tensor, *_: Any) -> Results:
    return (CollectedResult((*left.shape[:-1], right.shape[-1]), left.dtype),)


def _product_with_addend(addend: Tensor, left: Tensor, right: Tensor, *_: Any) -> Results:
    return _product(left, right)


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Results:
    """Describe `[B, H, T, C]`, in memory `[B, T, H, C]`, and the fp32 log-sum-exp, whose T kernels may pad."""
    batch, heads, tokens = query.shape[:3]
    output = CollectedResult((batch, tokens, heads, value.shape[-1]), query.dtype, (0, 2, 1, 3))
    return (output, CollectedResult(dtype=torch.float32))


def _attention_on_cpu(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Results:
    """Describe the output as the other kernels have it, and the log-sum-exp `[B, H, T]`, in memory `[B, T, H]`."""
    batch, heads, tokens = query.shape[:3]
    return (
        _attention(query, key, value)[0],
        CollectedResult((batch, tokens, heads), torch.float32, (0, 2, 1)),
    )


def _attention_by_offsets(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> Results:
    """Describe `[N, H, C]` and the fp32 log-sum-exp."""
    return (
        CollectedResult((*query.shape[:-1], value.shape[-1]), query.dtype),
        CollectedResult(dtype=torch.float32),
    )


# The expensive operations, and the results of each that are kept: the first ones.
PRODUCTS: dict[str, Callable[..., Results]] = {
    "aten::mm": _product,
    "aten::bmm": _product,
    "aten::addmm": _product_with_addend,
    "aten::baddbmm": _product_with_addend,
    "aten::_grouped_mm": _product,
    "torchround::grouped_rows": _product,
}
# No caller uses dropout in a kernel, so the state of random numbers behind the log-sum-exp is never read.
ATTENTION_KERNELS: dict[str, Callable[..., Results]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention_on_cpu,
    "aten::_scaled_dot_product_flash_attention": _attention,
    "aten::_scaled_dot_product_efficient_attention": _attention,
    "aten::_scaled_dot_product_cudnn_attention": _attention,
    "aten::_scaled_dot_product_fused_attention_overrideable": _attention,
    "aten::_flash_attention_forward": _attention_by_offsets,
}


def unused_result(name: str, args: tuple[Any, ...]) -> Tensor | int | None:
    """Return a result of an attention kernel that is not kept, by its name in PyTorch's schema."""
    query, key = args[:2]
    if name.startswith("max_"):
        return (query if name == "max_q" else key).shape[-2]
    if name.startswith("cum_seq"):  # the lengths of nested sequences, which no layer has
        return None
    # Random state and a mask for debugging. No backward reads them without dropout.
    is_pair = name == "rng_state"
    return query.new_zeros(2 if is_pair else (), dtype=torch.uint64 if is_pair else torch.int64)
