"""The small operations that several layers share: RMS norm, rotation, gated product, table lookup, initial weights.

Each operation has a backward of its own. It keeps less than autograd would, so that the memory kept is what RoundPipe's
appendix B.1 counts, or it adds up in fp32.

Shapes: B sequences, T tokens, N = B T, D model width, H heads, C channels of a head, F feed-forward width, V rows of a table.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import PLANNED_KIND
from torchround.layer import LayerWork
from torchround.models.common.chunks import elements_at_once, in_slices

STANDARD_DEVIATION = 0.02
CUT = 3.0  # truncated normals end at this many standard deviations
BLOCK_ELEMENTS = 1 << 22  # numbers drawn at once: 16 MiB of fp32 scratch


class RMSNorm(nn.Module):
    """`x / sqrt(mean(x^2) + eps) * weight` over the last dimension, computed in fp32, cast to `x`'s dtype.

    `torch.nn.functional.rms_norm` on the CPU keeps two fp32 copies of a bf16 input. This keeps the input, which the
    residual stream holds anyway, and one number per token.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return _RMSNorm.apply(x.flatten(0, -2), self.weight, self.eps).view_as(x)

    def init_weights(self) -> None:
        with torch.no_grad():
            self.weight.fill_(1.0)

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count what a norm on the residual stream costs.

        Kept: its input, its output (the input of the linear layers behind it) and one fp32 scale per token. Scratch:
        input, gradient, normed input and their product, all in fp32; and if it is cut in slices, the gradients of both and
        of their sum.
        """
        elements = num_tokens * self.weight.numel()
        at_once = elements_at_once(elements, device, num_tokens)
        gradient_bytes = 3 * elements * element_bytes if at_once < elements else 0
        return LayerWork(
            activation_bytes=2 * elements * element_bytes + 4 * num_tokens,
            workspace_bytes=4 * 4 * at_once + gradient_bytes,
        )


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normed, scale = in_slices(partial(_norm, weight, eps), x)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        sums: list[Tensor] = []
        # Summed over tokens in fp32 and left in fp32: autograd casts to the dtype of the leaf's gradient.
        differentiate = partial(_differentiate_norm, weight, sums if ctx.needs_input_grad[1] else None)
        (grad_x,) = in_slices(differentiate, grads[0], x, scale)
        return grad_x, sum(sums[1:], start=sums[0]) if sums else None, None


def _norm(weight: Tensor, eps: float, x: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float()
    scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [N, 1]
    return (wide * scale).mul_(weight.float()).to(x.dtype), scale


def _differentiate_norm(
    weight: Tensor, sums: list[Tensor] | None, grad: Tensor, x: Tensor, scale: Tensor
) -> tuple[Tensor]:
    """Compute the gradient of `x [N, D]`, and append the weight's, `[D]`, to `sums` if it is wanted."""
    wide, normed = grad.float(), x.float() * scale
    if sums is not None:
        sums.append((wide * normed).sum(dim=0))
    inner = wide * weight.float()
    # d/dx of x * scale(x): the part along x is removed, because scaling x changes nothing.
    along = (inner * normed).mean(dim=-1, keepdim=True)
    return (inner.sub_(normed.mul_(along)).mul_(scale).to(x.dtype),)


