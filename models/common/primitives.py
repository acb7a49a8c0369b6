"""The small operations that several layers share: RMS norm, gated product, table lookup, initial weights.

Each operation has a backward of its own. It keeps less than autograd would, so that the memory kept is what RoundPipe's
appendix B.1 counts, or it adds up in fp32.

Shapes: N tokens, D model width, F feed-forward width, V rows of a table.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import PLANNED_KIND
from torchround.layer import LayerWork
from torchround.models.common.chunks import holds_no_fp32
from torchround.models.common.config import ModelConfigError
from torchround.models.kernels.gated_products import fused_gated_product
from torchround.models.kernels.norms import normed_sum
from torchround.models.kernels.operation import uses_triton

STANDARD_DEVIATION = 0.02
CUT = 3.0  # truncated normals end at this many standard deviations
BLOCK_ELEMENTS = 1 << 22  # numbers drawn at once: 16 MiB of fp32 scratch

ACTIVATIONS = ("silu", "gelu_tanh")


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
        if uses_triton(x):
            return normed_sum(x, None, self.weight, self.eps)[1]
        return _RMSNorm.apply(x, self.weight, self.eps)

    def init_weights(self) -> None:
        """Set the weight to 1."""
        with torch.no_grad():
            self.weight.fill_(1.0)

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count what a norm on the residual stream costs.

        Kept: its input, its output (the input of the linear layers behind it) and one fp32 scale per token. Scratch:
        input, gradient, normed input and their product, all in fp32; of a kernel the gradients of both and of their sum.
        """
        elements = num_tokens * self.weight.numel()
        return LayerWork(
            activation_bytes=2 * elements * element_bytes + 4 * num_tokens,
            workspace_bytes=(3 * element_bytes if holds_no_fp32(num_tokens, device) else 4 * 4) * elements,
        )


def add_and_norm(stream: Tensor, update: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
    """Return `stream + update`, or `stream` without an update, and its norm. With Triton that is one kernel."""
    # A subclass may compute something else.
    if type(norm) is RMSNorm and uses_triton(stream):
        return normed_sum(stream, update, norm.weight, norm.eps)
    if update is not None:
        stream = stream + update
    return stream, norm(stream)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [..., 1]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0].float()
        normed = x.float() * scale
        grad_weight = None
        if ctx.needs_input_grad[1]:
            # Summed over tokens in fp32 and left in fp32: autograd casts to the dtype of the leaf's gradient.
            grad_weight = (grad * normed).flatten(0, -2).sum(dim=0)  # [..., D] -> [N, D] -> [D]
        inner = grad * weight.float()
        # d/dx of x * scale(x): the part along x is removed, because scaling x changes nothing.
        grad_x = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
        return grad_x.to(x.dtype), grad_weight, None


def gated_product(
    gate: Tensor, up: Tensor, weights: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """Return `activation(gate) * up`, elementwise, times `weights [N]` if given (one fp32 number per row of `[N, F]`).

    With `silu` this is SwiGLU, with `gelu_tanh` GeGLU (Shazeer, arXiv 2002.05202). The backward keeps the inputs and
    recomputes the activation: `6 B T F` bytes of a 16-bit block (RoundPipe appendix B.1) instead of `8 B T F`.
    """
    if uses_triton(gate):
        return fused_gated_product(gate, up, weights, activation)
    return _GatedProduct.apply(gate, up, weights, activation)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        ctx.activation = activation
        product = _activate(gate, activation).mul_(up)
        return product if weights is None else product.mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weights = ctx.saved_tensors
        grad, active, grad_weights = grads[0], _activate(gate, ctx.activation), None
        if weights is not None:
            grad_weights = (grad * active * up).sum(dim=-1, dtype=torch.float32)  # [N, F] -> [N]
            grad = grad * weights[:, None].to(gate.dtype)
        grad_gate = _activate_backward(grad * up, gate, ctx.activation)
        return grad_gate, active.mul_(grad), grad_weights, None


def legal_activation(name: str) -> str:
    """Return `name` if `gated_product` computes that activation; raise `ModelConfigError` otherwise."""
    if name not in ACTIVATIONS:
        raise ModelConfigError(f"activation = {name!r}; legal: {', '.join(ACTIVATIONS)}")
    return name


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


def _activate_backward(grad: Tensor, gate: Tensor, activation: str) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, gate)
    return torch.ops.aten.gelu_backward(grad, gate, approximate="tanh")


def lookup(table: Tensor, index: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the rows of `table [V, D]` at `index [...]`, `[..., D]`, with a gradient that adds up in fp32.

    In bf16 the sum for a row that is met 256 times would stop growing. `weights [N]` fp32, for an index `[N]`,
    multiply the rows; neither the rows nor the products are kept for the backward.
    """
    return _Lookup.apply(table, index, weights)


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
    def forward(ctx: Any, table: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
        ctx.num_rows = table.shape[0]
        ctx.save_for_backward(index, weights, None if weights is None else table)
        rows = F.embedding(index, table)
        return rows if weights is None else rows.mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor | None]:
        index, weights, table = ctx.saved_tensors
        if weights is None:
            return lookup_gradient(grads[0], index, ctx.num_rows), None, None
        grad_weights = (grads[0] * table[index]).sum(dim=-1, dtype=torch.float32)  # [N, D] -> [N]
        weighted = grads[0].float() * weights[:, None]
        return lookup_gradient(weighted, index, ctx.num_rows), None, grad_weights


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
