"""Linear layers whose weight's gradient is added to its fp32 sum by the product itself.

Autograd writes a 16-bit gradient of the whole weight, casts it and adds it: 18 bytes for each parameter and micro-batch.
A product with fp32 output adds in its last step, which reads and writes the sum once (8 bytes), needs no scratch, and
does not round the gradient to 16 bits before.

Shapes: N tokens, A inputs, Z outputs.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import has_float32_products


class Projection(nn.Linear):
    """A linear layer of a block, built on `meta`. It computes `project`."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias` for `x [..., A]` and `weight [Z, A]`.

    The backward adds to the fp32 `weight.grad` if there is one and the device has such products. Otherwise, and under a
    compiler, autograd gets a gradient, as for any linear layer.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_compiling() and takes_products(weight):
        return _Project.apply(x, weight, bias)
    return F.linear(x, weight, bias)


def takes_products(weight: Tensor) -> bool:
    """Return whether `add_product_` may add to the gradient of this leaf."""
    grad = weight.grad if weight.requires_grad and weight.is_leaf else None
    has_sum = grad is not None and grad.dtype == torch.float32 and weight.dtype != torch.float32
    return has_sum and has_float32_products(weight.device.type, weight.dtype)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left [Z, N] @ right [N, A]`, of one 16-bit type, to `total [Z, A]` in fp32."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        # Autograd hands out the leaf itself, with the gradient that the engine gave it.
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        grad_x = grads[0] @ weight if wants_x else None
        grad, inputs = grads[0].flatten(0, -2), x.flatten(0, -2)  # [N, Z], [N, A]
        grad_weight = None
        if wants_weight and takes_products(weight):
            assert weight.grad is not None, "there is a gradient to add to"
            add_product_(weight.grad, grad.T, inputs)
        elif wants_weight:
            grad_weight = grad.T @ inputs
        # Left in fp32: autograd casts to the dtype of the leaf's gradient.
        grad_bias = grad.sum(dim=0, dtype=torch.float32) if wants_bias else None
        return grad_x, grad_weight, grad_bias
