"""The kernels of gated products in Triton: one program for each row, which passes over its columns in blocks.

A row's routing weight gets its gradient from the same pass. Sums over an expert's rows are taken by one program for each
expert and block of columns, in the order of the rows.

They have been run in Triton's interpreter, not on a card.

Shapes: R rows, F feed-forward width, E experts, Z width of a bias.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchround.models.kernels.gated_products import (
    clamped_gradients,
    clamped_result,
    dot_result,
    product_gradients,
    product_result,
    sum_result,
)

COLUMNS = 1024  # of a row at once
SUM_ROWS, SUM_COLUMNS = 32, 128  # of a sum over rows at once


def launch_gated_product(gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    """Return the product of `[..., F]`."""
    product, rows = product_result(gate), _num_rows(gate)
    if rows:  # a grid without programs is refused
        _gated_product[(rows,)](
            *(gate, up, weights, product, gate.shape[-1]),
            WEIGHS=weights is not None,
            GELU=activation != "silu",
            COLUMNS=_columns(gate.shape[-1]),
        )
    return product


def launch_gated_product_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate, up and weights."""
    grad_gate, grad_up, grad_weights = product_gradients(grad, gate, up, weights, activation)
    rows = _num_rows(gate)
    if rows:
        _gated_product_backward[(rows,)](
            *(grad, gate, up, weights, grad_gate, grad_up, grad_weights, gate.shape[-1]),
            WEIGHS=weights is not None,
            GELU=activation != "silu",
            COLUMNS=_columns(gate.shape[-1]),
        )
    return grad_gate, grad_up, grad_weights