def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel `i` with channel `i + C / 2` of `[B, T, H, C]`, in fp32, and cast back.

    `cos` and `sin` are `[B, T, 1, C / 2]` fp32. This is the pairing of the Hugging Face checkpoints (Meta's own files pair
    neighbours).
    """
    return _Rotation.apply(*(tensor.flatten(0, 1) for tensor in (heads, cos, sin))).view_as(heads)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(heads, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grads[0], cos, -sin), None, None  # back, by the opposite angles


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    def turn(heads: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor]:
        first, second = heads.float().chunk(2, dim=-1)  # [N, H, C / 2] each
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return (rotated.to(heads.dtype),)

    return in_slices(turn, heads, cos, sin)[0]


def gated_product(gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
    """Compute `silu(gate) * up`, elementwise, times `weights [N]` if given (one fp32 number per row of `[N, F]`).

    This is SwiGLU (Shazeer, arXiv 2002.05202). The backward keeps the inputs and recomputes the activation: `6 B T F` bytes
    of a 16-bit block (RoundPipe appendix B.1) instead of `8 B T F`.
    """
    return _GatedProduct.apply(gate, up, weights)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        product = F.silu(gate).mul_(up)
        return product if weights is None else product.mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weights = ctx.saved_tensors
        grad, active, grad_weights = grads[0], F.silu(gate), None
        if weights is not None:
            grad_weights = (grad * active * up).sum(dim=-1, dtype=torch.float32)  # [N, F] -> [N]
            grad = grad * weights[:, None].to(gate.dtype)
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, active.mul_(grad), grad_weights


def lookup(table: Tensor, index: Tensor) -> Tensor:
    """Take the rows of `table [V, D]` at `index [...]`, `[..., D]`, with a gradient that adds up in fp32.

    In bf16 the sum for a row that is used 256 times would stop growing.
    """
    return _Lookup.apply(table, index)


# An operation of its own, so that a compiler leaves it whole: Inductor would make atomic additions of it.
@torch.library.custom_op("torchround::lookup_gradient", mutates_args=())
def lookup_gradient(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Add up the gradients of looked-up rows, row by row, to `[V, D]` fp32.

    `embedding_dense_backward` sorts on CUDA instead of adding atomically, so equal runs give equal bits.
    """
    return torch.ops.aten.embedding_dense_backward(grad.float(), index, num_rows, -1, False)


@lookup_gradient.register_fake
def _lookup_gradient_shape(grad: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return grad.new_empty((num_rows, grad.shape[-1]), dtype=torch.float32)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor) -> Tensor:
        ctx.num_rows = table.shape[0]
        ctx.save_for_backward(index)
        return F.embedding(index, table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return lookup_gradient(grads[0], index, ctx.num_rows), None


def init_linear_(weight: Tensor, generator: torch.Generator, scale: float = 1.0) -> None:
    """Fill with a truncated normal of standard deviation `0.02 * scale`, cut at three of them.

    Projections that write to the residual stream pass `scale = 1 / sqrt(2 L)` (GPT-2), so that the stream's
    variance does not grow with the number of layers L.
    """
    width = STANDARD_DEVIATION * scale
    # Inverse of the distribution function. torch.nn.init.trunc_normal_ redraws numbers outside the cut: measured
    # 20 M numbers a second on 2 cores against 120 M here, and other numbers with every torch version.
    edge = math.erf(CUT / math.sqrt(2.0))

    def draw(block: Tensor) -> None:
        block.uniform_(-edge, edge, generator=generator).erfinv_().mul_(width * math.sqrt(2.0))
        block.clamp_(-CUT * width, CUT * width)  # fp32 erfinv may overshoot the edge by a rounding

    _fill_blocks_(weight, generator, draw)


def init_part_(part: nn.Module, generator: torch.Generator, output_scale: float) -> None:
    """Fill a part of a block in the order of its parameters: norms with 1, biases and sinks with 0, matrices as `init_linear_`.

    Matrices called `output` and `down` write to the residual stream and are scaled by `output_scale`. Adapters are left out.
    """
    for path, parameter in part.named_parameters():
        if "lora_" in path:
            continue
        if parameter.ndim == 1 or path.endswith("bias"):
            parameter.detach().fill_(1.0 if "norm" in path else 0.0)
        else:
            init_linear_(
                parameter, generator, 1.0 if {"output", "down"}.isdisjoint(path.split(".")) else output_scale
            )


def init_embedding_(weight: Tensor, generator: torch.Generator) -> None:
    """Fill with a normal of standard deviation 0.02."""
    _fill_blocks_(weight, generator, lambda block: block.normal_(std=STANDARD_DEVIATION, generator=generator))


@torch.no_grad()
def _fill_blocks_(weight: Tensor, generator: torch.Generator, draw: Callable[[Tensor], object]) -> None:
    """Draw fp32 numbers block by block and cast each block into `weight`.

    Blocks have a fixed size, so a model of any size needs one block of scratch, and the weights depend on generator
    and shape alone: 16-bit storage gets the fp32 numbers, rounded once.
    """
    if not weight.is_contiguous():
        raise ValueError(f"initial weights need contiguous storage, got strides {weight.stride()}")
    scratch = torch.empty(min(weight.numel(), BLOCK_ELEMENTS), dtype=torch.float32, device=generator.device)
    for block in weight.view(-1).split(BLOCK_ELEMENTS):
        numbers = scratch[: len(block)]
        draw(numbers)
        block.copy_(numbers)
