"""Rotation of queries or keys by Triton, after an RMS norm of each head if the model has one: one kernel.

Cosines and sines are computed in the kernel, from the positions and one fp32 frequency for each pair of channels, so
no table is read or kept. Computed in fp32 and rounded once, where the result is written.

Shapes: B sequences, T tokens, H heads, C channels of a head, P partial sums of a weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.norms import num_partials
from torchround.models.kernels.operation import operation


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


operation(
    "rotate(Tensor heads, Tensor positions, Tensor frequencies, float magnitude, Tensor? weight, float eps,"
    " bool back) -> (Tensor, Tensor)",
    rotation_results,
    "norms_triton.launch_rotation",
)
operation(
    "norm_rotate_backward(Tensor grad, Tensor positions, Tensor frequencies, float magnitude, Tensor heads,"
    " Tensor weight, Tensor scales, bool trains) -> (Tensor, Tensor)",
    rotation_gradients,
    "norms_triton.launch_rotation_backward",
)
