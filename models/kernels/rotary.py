"""Rotation of queries or keys by their positions, after an RMS norm of each head if the model has one: one kernel.

Cosines and sines are computed in the kernel, from the positions and one fp32 frequency for each pair of channels, so
no table is read or kept. Computed in fp32 and rounded once, where the result is written.

Shapes: B sequences, T tokens, H heads, C channels of a head, P partial sums of a weight's gradient.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.norms import num_partials, partial_sums, reference_norm_backward
from torchround.models.kernels.operation import operation, uses_triton


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
        turn = (positions, frequencies, magnitude)
        if weight is None:
            ctx.save_for_backward(*turn[:2], None, None, None)
            return torch.ops.torchround.rotate(heads, *turn, False)
        rotated, scales = torch.ops.torchround.norm_rotate(heads, *turn, weight, eps)
        ctx.save_for_backward(*turn[:2], heads, weight, scales)
        return rotated

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        positions, frequencies, heads, weight, scales = ctx.saved_tensors
        grad = grads[0].contiguous()
        if heads is None:
            found = torch.ops.torchround.rotate(grad, positions, frequencies, ctx.magnitude, True)
            return found, None, None, None, None, None
        trains = ctx.needs_input_grad[4]
        found, partials = torch.ops.torchround.norm_rotate_backward(
            grad, positions, frequencies, ctx.magnitude, heads, weight, scales, trains
        )
        return found, None, None, None, partials.sum(dim=0) if trains else None, None


def _rotate_shape(
    heads: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float, back: bool
) -> Tensor:
    return torch.empty_like(heads)


@operation(
    "rotate(Tensor heads, Tensor positions, Tensor frequencies, float magnitude, bool back) -> Tensor",
    _rotate_shape,
)
def rotate(heads: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float, back: bool) -> Tensor:
    """Return the heads `[B, T, H, C]` rotated; by the opposite angles if `back`, as the gradient is."""
    if uses_triton(heads):
        from torchround.models.kernels.norms_triton import launch_rotation

        return launch_rotation(heads, positions, frequencies, magnitude, None, 0.0, back)[0]
    return turned(heads.float(), positions, frequencies, magnitude, back).to(heads.dtype)


def _norm_rotate_shapes(
    heads: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(heads), heads.new_empty(heads.shape[:-1], dtype=torch.float32)


@operation(
    "norm_rotate(Tensor heads, Tensor positions, Tensor frequencies, float magnitude, Tensor weight, float eps)"
    " -> (Tensor, Tensor)",
    _norm_rotate_shapes,
)
def norm_rotate(
    heads: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the normed and rotated heads `[B, T, H, C]`, and each head's fp32 scale `[B, T, H]`."""
    if uses_triton(heads):
        from torchround.models.kernels.norms_triton import launch_rotation

        return launch_rotation(heads, positions, frequencies, magnitude, weight, eps)
    wide = heads.float()
    scales = (wide.square().mean(dim=-1, keepdim=True) + eps).rsqrt()  # [B, T, H, 1]
    normed = wide * scales * weight.float()
    return turned(normed, positions, frequencies, magnitude, back=False).to(heads.dtype), scales[..., 0]


def _norm_rotate_backward_shapes(
    grad: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    heads: Tensor,
    weight: Tensor,
    scales: Tensor,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    programs = num_partials(positions.numel()) if trains else 0
    return torch.empty_like(heads), scales.new_empty((programs, weight.numel()))


@operation(
    "norm_rotate_backward(Tensor grad, Tensor positions, Tensor frequencies, float magnitude, Tensor heads,"
    " Tensor weight, Tensor scales, bool trains) -> (Tensor, Tensor)",
    _norm_rotate_backward_shapes,
)
def norm_rotate_backward(
    grad: Tensor,
    positions: Tensor,
    frequencies: Tensor,
    magnitude: float,
    heads: Tensor,
    weight: Tensor,
    scales: Tensor,
    trains: bool,
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the heads `[B, T, H, C]`, and partial sums of the weight's, `[P, C]` fp32."""
    if uses_triton(grad):
        from torchround.models.kernels.norms_triton import launch_rotation_backward

        return launch_rotation_backward(
            grad, positions, frequencies, magnitude, heads, weight, scales, trains
        )
    inner = turned(
        grad.float(), positions, frequencies, magnitude, back=True
    )  # the gradient of the normed heads, fp32
    found, _ = reference_norm_backward(inner, None, heads, weight, scales, False)
    if not trains:
        return found, scales.new_empty((0, weight.numel()))
    terms = (inner * heads.float() * scales[..., None]).sum(dim=2)  # [B, T, H, C] -> [B, T, C]
    return found, partial_sums(terms.flatten(0, 1))


def turned(wide: Tensor, positions: Tensor, frequencies: Tensor, magnitude: float, back: bool) -> Tensor:
    """Rotate fp32 heads by PyTorch's own operations."""
    angles = positions[..., None, None].float() * frequencies  # [B, T, 1, C / 2]; the 1 stands for all heads
    cos, sin = angles.cos() * magnitude, angles.sin() * (-magnitude if back else magnitude)
    first, second = wide.chunk(2, dim=-1)  # [B, T, H, C / 2] each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
