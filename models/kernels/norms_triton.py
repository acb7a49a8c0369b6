"""The kernels of RMS norm and of rotation in Triton. Each program holds a token's whole row, or all its heads.

Forward: one program for each token, so that a rotation's cosines and sines are computed once for all heads. Backward: at
most `MOST_PARTIALS` programs, each with its own run of tokens, so that a weight's gradient is added up in registers and
written once for each program, in a fixed order.

They have been run in Triton's interpreter, not on a card.

Shapes: B sequences, T tokens, N = B T, D model width, H heads, C channels of a head, P partial sums of a weight's
gradient.
"""

import triton
import triton.language as tl
from torch import Tensor

from torchround.models.kernels.norms import (
    norm_gradients,
    norm_results,
    num_partials,
    rotation_gradients,
    rotation_results,
    tokens_each,
)

ELEMENTS_OF_A_WARP = 512


def launch_norm(
    stream: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the kernel of `add_rms_norm`."""
    total, normed, scales = norm_results(stream, update, weight, eps)
    block = triton.next_power_of_2(stream.shape[-1])
    if scales.numel():  # a grid without programs is refused
        _norm[(scales.numel(),)](
            *(stream, update, weight, total, normed, scales, stream.shape[-1], eps),
            ADDS=update is not None,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return total, normed, scales


def launch_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scales: Tensor, trains: bool
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `rms_norm_backward`."""
    found, partials = norm_gradients(grad, grad_total, total, weight, scales, trains)
    tokens, width = scales.numel(), total.shape[-1]
    block = triton.next_power_of_2(width)
    if tokens:
        _norm_backward[(num_partials(tokens),)](
            *(grad, grad_total, total, weight, scales, found, partials, tokens, tokens_each(tokens), width),
            ADDS=grad_total is not None,
            TRAINS=trains,
            BLOCK=block,
            num_warps=warps_for(block),
        )
    return found, partials


def warps_for(elements: int) -> int:
    """Return the warps of a program that holds so many elements (a power of two)."""
    return max(1, min(16, elements // ELEMENTS_OF_A_WARP))


@triton.jit
def _norm(
    stream: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside, place = column < width, token * width + column
    x = tl.load(stream + place, mask=inside, other=0.0)
    if ADDS:
        added = x.to(tl.float32) + tl.load(update + place, mask=inside, other=0.0).to(tl.float32)
        # The norm is of the rounded sum, which is all that the backward has.
        x = added.to(total.dtype.element_ty)
        tl.store(total + place, x, mask=inside)
    wide = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / width + eps)
    tl.store(scales + token, scale)
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + place, (wide * scale * gain).to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    grad: tl.tensor,
    grad_total: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    found: tl.tensor,
    partials: tl.tensor,
    tokens: tl.tensor,
    each: tl.tensor,
    width: tl.tensor,
    ADDS: tl.constexpr,
    TRAINS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    gain = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([BLOCK], tl.float32)
    for token in range(program * each, tl.minimum(program * each + each, tokens)):
        place = token * width + column
        scale = tl.load(scales + token)
        normed = tl.load(total + place, mask=inside, other=0.0).to(tl.float32) * scale
        outer = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        inner = outer * gain
        along = tl.sum(inner * normed, axis=0) / width
        result = scale * (inner - normed * along)
        if ADDS:
            result += tl.load(grad_total + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(found + place, result.to(found.dtype.element_ty), mask=inside)
        if TRAINS:
            sums += outer * normed
    if TRAINS:
        tl.store(partials + program * width + column, sums, mask=inside)


def launch_rotation(
    heads: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    weight: Tensor | None,
    eps: float,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `rotate`: by the opposite angles if `back`, as the gradient is."""
    rotated, scales = rotation_results(heads, positions, frequencies, magnitude, weight, eps, back)
    if positions.numel():  # a grid without programs is refused
        _rotate[(positions.numel(),)](
            *(heads, positions, frequencies, weight, rotated, scales, eps, magnitude),
            -magnitude if back else magnitude,
            *(heads.shape[2], heads.shape[3] // 2),
            NORMS=weight is not None,
            **_blocks(heads),
        )
    return rotated, scales


def launch_rotation_backward(
    grad: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    heads: Tensor,
    weight: Tensor,
    scales: Tensor,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Run the kernel of `norm_rotate_backward`."""
    found, partials = rotation_gradients(
        grad, positions, frequencies, magnitude, heads, weight, scales, trains
    )
    tokens = positions.numel()
    if tokens:
        _rotate_backward[(num_partials(tokens),)](
            *(grad, positions, frequencies, heads, weight, scales, found, partials, magnitude),
            *(tokens, tokens_each(tokens), heads.shape[2], heads.shape[3] // 2),
            TRAINS=trains,
            **_blocks(heads),
        )
    return found, partials


def _blocks(heads: Tensor) -> dict[str, int]:
    """Return the powers of two that hold all heads and half a head's channels, and the warps for them."""
    blocks = (triton.next_power_of_2(heads.shape[2]), triton.next_power_of_2(heads.shape[3] // 2))
    return {"HEADS": blocks[0], "HALF": blocks[1], "num_warps": warps_for(2 * blocks[0] * blocks[1])}


@triton.jit
def _rotate(
    heads: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    weight: tl.tensor,
    rotated: tl.tensor,
    scales: tl.tensor,
    eps: tl.tensor,
    magnitude: tl.tensor,
    sine_magnitude: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    NORMS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < num_heads)[:, None] & (pair < half)[None, :]
    place = (token * num_heads + head)[:, None] * (2 * half) + pair[None, :]
    first = tl.load(heads + place, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(heads + place + half, mask=inside, other=0.0).to(tl.float32)
    if NORMS:
        squares = tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)
        scale = tl.rsqrt(squares / (2 * half) + eps)
        tl.store(scales + token * num_heads + head, scale, mask=head < num_heads)
        first_gain = tl.load(weight + pair, mask=pair < half, other=0.0).to(tl.float32)
        second_gain = tl.load(weight + half + pair, mask=pair < half, other=0.0).to(tl.float32)
        first *= scale[:, None] * first_gain[None, :]
        second *= scale[:, None] * second_gain[None, :]
    angle = tl.load(positions + token).to(tl.float32) * tl.load(
        frequencies + pair, mask=pair < half, other=0.0
    )
    cos, sin = (tl.cos(angle) * magnitude)[None, :], (tl.sin(angle) * sine_magnitude)[None, :]
    kind = rotated.dtype.element_ty
    tl.store(rotated + place, (first * cos - second * sin).to(kind), mask=inside)
    tl.store(rotated + place + half, (second * cos + first * sin).to(kind), mask=inside)


@triton.jit
def _rotate_backward(
    grad: tl.tensor,
    positions: tl.tensor,
    frequencies: tl.tensor,
    heads: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    found: tl.tensor,
    partials: tl.tensor,
    magnitude: tl.tensor,
    tokens: tl.tensor,
    each: tl.tensor,
    num_heads: tl.tensor,
    half: tl.tensor,
    TRAINS: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
) -> None:
    program = tl.program_id(0).to(tl.int64)
    head, pair = tl.arange(0, HEADS), tl.arange(0, HALF)
    within = pair < half
    inside = (head < num_heads)[:, None] & within[None, :]
    frequency = tl.load(frequencies + pair, mask=within, other=0.0)
    first_gain = tl.load(weight + pair, mask=within, other=0.0).to(tl.float32)[None, :]
    second_gain = tl.load(weight + half + pair, mask=within, other=0.0).to(tl.float32)[None, :]
    first_sums, second_sums = tl.zeros([HALF], tl.float32), tl.zeros([HALF], tl.float32)
    for token in range(program * each, tl.minimum(program * each + each, tokens)):
        place = (token * num_heads + head)[:, None] * (2 * half) + pair[None, :]
        angle = tl.load(positions + token).to(tl.float32) * frequency
        cos, sin = (tl.cos(angle) * magnitude)[None, :], (tl.sin(angle) * magnitude)[None, :]
        above = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        below = tl.load(grad + place + half, mask=inside, other=0.0).to(tl.float32)
        # The inverse rotation gives the gradient of the normed heads.
        first, second = above * cos + below * sin, below * cos - above * sin
        scale = tl.load(scales + token * num_heads + head, mask=head < num_heads, other=0.0)[:, None]
        first_normed = tl.load(heads + place, mask=inside, other=0.0).to(tl.float32) * scale
        second_normed = tl.load(heads + place + half, mask=inside, other=0.0).to(tl.float32) * scale
        if TRAINS:
            first_sums += tl.sum(first * first_normed, axis=0)
            second_sums += tl.sum(second * second_normed, axis=0)
        first, second = first * first_gain, second * second_gain
        along = tl.sum(first * first_normed, axis=1) + tl.sum(second * second_normed, axis=1)
        along = (along / (2 * half))[:, None]
        kind = found.dtype.element_ty
        tl.store(found + place, (scale * (first - first_normed * along)).to(kind), mask=inside)
        tl.store(found + place + half, (scale * (second - second_normed * along)).to(kind), mask=inside)
    if TRAINS:
        tl.store(partials + program * (2 * half) + pair, first_sums, mask=within)
        tl.store(partials + program * (2 * half) + half + pair, second_sums, mask=within)
