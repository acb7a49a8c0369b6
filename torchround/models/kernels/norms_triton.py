"""The kernels of RMS norm in Triton. Each program holds a whole row of the stream in registers.

Forward: one program for each token. Backward: at most `MOST_PARTIALS` programs, each with its own run of tokens, so that
a weight's gradient is added up in registers and written once for each program, in a fixed order.

They have been run in Triton's interpreter, not on a card.

Shapes: N tokens, D model width, P partial sums of a weight's gradient.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchround.models.kernels.norms import num_partials, tokens_each

ELEMENTS_OF_A_WARP = 512


def launch_norm(
    stream: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum (the stream itself if there is no update), its norm, and each token's fp32 scale."""
    total = stream if update is None else torch.empty_like(stream)
    normed, scales = torch.empty_like(stream), stream.new_empty(stream.shape[:-1], dtype=torch.float32)
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
    """Return the gradient of the sum, and `[P, D]` partial sums of the weight's gradient."""
    found, tokens, width = torch.empty_like(total), scales.numel(), total.shape[-1]
    programs = num_partials(tokens)
    partials = scales.new_empty((programs if trains else 0, width))
    block = triton.next_power_of_2(width)
    if tokens:
        _norm_backward[(programs,)](
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
    stream: Any,
    update: Any,
    weight: Any,
    total: Any,
    normed: Any,
    scales: Any,
    width: Any,
    eps: Any,
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
    grad: Any,
    grad_total: Any,
    total: Any,
    weight: Any,
    scales: Any,
    found: Any,
    partials: Any,
    tokens: Any,
    each: Any,
    width: Any,
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
