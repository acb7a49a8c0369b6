"""Products of rows sorted by expert with each expert's matrix, and the gradient of these matrices.

PyTorch's `grouped_mm` is one kernel on a few cards only. Elsewhere it needs the offsets on the host, which waits for the
device. The two operations here read the offsets on the device. The second one adds to a gradient that exists already, in
the gradient's dtype, and leaves experts without rows alone. A kind that has no kernel loops over experts with the offsets
on the host. They are brought there once for all products of a block.

Stacks of frozen matrices may be packed (`torchround/packed_formats.py`). Their products unpack the matrices of those experts
that have rows, and never a whole stack: in Triton's kernel tile by tile, and elsewhere one matrix at a time.

Shapes: R rows sorted by expert, E experts, A inputs, Z outputs. `ends [E]` int32 is one past each expert's last row.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchround.accelerators import device_kind, has_grouped_products
from torchround.keeping import joined, passing
from torchround.models.kernels.operation import operation, uses_triton
from torchround.packed_formats import FORMATS, PackedFormat, Tables


@dataclass(frozen=True)
class RowGroups:
    """The rows of each expert: `ends [E]` int32 is one past each expert's last row, as `grouped_mm` takes its offsets."""

    ends: Tensor
    _bounds: list[int] = field(default_factory=list, init=False)

    @property
    def bounds(self) -> list[int]:
        """The number of rows before each expert and behind the last one. The first use waits for an accelerator."""
        if not self._bounds:  # until Python 3.12 all devices share a `cached_property`'s lock
            self._bounds.extend((0, *self.ends.tolist()))
        return self._bounds


@dataclass(frozen=True)
class PackedStack:
    """The form of a packed stack: its format, and its shape, with the matrices as they are stored."""

    format: PackedFormat
    shape: tuple[int, int, int]


def stack_product(rows: Tensor, stack: Tensor, view: Callable[[Tensor], Tensor], groups: RowGroups) -> Tensor:
    """Multiply each expert's rows with its matrix in `view(stack)`, `[R, A] x [E, A, Z] -> [R, Z]`.

    Experts may have no rows. Triton's kernel adds to the gradient that the stack has, except under a compiler.
    """
    weights = view(stack)
    if 1 not in weights.stride()[1:]:
        weights = weights.contiguous()  # `grouped_mm` takes no other strides
    if torch.compiler.is_dynamo_compiling() or _has_no_offsets(rows, weights):
        return _opaque_product(rows, weights, groups.ends)
    # A gradient that is not there yet, or that is no leaf's, is returned to autograd instead.
    total = view(stack.grad) if stack.is_leaf and stack.grad is not None else None
    return _GroupedProduct.apply(rows, weights, groups, total)


@operation("grouped_rows(Tensor rows, Tensor weights, Tensor ends) -> Tensor", "grouped_triton.launch_rows")
def rows_result(rows: Tensor, weights: Tensor, *_: object) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[-1]))


# Adds each expert's `rows [., A].T @ grad [., Z]` to its matrix of `total [E, A, Z]`, rounded once.
@operation(
    "grouped_gradient_(Tensor rows, Tensor grad, Tensor ends, Tensor(a!) total) -> ()",
    "grouped_triton.launch_gradient",
)
def _grouped_gradient_result(*_: object) -> None:
    pass


