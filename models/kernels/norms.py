"""RMS norm for accelerators: one kernel forward and one backward, with the residual stream's additions inside.

`normed_sum` adds an update to the stream and norms the sum. Its kernel writes the sum once and reads it no more; the
kernel of its backward adds the sum's own gradient to the norm's. Computed in fp32 and rounded where a result is
written.

Shapes: N tokens, D model width, P partial sums of a weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.operation import operation, uses_triton

MOST_PARTIALS = 512  # programs of a backward; each adds up its own tokens


def normed_sum(stream: Tensor, update: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return `stream + update`, or `stream` without an update, and its RMS norm times `weight [D]`.

    `stream` and `update` are `[..., D]` of one dtype, which the results have too.
    """
    return _NormedSum.apply(stream, update, weight, eps)


def tokens_each(tokens: int) -> int:
    """Return how many tokens' gradients one program adds up, so that there are at most `MOST_PARTIALS` programs.

    It depends on the number of tokens alone, so equal runs add up in the same order on every card.
    """
    return max(1, -(-tokens // MOST_PARTIALS))


def num_partials(tokens: int) -> int:
    """Return the number of programs, each of which writes one partial sum."""
    return -(-tokens // tokens_each(tokens))


class _NormedSum(torch.autograd.Function):
    """Keeps the sum and one fp32 scale for each token."""

    @staticmethod
    def forward(
        ctx: Any, stream: Tensor, update: Tensor | None, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        ctx.adds = update is not None
        ctx.set_materialize_grads(False)
        stream = stream.contiguous()
        if update is None:
            total = stream
            normed, scales = torch.ops.torchround.rms_norm(stream, weight, eps)
        else:
            total, normed, scales = torch.ops.torchround.add_rms_norm(
                stream, update.contiguous(), weight, eps
            )
        ctx.save_for_backward(total, weight, scales)
        return total, normed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        grad_total, grad_normed = grads
        if grad_normed is None:
            return grad_total, grad_total if ctx.adds else None, None, None
        total, weight, scales = ctx.saved_tensors
        trains = ctx.needs_input_grad[2]
        grad, partials = torch.ops.torchround.rms_norm_backward(
            grad_normed.contiguous(),
            None if grad_total is None else grad_total.contiguous(),
            *(total, weight, scales, trains),
        )
        return grad, grad if ctx.adds else None, partials.sum(dim=0) if trains else None, None


def _norm_shapes(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)


@operation("rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)", _norm_shapes)
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the norm `[..., D]` and the fp32 scale of each token, `[...]`."""
    if uses_triton(x):
        from torchround.models.kernels.norms_triton import launch_norm

        _, normed, scales = launch_norm(x, None, weight, eps)
        return normed, scales
    return reference_norm(x, weight, eps)


def _sum_shapes(stream: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, ...]:
    return torch.empty_like(stream), *_norm_shapes(stream, weight, eps)


@operation(
    "add_rms_norm(Tensor stream, Tensor update, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    _sum_shapes,
)
def add_rms_norm(stream: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum, rounded to the stream's dtype, the norm of the rounded sum, and each token's scale."""
    if uses_triton(stream):
        from torchround.models.kernels.norms_triton import launch_norm

        return launch_norm(stream, update, weight, eps)
    total = stream + update
    return total, *reference_norm(total, weight, eps)


def _backward_shapes(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scales: Tensor, trains: bool
) -> tuple[Tensor, Tensor]:
    programs = num_partials(scales.numel()) if trains else 0
    return torch.empty_like(total), scales.new_empty((programs, weight.numel()))


@operation(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor scales, bool trains)"
    " -> (Tensor, Tensor)",
    _backward_shapes,
)
def rms_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scales: Tensor, trains: bool
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the sum `[..., D]`, and partial sums of the weight's, `[P, D]` fp32.

    `grad` is the norm's gradient, `grad_total` the sum's own. No partial sums are made unless the weight `trains`.
    """
    if uses_triton(grad):
        from torchround.models.kernels.norms_triton import launch_norm_backward

        return launch_norm_backward(grad, grad_total, total, weight, scales, trains)
    return reference_norm_backward(grad, grad_total, total, weight, scales, trains)


def reference_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm` by PyTorch's own operations."""
    wide = x.float()
    scales = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [..., 1]
    return (wide * scales * weight.float()).to(x.dtype), scales[..., 0]


def reference_norm_backward(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scales: Tensor, trains: bool
) -> tuple[Tensor, Tensor]:
    """Compute `rms_norm_backward` by PyTorch's own operations."""
    scale, wide = scales[..., None], grad.float()
    normed = total.float() * scale
    if trains:
        partials = partial_sums((wide * normed).flatten(0, -2))
    else:
        partials = scales.new_empty((0, weight.numel()))
    inner = wide * weight.float()
    # d/dx of x * scale(x): the part along x is removed, because scaling x changes nothing.
    found = scale * (inner - normed * (inner * normed).mean(dim=-1, keepdim=True))
    if grad_total is not None:
        found = found + grad_total.float()
    return found.to(total.dtype), partials


def partial_sums(terms: Tensor) -> Tensor:
    """Add up `[N, D]` over the tokens of each program, to `[P, D]`."""
    return torch.stack([part.sum(dim=0) for part in terms.split(tokens_each(len(terms)))])
