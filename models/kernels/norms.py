"""RMS norm and rotation by Triton: one kernel forward and one backward.

`normed_sum` adds an update to the stream and norms the sum. Its kernel writes the sum once and reads it no more; the
kernel of its backward adds the sum's own gradient to the norm's. `rotate_heads` norms each head if the model does, and
computes cosines and sines itself, from the positions and one fp32 frequency for each pair of channels, so no table is read
or kept. All compute in fp32 and round where a result is written.

Shapes: B sequences, T tokens, N = B T, D model width, H heads, C channels of a head, P partial sums of a weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.operation import operation

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
        stream, update = stream.contiguous(), None if update is None else update.contiguous()
        total, normed, scales = torch.ops.torchround.add_rms_norm(stream, update, weight, eps)
        if update is None:
            total = stream
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


@operation(
    "add_rms_norm(Tensor stream, Tensor? update, Tensor weight, float eps) -> (Tensor, Tensor, Tensor)",
    "norms_triton.launch_norm",
)
def norm_results(
    stream: Tensor, update: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Make room for the sum (none if there is no update), its norm, and each token's fp32 scale."""
    total = stream.new_empty(0) if update is None else torch.empty_like(stream)
    return total, torch.empty_like(stream), stream.new_empty(stream.shape[:-1], dtype=torch.float32)


@operation(
    "rms_norm_backward(Tensor grad, Tensor? grad_total, Tensor total, Tensor weight, Tensor scales, bool trains)"
    " -> (Tensor, Tensor)",
    "norms_triton.launch_norm_backward",
)
def norm_gradients(
    grad: Tensor, grad_total: Tensor | None, total: Tensor, weight: Tensor, scales: Tensor, trains: bool
) -> tuple[Tensor, Tensor]:
    """Make room for the gradient of the sum `[..., D]`, and fp32 partial sums of the weight's, `[P, D]`."""
    programs = num_partials(scales.numel()) if trains else 0
    return torch.empty_like(total), scales.new_empty((programs, weight.numel()))


def rotate_heads(
    heads: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    weight: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotate channel `i` with channel `i + C / 2` of `[B, T, H, C]`, by positions `[B, T]` times `frequencies [C / 2]`.

    The result is multiplied by `magnitude`. With a `weight [C]` each head is normed before, with `eps`.
    """
    return _RotatedHeads.apply(heads, positions, frequencies, magnitude, weight, eps)


class _RotatedHeads(torch.autograd.Function):
    """Keeps the heads only if they are normed: the rotation itself needs the positions alone."""

    @staticmethod
    def forward(
        ctx: Any,
        heads: Tensor,
        positions: Tensor,
        frequencies: Tensor,
        magnitude: float,
        weight: Tensor | None,
        eps: float,
    ) -> Tensor:
        ctx.magnitude = magnitude
        heads, positions = heads.contiguous(), positions.contiguous()
        rotated, scales = torch.ops.torchround.rotate(
            heads, positions, frequencies, magnitude, weight, eps, False
        )
        kept = (None, None, None) if weight is None else (heads, weight, scales)
        ctx.save_for_backward(positions, frequencies, *kept)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        positions, frequencies, heads, weight, scales = ctx.saved_tensors
        turn, trains = (grads[0].contiguous(), positions, frequencies, ctx.magnitude), ctx.needs_input_grad[4]
        if heads is None:
            found, _ = torch.ops.torchround.rotate(*turn, None, 0.0, True)
            return found, None, None, None, None, None
        found, partials = torch.ops.torchround.norm_rotate_backward(*turn, heads, weight, scales, trains)
        return found, None, None, None, partials.sum(dim=0) if trains else None, None


@operation(
    "rotate(Tensor heads, Tensor positions, Tensor frequencies, float magnitude, Tensor? weight, float eps,"
    " bool back) -> (Tensor, Tensor)",
    "norms_triton.launch_rotation",
)
def rotation_results(
    heads: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    weight: Tensor | None,
    eps: float,
    back: bool,
) -> tuple[Tensor, Tensor]:
    """Make room for the rotated heads, and each head's fp32 scale `[B, T, H]`; no scale if there is no norm."""
    shape = (0,) if weight is None else heads.shape[:-1]
    return torch.empty_like(heads), heads.new_empty(shape, dtype=torch.float32)


@operation(
    "norm_rotate_backward(Tensor grad, Tensor positions, Tensor frequencies, float magnitude, Tensor heads,"
    " Tensor weight, Tensor scales, bool trains) -> (Tensor, Tensor)",
    "norms_triton.launch_rotation_backward",
)
def rotation_gradients(
    grad: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    heads: Tensor,
    weight: Tensor,
    scales: Tensor,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Make room for the gradient of the heads `[B, T, H, C]`, and fp32 partial sums of the weight's, `[P, C]`."""
    programs = num_partials(positions.numel()) if trains else 0
    return torch.empty_like(heads), scales.new_empty((programs, weight.numel()))