class _GroupedProduct(torch.autograd.Function):
    """A grouped product; `total [E, A, Z]` is the matrices' gradient sum so far, if there is one."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, groups: RowGroups, total: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows, weights)
        ctx.groups, ctx.total = groups, total
        return _multiply(rows, weights, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        rows, weights = ctx.saved_tensors
        grad, grad_rows, grad_weights = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[0]:
            grad_rows = _multiply(grad, weights.transpose(1, 2), ctx.groups)
        if ctx.needs_input_grad[1]:
            grad_weights = _gradient(rows, grad, weights, ctx.groups, ctx.total)
        return grad_rows, grad_weights, None, None


def _has_grouped_kernel(rows: Tensor, inputs: int, outputs: int) -> bool:
    # Rows of 16 bytes or multiples (torch's documentation).
    aligned = inputs % 8 == 0 and outputs % 8 == 0
    return aligned and hasattr(F, "grouped_mm") and has_grouped_products(device_kind(rows), rows.dtype)


def _has_no_offsets(rows: Tensor, weights: Tensor) -> bool:
    """Check whether there would be a loop over experts and no values to find their rows by."""
    has_kernel = uses_triton(rows) or _has_grouped_kernel(rows, *weights.shape[1:])
    return device_kind(rows) == "meta" and not has_kernel


def _multiply(rows: Tensor, weights: Tensor, groups: RowGroups) -> Tensor:
    if _has_grouped_kernel(rows, *weights.shape[1:]):
        return F.grouped_mm(rows, weights, offs=groups.ends)
    if uses_triton(rows):
        return torch.ops.torchround.grouped_rows(rows, weights, groups.ends)
    parts = zip(pairwise(groups.bounds), weights.unbind(0), strict=True)
    products = passing(lambda: [rows[start:stop] @ weight for (start, stop), weight in parts])
    return joined(torch.cat, products)


def _gradient(
    rows: Tensor, grad: Tensor, weights: Tensor, groups: RowGroups, total: Tensor | None
) -> Tensor | None:
    """Add the gradient to `total` and return None, or return it, if there is no total or no kernel that adds."""
    has_kernel = _has_grouped_kernel(rows, *weights.shape[1:])
    if uses_triton(rows) and (total is not None or not has_kernel):
        # One kernel that reads and writes the sum. Autograd would write a gradient, cast it and add it: 18 bytes an
        # element, which is more than the product itself costs if experts have few rows.
        added = torch.zeros_like(weights) if total is None else total
        torch.ops.torchround.grouped_gradient_(rows, grad, groups.ends, added)
        return added if total is None else None
    # In the order of the stack's memory, as autograd computes a transposed matrix's gradient.
    is_transposed = weights.stride(1) == 1
    left, right = (grad, rows) if is_transposed else (rows, grad)
    if has_kernel:
        found = F.grouped_mm(left.T, right, offs=groups.ends)
    else:
        parts = [slice(start, stop) for start, stop in pairwise(groups.bounds)]
        found = torch.stack([left[part].T @ right[part] for part in parts])
    return found.transpose(1, 2) if is_transposed else found


# The same for a compiler, which cannot know how many rows an expert has, and for counting a loop over experts. It returns
# the gradients of stacks.


@torch.library.custom_op("torchround::grouped_product", mutates_args=())
def _opaque_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _multiply(rows, weights, RowGroups(ends))


_product_shape = _opaque_product.register_fake(rows_result)


@torch.library.custom_op("torchround::grouped_product_gradient", mutates_args=())
def _opaque_gradient(rows: Tensor, grad: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    found = _gradient(rows, grad, weights, RowGroups(ends), None)
    assert found is not None, "without a sum so far the gradient is returned"
    return found


_gradient_shape = _opaque_gradient.register_fake(lambda rows, grad, weights, ends: torch.empty_like(weights))


@partial(
    _opaque_product.register_autograd,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    rows, weights, ends = ctx.saved_tensors
    grad, (wants_rows, wants_weights, _) = grad.contiguous(), ctx.needs_input_grad
    grad_rows = _opaque_product(grad, weights.transpose(1, 2), ends) if wants_rows else None
    return grad_rows, _opaque_gradient(rows, grad, weights, ends) if wants_weights else None, None


def packed_product(
    rows: Tensor, packed: Tensor, stack: PackedStack, groups: RowGroups, inputs_first: bool
) -> Tensor:
    """Multiply each expert's rows with its matrix of a packed stack, `[R, A] x [E, A, Z] -> [R, Z]`, as `stack_product` does.

    `packed` has the stack's bytes. Its matrices are frozen, and are unpacked again in the backward.
    """
    numbers = rows.new_empty(()).expand(stack.shape[1:])
    matrix = numbers if inputs_first else numbers.T
    form = stack.format
    ends = groups.ends
    if not (torch.compiler.is_dynamo_compiling() or uses_triton(rows) or device_kind(rows) == "meta"):
        # On the host, for the backward too: autograd's thread must not wait for them.
        ends = torch.tensor(groups.bounds[1:], dtype=torch.int32)
    return _packed_product(rows, matrix, packed, ends, form.name, form.inner, not inputs_first)


# `matrix [A, Z]` has the size of each matrix, and no numbers. The bytes hold the matrices, or their transposes.
@torch.library.custom_op("torchround::packed_product", mutates_args=())
def _packed_product(
    rows: Tensor, matrix: Tensor, packed: Tensor, ends: Tensor, name: str, inner: int, is_transposed: bool
) -> Tensor:
    place = replace(FORMATS[name], inner=inner).place(packed, matrix.numel() * len(ends))
    if uses_triton(rows):
        from torchround.models.kernels import grouped_triton

        return grouped_triton.launch_packed(rows, place, matrix.shape, ends, is_transposed)
    numbers = rows.new_empty(matrix.T.shape if is_transposed else matrix.shape)
    weight = numbers.T if is_transposed else numbers
    # By the kernel that multiplies unpacked stacks, if the kind has one: the bits are the same.
    has_kernel = _has_grouped_kernel(rows, *matrix.shape)
    products = []
    tables: Tables = {}
    for expert, (start, stop) in enumerate(pairwise(RowGroups(ends).bounds)):
        if start < stop:
            place.part(expert * matrix.numel(), matrix.numel()).read(numbers.view(-1), tables=tables)
            part, end = rows[start:stop], rows.new_full((1,), stop - start, dtype=torch.int32)
            products.append(F.grouped_mm(part, weight[None], offs=end) if has_kernel else part @ weight)
    return torch.cat(products) if products else rows.new_empty((0, matrix.shape[1]))


_packed_shape = _packed_product.register_fake(rows_result)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])
    ctx.facts = inputs[4:]


@partial(_packed_product.register_autograd, setup_context=_save_packed)
def _differentiate_packed(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    matrix, packed, ends = ctx.saved_tensors
    name, inner, is_transposed = ctx.facts
    wanted = ctx.needs_input_grad[0]
    grad = grad.contiguous()
    found = _packed_product(grad, matrix.T, packed, ends, name, inner, not is_transposed) if wanted else None
    return found, None, None, None, None, None, None
