"""RMS norm in fp32 that keeps only its 16-bit input for the backward.

`torch.nn.functional.rms_norm` on the CPU keeps two fp32 copies of a bf16 input; this keeps the input, which
the residual stream holds anyway, and one number per token (RoundPipe appendix B.1 counts just that).
"""

from typing import Any

import torch
from torch import Tensor, nn


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
