"""Products of rows sorted by expert with each expert's matrix, and the gradient of these matrices.

PyTorch's `grouped_mm` is one kernel on a few cards only. Elsewhere it needs the offsets on the host, which waits for the
device. The two operations here read the offsets on the device. The second one adds to a gradient that exists already, in
the gradient's dtype, and leaves experts without rows alone. A kind that has no kernel loops over experts with the offsets
on the host. They are brought there once for all products of a block.

Shapes: R rows sorted by expert, E experts, A inputs, Z outputs. `ends [E]` int32 is one past each expert's last row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchround.accelerators import has_grouped_products
from torchround.keeping import joined, passing
from torchround.models.kernels.operation import operation, uses_fused, uses_triton


@dataclass(frozen=True)
class RowGroups:
    """The rows of each expert: `ends [E]` int32 is one past each expert's last row, as `grouped_mm` takes its offsets."""

    ends: Tensor

    @cached_property
    def bounds(self) -> list[int]:
        """The number of rows before each expert and behind the last one. The first use waits for an accelerator."""
        return [0, *self.ends.tolist()]


def stack_product(rows: Tensor, stack: Tensor, view: Callable[[Tensor], Tensor], groups: RowGroups) -> Tensor:
    """Multiply each row with its expert's matrix in `view(stack)`, on an accelerator with the gradient added in place."""
    weights = view(stack)
    if 1 not in weights.stride()[1:]:
        weights = weights.contiguous()  # `grouped_mm` takes no other strides
    if not uses_fused(rows):
        return grouped_product(rows, weights, groups)
    # A gradient that is not there yet, or that is no leaf's, is returned to autograd instead.
    total = view(stack.grad) if stack.is_leaf and stack.grad is not None else None
    return _GroupedProduct.apply(rows, weights, groups, total)


def grouped_product(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    """Multiply each expert's rows with its matrix, `[R, A] x [E, A, Z] -> [R, Z]`; experts may have no rows."""
    if uses_fused(rows):
        return _GroupedProduct.apply(rows, weights, groups, None)
    if _has_grouped_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=groups.ends)
    if torch.compiler.is_dynamo_compiling():
        return _OpaqueLoop.apply(rows, weights, groups.ends)
    return _multiply_rows(rows, weights, groups.bounds)


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    # Rows of 16 bytes or multiples (torch's documentation).
    aligned = all(size % 8 == 0 for size in weights.shape[1:])
    return aligned and hasattr(F, "grouped_mm") and has_grouped_products(rows.device.type, rows.dtype)


def _multiply_rows(rows: Tensor, weights: Tensor, bounds: list[int]) -> Tensor:
    # unbind, not indexing: its backward writes the matrices' gradients once instead of E times.
    parts = zip(pairwise(bounds), weights.unbind(0), strict=True)
    products = passing(lambda: [rows[start:stop] @ weight for (start, stop), weight in parts])
    return joined(torch.cat, products)


def _multiply_matrices(rows: Tensor, grad: Tensor, bounds: list[int]) -> Tensor:
    return torch.stack([rows[start:stop].T @ grad[start:stop] for start, stop in pairwise(bounds)])


@operation(
    "grouped_rows(Tensor rows, Tensor weights, Tensor ends) -> Tensor",
    "grouped_triton.launch_rows",
)
def rows_result(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Make room for the products `[R, Z]`."""
    return rows.new_empty((rows.shape[0], weights.shape[2]))


# Adds each expert's `rows [., A].T @ grad [., Z]` to its matrix of `total [E, A, Z]`, rounded once.
@operation(
    "grouped_gradient_(Tensor rows, Tensor grad, Tensor ends, Tensor(a!) total) -> ()",
    "grouped_triton.launch_gradient",
)
def _grouped_gradient_result(*_: object) -> None:
    pass


class _GroupedProduct(torch.autograd.Function):
    """A grouped product on an accelerator; `total [E, A, Z]` is the matrices' gradient sum so far, if there is one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, groups: RowGroups, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups, ctx.total = groups, total
        return _fused_rows(rows, weights, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        grad, grad_rows, grad_weights = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_rows = _fused_rows(grad, weights.transpose(1, 2), ctx.groups)
        if ctx.needs_input_grad[1]:
            grad_weights = _fused_gradient(rows, grad, ctx.groups, ctx.total)
        return grad_rows, grad_weights, None, None


def _fused_rows(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    if _has_grouped_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=groups.ends)
    if uses_triton(rows):
        return torch.ops.torchround.grouped_rows(rows, weights, groups.ends)
    return _multiply_rows(rows, weights, groups.bounds)


def _fused_gradient(rows: Tensor, grad: Tensor, groups: RowGroups, total: Tensor | None) -> Tensor | None:
    """Add the gradient to `total` and return None, or return it, if there is no total or no kernel that adds."""
    has_kernel = _has_grouped_kernel(rows, rows.new_empty((0, rows.shape[1], grad.shape[1])))
    if uses_triton(rows) and (total is not None or not has_kernel):
        # One kernel that reads and writes the sum. Autograd would write a gradient, cast it and add it: 18 bytes an
        # element, which is more than the product itself costs if experts have few rows.
        added = rows.new_zeros((len(groups.ends), rows.shape[1], grad.shape[1])) if total is None else total
        torch.ops.torchround.grouped_gradient_(rows, grad, groups.ends, added)
        return added if total is None else None
    if has_kernel:
        return F.grouped_mm(rows.T, grad, offs=groups.ends)
    return _multiply_matrices(rows, grad, groups.bounds)


class _OpaqueLoop(torch.autograd.Function):
    """The product for a compiler, as operations that it does not look into.

    A compiler cannot know how many rows an expert has.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return _loop_over_rows(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        grad_rows = _loop_over_rows(grads[0], weights.transpose(1, 2), ends) if wants_rows else None
        grad_weights = _loop_over_matrices(rows, grads[0], ends) if wants_weights else None
        return grad_rows, grad_weights, None


@torch.library.custom_op("torchround::loop_over_rows", mutates_args=())
def _loop_over_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    if uses_triton(rows):
        return torch.ops.torchround.grouped_rows(rows, weights, ends)
    return _multiply_rows(rows, weights, [0, *ends.tolist()])


@_loop_over_rows.register_fake
def _loop_over_rows_shape(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows_result(rows, weights, ends)


@torch.library.custom_op("torchround::loop_over_matrices", mutates_args=())
def _loop_over_matrices(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Compute each matrix's gradient, `[R, A] x [R, Z] -> [E, A, Z]`; zero for an expert without rows."""
    if uses_triton(rows):
        total = rows.new_zeros((len(ends), rows.shape[1], grad.shape[1]))
        torch.ops.torchround.grouped_gradient_(rows, grad, ends, total)
        return total
    return _multiply_matrices(rows, grad, [0, *ends.tolist()])


@_loop_over_matrices.register_fake
def _loop_over_matrices_shape(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grad.shape[1]))