def launch_clamped_product(
    gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> Tensor:
    """Return GPT-OSS's product `[R, F]`."""
    rows, width = len(gate_up), gate_up.shape[1] // 2
    product = clamped_result(gate_up)
    if rows:
        _clamped_product[(rows,)](
            *(gate_up, bias, experts, weights, product, width, limit, alpha), COLUMNS=_columns(width)
        )
    return product


def launch_clamped_product_backward(
    grad: Tensor, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up` and weights."""
    found, grad_weights = clamped_gradients(grad, gate_up, bias, experts, weights)
    rows, width = grad.shape
    if rows:
        _clamped_product_backward[(rows,)](
            *(grad, gate_up, bias, experts, weights, found, grad_weights, width, limit, alpha),
            COLUMNS=_columns(width),
        )
    return found, grad_weights


def launch_expert_bias(rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the rows with their weighted biases."""
    found = product_result(rows)
    if len(rows):
        _expert_bias[(len(rows),)](
            *(rows, bias, experts, weights, found, rows.shape[1]), COLUMNS=_columns(rows.shape[1])
        )
    return found


def launch_dot_with_bias(grad: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    """Return the product of each row with its expert's bias, `[R]`."""
    found = dot_result(grad)
    if len(grad):
        _dot_with_bias[(len(grad),)](
            *(grad, bias, experts, found, grad.shape[1]), COLUMNS=_columns(grad.shape[1])
        )
    return found


def launch_sum_by_expert(rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Return the sums of each expert's rows, `[E, Z]`."""
    found, width = sum_result(rows, ends, weights), rows.shape[1]
    _sum_by_expert[(len(ends), triton.cdiv(width, SUM_COLUMNS))](
        *(rows, ends, weights, found, width),
        WEIGHS=weights is not None,
        ROWS=SUM_ROWS,
        COLUMNS=SUM_COLUMNS,
    )
    return found


def _num_rows(x: Tensor) -> int:
    return x.numel() // x.shape[-1]


def _columns(width: int) -> int:
    return min(COLUMNS, triton.next_power_of_2(width))


@triton.jit
def _opening(gate: tl.tensor, GELU: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return z with `activation(gate) = gate * sigmoid(z)`, and dz / d gate."""
    # GELU's tanh is a sigmoid of twice its argument: (1 + tanh(a)) / 2 = sigmoid(2 a), with 2 sqrt(2 / pi) = 1.5957...
    if GELU:
        square = 0.044715 * gate * gate
        opening = 1.5957691216057308 * gate * (1.0 + square)
        slope = 1.5957691216057308 * (1.0 + 3.0 * square)
    else:
        opening = gate
        slope = tl.full(gate.shape, 1.0, tl.float32)
    return opening, slope


@triton.jit
def _gated_product(
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    product: tl.tensor,
    width: tl.tensor,
    WEIGHS: tl.constexpr,
    GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, place = column < width, row * width + column
        wide = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        opening, _ = _opening(wide, GELU)
        result = wide * tl.sigmoid(opening) * tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        if WEIGHS:
            result *= tl.load(weights + row)
        tl.store(product + place, result.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _gated_product_backward(
    grad: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    weights: tl.tensor,
    grad_gate: tl.tensor,
    grad_up: tl.tensor,
    grad_weights: tl.tensor,
    width: tl.tensor,
    WEIGHS: tl.constexpr,
    GELU: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, place = column < width, row * width + column
        outer = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        wide = tl.load(gate + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(up + place, mask=inside, other=0.0).to(tl.float32)
        opening, slope = _opening(wide, GELU)
        share = tl.sigmoid(opening)
        active = wide * share
        if WEIGHS:
            sums += outer * active * value
            outer *= tl.load(weights + row)
        inner = outer * value * (share + active * (1.0 - share) * slope)
        tl.store(grad_gate + place, inner.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + place, (outer * active).to(grad_up.dtype.element_ty), mask=inside)
    if WEIGHS:
        tl.store(grad_weights + row, tl.sum(sums, axis=0))


@triton.jit
def _at_most(x: tl.tensor, limit: tl.tensor) -> tl.tensor:
    # By default a card takes the limit for NaN, which would hide a run that has gone wrong.
    return tl.minimum(x, limit, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _biased_pairs(
    rows: tl.tensor, biases: tl.tensor, column: tl.tensor, inside: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    # Gates and values alternate. Both loads of a pair are of the same lines of memory.
    pair = 2 * column
    gate = tl.load(rows + pair, mask=inside, other=0.0).to(tl.float32)
    gate += tl.load(biases + pair, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(rows + pair + 1, mask=inside, other=0.0).to(tl.float32)
    up += tl.load(biases + pair + 1, mask=inside, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def _clamped_product(
    gate_up: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    product: tl.tensor,
    width: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    rows, biases = gate_up + row * 2 * width, bias + tl.load(experts + row) * 2 * width
    weight = tl.load(weights + row)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        gate, up = _biased_pairs(rows, biases, column, inside)
        gate, up = _at_most(gate, limit), -_at_most(-_at_most(up, limit), limit)
        result = gate * tl.sigmoid(alpha * gate) * (up + 1.0) * weight
        tl.store(product + row * width + column, result.to(product.dtype.element_ty), mask=inside)


@triton.jit
def _clamped_product_backward(
    grad: tl.tensor,
    gate_up: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    grad_weights: tl.tensor,
    width: tl.tensor,
    limit: tl.tensor,
    alpha: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    rows, biases = gate_up + row * 2 * width, bias + tl.load(experts + row) * 2 * width
    weight = tl.load(weights + row)
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, pair = column < width, 2 * column
        raw_gate, raw_up = _biased_pairs(rows, biases, column, inside)
        gate, up = _at_most(raw_gate, limit), 1.0 - _at_most(-_at_most(raw_up, limit), limit)
        share = tl.sigmoid(alpha * gate)
        active = gate * share
        outer = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sums += outer * active * up
        outer *= weight
        grad_gate = outer * up * (share + alpha * active * (1.0 - share))
        # The clamp passes gradients within its limits; gates have no lower one.
        grad_gate = tl.where(raw_gate <= limit, grad_gate, 0.0)
        grad_up = tl.where((raw_up <= limit) & (raw_up >= -limit), outer * active, 0.0)
        kind = found.dtype.element_ty
        tl.store(found + row * 2 * width + pair, grad_gate.to(kind), mask=inside)
        tl.store(found + row * 2 * width + pair + 1, grad_up.to(kind), mask=inside)
    tl.store(grad_weights + row, tl.sum(sums, axis=0))


@triton.jit
def _expert_bias(
    rows: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    biases, weight = bias + tl.load(experts + row) * width, tl.load(weights + row)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside, place = column < width, row * width + column
        added = tl.load(biases + column, mask=inside, other=0.0).to(tl.float32) * weight
        result = tl.load(rows + place, mask=inside, other=0.0).to(tl.float32) + added
        tl.store(found + place, result.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _dot_with_bias(
    grad: tl.tensor,
    bias: tl.tensor,
    experts: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    COLUMNS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    biases = bias + tl.load(experts + row) * width
    sums = tl.zeros([COLUMNS], tl.float32)
    for start in range(0, width, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        inside = column < width
        outer = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sums += outer * tl.load(biases + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + row, tl.sum(sums, axis=0))


@triton.jit
def _sum_by_expert(
    rows: tl.tensor,
    ends: tl.tensor,
    weights: tl.tensor,
    found: tl.tensor,
    width: tl.tensor,
    WEIGHS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int64)
    last = tl.load(ends + expert).to(tl.int64)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = (row < last)[:, None] & (column < width)[None, :]
        terms = tl.load(rows + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        if WEIGHS:
            terms *= tl.load(weights + row, mask=row < last, other=0.0)[:, None]
        sums += terms
    tl.store(found + expert * width + column, tl.sum(sums, axis=0), mask=column < width)
