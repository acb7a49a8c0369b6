"""RMS norm in fp32 that keeps only its 16-bit input for the backward.

`torch.nn.functional.rms_norm` on the CPU keeps two fp32 copies of a bf16 input; this keeps the input, which
the residual stream holds anyway, and one number per token (RoundPipe appendix B.1 counts just that).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32, cast to `x`'s dtype."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x, self.weight, self.eps)

    def init_weights(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].float()
        normed = x.float() * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # Summed over tokens in fp32 and left so: autograd casts to what the leaf's gradient wants.
            grad_weight = (grad * normed).flatten(0, -2).sum(dim=0)
        inner = grad * weight.float()
        # d/dx of x * scale(x): the part along x is removed, because scaling x changes nothing.
        grad_x = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


# Table lookup whose gradient adds up in fp32: in bf16, a row met 256 times would stop counting.
#
# `embedding_dense_backward` sorts on CUDA instead of adding atomically, so equal runs give equal bits. It is an
# operation of its own so that a compiler does not take it apart: Inductor would make atomic additions of it.


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """`[..., D]`: rows of `table [V, D]` at `index [...]`."""
    return _Lookup.apply(table, index)


@torch.library.custom_op("torchround::lookup_gradient", mutates_args=())
def lookup_gradient(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """`[V, D]` fp32: the gradients of looked-up rows, added up row by row."""
    return torch.ops.aten.embedding_dense_backward(grad.float(), index, num_rows, -1, False)


@lookup_gradient.register_fake
def _lookup_gradient_shape(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]), dtype=torch.float32)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.num_rows = table.shape[0]
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return lookup_gradient(grads[0], index, ctx.num_rows), None


# Initial weights, the same for fp32 and (rounded once) for 16-bit storage.
#
# Numbers are drawn in fp32 in blocks of a fixed size, so a model of any size needs one block of scratch, and a
# layer's weights depend on its generator and its shapes only.


STANDARD_DEVIATION = 0.02
CUT = 3.0  # truncated normals end at this many standard deviations
BLOCK_ELEMENTS = 1 << 22


def init_linear_(weight: Tensor, generator: torch.Generator, scale: float = 1.0) -> None:
    """Truncated normal of width `0.02 * scale`, cut at three widths.

    Projections that write to the residual stream pass `scale = 1 / sqrt(2 L)` (GPT-2), so that the stream's
    variance does not grow with the number of layers L.
    """
    width = STANDARD_DEVIATION * scale
    # Inverse of the distribution function. torch.nn.init.trunc_normal_ redraws what falls outside: measured
    # 20 M numbers a second on 2 cores against 120 M here, and other numbers with every torch version.
    edge = math.erf(CUT / math.sqrt(2.0))

    def draw(block: Tensor) -> None:
        block.uniform_(-edge, edge, generator=generator).erfinv_().mul_(width * math.sqrt(2.0))
        block.clamp_(-CUT * width, CUT * width)  # fp32 erfinv may overshoot the edge by a rounding

    _fill_blocks_(weight, generator, draw)


def init_embedding_(weight: Tensor, generator: torch.Generator) -> None:
    """Normal with standard deviation 0.02."""
    _fill_blocks_(weight, generator, lambda block: block.normal_(std=STANDARD_DEVIATION, generator=generator))


@torch.no_grad()
def _fill_blocks_(weight: Tensor, generator: torch.Generator, draw: Callable[[Tensor], object]) -> None:
    if not weight.is_contiguous():
        raise ValueError(f"initial weights need contiguous storage, got strides {weight.stride()}")
    scratch = torch.empty(min(weight.numel(), BLOCK_ELEMENTS), dtype=torch.float32, device=generator.device)
    for block in weight.view(-1).split(BLOCK_ELEMENTS):
        numbers = scratch[: len(block)]
        draw(numbers)
        block.copy_(numbers)


# Counting what frozen weights save: a product with one costs its input's gradient in the backward and no weight's.


def frozen_elements(*parameters: Tensor) -> int:
    """Of those that get no gradient."""
    return sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
