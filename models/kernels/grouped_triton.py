"""The kernels of grouped products in Triton. Sums are fp32, and each result is computed by one program in a fixed order.

`grouped_rows` launches as many row tiles as there can be, because the host does not know how many rows an expert has.
Each program finds its expert and rows from the offsets; programs without rows end at once.

Tile sizes are constants: sizes chosen by measured time would make the last bits of a run depend on that measurement.
The kernels have been run in Triton's interpreter, not on a card.

Shapes: R rows sorted by expert, E experts, A inputs, Z outputs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchround.packed_formats import NF4_LEVELS, PackedFormat, PackedPlace

MOST_ROWS = 128  # of a tile; an expert's last tile is partly empty
MOST_COLUMNS = 128
MOST_DEPTH = 32  # terms of a sum that one step adds
LEAST = 16  # the smallest side of a product that tensor cores take
WARPS, STAGES = 8, 3


def launch_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _launch(rows, weights, weights, weights.shape, weights.stride(), ends)


def launch_packed(
    rows: Tensor, place: PackedPlace, matrix: torch.Size, ends: Tensor, is_transposed: bool
) -> Tensor:
    """Multiply with packed matrices, each of the size of `matrix [A, Z]`; they are stored so, or as their transposes."""
    strides = (matrix.numel(), 1, matrix[0]) if is_transposed else (matrix.numel(), matrix[1], 1)
    shape = (len(ends), *matrix)
    return _launch(rows, place.codes, place.scales, shape, strides, ends, place.format)


def _launch(
    rows: Tensor,
    weights: Tensor,
    scales: Tensor,
    shape: Sequence[int],
    strides: Sequence[int],
    ends: Tensor,
    packed: PackedFormat | None = None,
) -> Tensor:
    num_experts, inputs, outputs = shape
    found = rows.new_empty((len(rows), outputs))
    if found.numel() == 0:
        return found  # a grid without programs is refused
    height, width = _side(len(rows), MOST_ROWS), _side(outputs, MOST_COLUMNS)
    # Each expert has at most one partly empty tile.
    tiles = len(rows) // height + min(num_experts, len(rows))
    _rows[(triton.cdiv(outputs, width), tiles)](
        *(rows, weights, scales, ends, found, num_experts, inputs, outputs),
        *(*rows.stride(), *strides),
        FORMAT="" if packed is None else packed.name,
        GROUP=1 if packed is None else packed.group,
        INNER=1 if packed is None else packed.inner,
        LEVELS=NF4_LEVELS,
        EXPERTS=max(LEAST, triton.next_power_of_2(num_experts)),
        HEIGHT=height,
        WIDTH=width,
        DEPTH=_side(inputs, MOST_DEPTH),
        PRECISION=_precision(rows),
        num_warps=WARPS,
        num_stages=STAGES,
    )
    return found


def launch_gradient(rows: Tensor, grad: Tensor, ends: Tensor, total: Tensor) -> None:
    """Add to `total [E, A, Z]` of any strides and floating-point dtype."""
    num_experts, inputs, outputs = total.shape
    if total.numel() == 0:
        return
    height, width = _side(inputs, MOST_ROWS), _side(outputs, MOST_COLUMNS)
    _gradient[(triton.cdiv(inputs, height) * triton.cdiv(outputs, width), num_experts)](
        *(rows, grad, ends, total, inputs, outputs),
        *(*rows.stride(), *grad.stride(), *total.stride()),
        HEIGHT=height,
        WIDTH=width,
        DEPTH=MOST_DEPTH,
        PRECISION=_precision(rows),
        num_warps=WARPS,
        num_stages=STAGES,
    )


def _side(size: int, most: int) -> int:
    side: int = triton.next_power_of_2(size)
    return max(LEAST, min(most, side))


def _precision(rows: Tensor) -> str:
    # Tensor cores would cut float32 to 10 bits, which PyTorch's products do not do by default either.
    return "ieee" if rows.dtype == torch.float32 else "tf32"


@triton.jit
def _rows(
    rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    ends: tl.tensor,
    found: tl.tensor,
    num_experts: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    row_stride: tl.tensor,
    row_input_stride: tl.tensor,
    expert_stride: tl.tensor,
    input_stride: tl.tensor,
    output_stride: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    INNER: tl.constexpr,
    LEVELS: tl.constexpr,
    EXPERTS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    tile = tl.program_id(1)
    every = tl.arange(0, EXPERTS)
    stops = tl.load(ends + every, mask=every < num_experts, other=0)
    starts = tl.load(ends + every - 1, mask=(every > 0) & (every < num_experts), other=0)
    tiles = tl.where(every < num_experts, (stops - starts + HEIGHT - 1) // HEIGHT, 0)
    after = tl.cumsum(tiles, axis=0)  # tiles of this expert and of those before it
    expert = tl.sum((after <= tile).to(tl.int32), axis=0)
    if expert < num_experts:
        mine = every == expert
        first = tl.sum(tl.where(mine, after - tiles, 0), axis=0)
        start = tl.sum(tl.where(mine, starts, 0), axis=0) + (tile - first) * HEIGHT
        stop = tl.sum(tl.where(mine, stops, 0), axis=0)
        row = start + tl.arange(0, HEIGHT)
        column = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
        step = tl.arange(0, DEPTH)
        # 64 bits: a stack of 128 experts may have more than 2^31 elements.
        row_place = row.to(tl.int64)[:, None] * row_stride
        matrix = expert.to(tl.int64) * expert_stride
        sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for done in range(0, inputs, DEPTH):
            depth = done + step
            x = tl.load(
                rows + row_place + depth[None, :] * row_input_stride,
                mask=(row < stop)[:, None] & (depth < inputs)[None, :],
                other=0.0,
            )
            number = matrix + depth[:, None] * input_stride + column[None, :] * output_stride
            inside = (depth < inputs)[:, None] & (column < outputs)[None, :]
            if FORMAT == "":
                w = tl.load(weights + number, mask=inside, other=0.0)
            else:
                w = _unpacked(weights, scales, number, inside, FORMAT, GROUP, INNER, LEVELS).to(x.dtype)
            sums = tl.dot(x, w, sums, input_precision=PRECISION)
        place = row.to(tl.int64)[:, None] * outputs + column[None, :]
        inside = (row < stop)[:, None] & (column < outputs)[None, :]
        tl.store(found + place, sums.to(found.dtype.element_ty), mask=inside)


@triton.jit
def _unpacked(
    codes: tl.tensor,
    scales: tl.tensor,
    number: tl.tensor,
    inside: tl.tensor,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    INNER: tl.constexpr,
    LEVELS: tl.constexpr,
) -> tl.tensor:
    """Unpack some numbers in fp32, with the bits of `unpack_numbers`; 0 outside."""
    scale = tl.load(scales + number // (GROUP * INNER) * INNER + number % INNER, mask=inside, other=0)
    if FORMAT == "fp8":
        code = tl.load(codes + number, mask=inside, other=0).to(tl.int32)
        exponent, fraction = (code >> 3) & 15, code & 7
        # A number below the normal ones is a multiple of 2^-9. The others get fp32's exponent, whose bias is 120 more.
        normal = (((code & 127) << 20) + (120 << 23)).to(tl.float32, bitcast=True)
        value = tl.where(exponent == 0, fraction.to(tl.float32) * 0.001953125, normal)
        value = tl.where(code > 127, -value, value)
    elif FORMAT == "nf4":
        pair = tl.load(codes + number // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(number % 2 == 0, pair >> 4, pair & 15)
        value = tl.zeros(number.shape, tl.float32)
        for level in tl.static_range(16):
            value = tl.where(code == level, LEVELS[level], value)
    else:
        pair = tl.load(codes + number // 2, mask=inside, other=0).to(tl.int32)
        code = tl.where(number % 2 == 0, pair & 15, pair >> 4)
        exponent, fraction = (code >> 1) & 3, code & 1
        halves = tl.where(exponent == 0, fraction, (2 + fraction) << tl.maximum(exponent - 1, 0))
        value = halves.to(tl.float32) * 0.5
        value = tl.where(code > 7, -value, value)
        # The smallest scale, 2^-127, is below fp32's normal numbers.
        bits = tl.where(scale == 0, 1 << 22, scale.to(tl.int32) << 23)
        scale = bits.to(tl.float32, bitcast=True)
    return tl.where(inside, value * scale, 0.0)


@triton.jit
def _gradient(
    rows: tl.tensor,
    grad: tl.tensor,
    ends: tl.tensor,
    total: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    row_stride: tl.tensor,
    row_input_stride: tl.tensor,
    grad_stride: tl.tensor,
    grad_output_stride: tl.tensor,
    expert_stride: tl.tensor,
    input_stride: tl.tensor,
    output_stride: tl.tensor,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:
    expert = tl.program_id(1)
    start = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    stop = tl.load(ends + expert)
    if start < stop:
        across = tl.cdiv(outputs, WIDTH)
        line = tl.program_id(0) // across * HEIGHT + tl.arange(0, HEIGHT)
        column = tl.program_id(0) % across * WIDTH + tl.arange(0, WIDTH)
        sums = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for done in range(start, stop, DEPTH):
            row = done + tl.arange(0, DEPTH)
            wide_row = row.to(tl.int64)
            x = tl.load(
                rows + wide_row[None, :] * row_stride + line[:, None] * row_input_stride,
                mask=(line < inputs)[:, None] & (row < stop)[None, :],
                other=0.0,
            )
            g = tl.load(
                grad + wide_row[:, None] * grad_stride + column[None, :] * grad_output_stride,
                mask=(row < stop)[:, None] & (column < outputs)[None, :],
                other=0.0,
            )
            sums = tl.dot(x, g, sums, input_precision=PRECISION)
        place = (
            total
            + expert.to(tl.int64) * expert_stride
            + line[:, None] * input_stride
            + column[None, :] * output_stride
        )
        inside = (line < inputs)[:, None] & (column < outputs)[None, :]
        sums += tl.load(place, mask=inside, other=0.0).to(tl.float32)
        tl.store(place, sums.to(total.dtype.element_ty), mask=inside)
