"""Linear layers whose gradients are added up by the products themselves: each weight's, and that of a shared input.

Autograd writes a 16-bit gradient of the whole weight, casts it and adds it: 18 bytes for each parameter and micro-batch.
A product with fp32 output adds in its last step, which reads and writes the sum once (8 bytes), needs no scratch, and
does not round the gradient to 16 bits before.

Shapes: N tokens, A inputs, Z outputs.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.accelerators import device_kind, has_float32_products
from torchround.keeping import keep
from torchround.models.kernels.operation import uses_fused


class Projection(nn.Linear):
    """A linear layer of a block, built on `meta`. It computes `product`, as the part `part` of its block if that is set."""

    part: str | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__(in_features, out_features, bias=bias, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x) if self.part is None else keep(self.part, self.product, x)

    def product(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute `x @ weight.T + bias` for `x [..., A]` and `weight [Z, A]`.

    The backward adds to the fp32 `weight.grad` if there is one and the device has such products. Otherwise, and under a
    compiler, autograd gets a gradient, as for any linear layer.
    """
    if torch.is_grad_enabled() and not torch.compiler.is_dynamo_compiling() and takes_products(weight):
        return _Project.apply(x, weight, bias)[0]
    return F.linear(x, weight, bias)


def project_all(x: Tensor, layers: Sequence[nn.Module]) -> tuple[Tensor, ...]:
    """Compute what each of the linear layers makes of `x [..., A]`.

    On an accelerator their backwards add up the gradient of `x` in their products. Autograd would add the gradients of
    two projections in a pass of its own.
    """
    plain = all(type(layer) is Projection for layer in layers)  # an adapter adds products of its own
    if not (plain and torch.is_grad_enabled() and uses_fused(x)):
        return tuple(layer(x) for layer in layers)
    return _Project.apply(x, *(part for layer in layers for part in (layer.weight, layer.bias)))


def takes_products(weight: Tensor) -> bool:
    """Check whether `add_product_` may add to the gradient of this leaf."""
    grad = weight.grad if weight.requires_grad and weight.is_leaf else None
    has_sum = grad is not None and grad.dtype == torch.float32 and weight.dtype != torch.float32
    return has_sum and has_float32_products(device_kind(weight), weight.dtype)


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left [Z, N] @ right [N, A]`, of one 16-bit type, to `total [Z, A]` in fp32."""
    torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


class _Project(torch.autograd.Function):
    """Projections of one input. `parameters` are weight and bias of each; a bias may be None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = parameters[::2], parameters[1::2]
        ctx.save_for_backward(x, *weights)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True))  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd returns the leaves themselves, with the gradients that the engine gave them.
        x, *weights = ctx.saved_tensors
        wants_x, *wants = ctx.needs_input_grad
        inputs, grad_x, found = x.flatten(0, -2), None, []  # inputs [N, A]
        for number, (weight, grad) in enumerate(zip(weights, grads, strict=True)):
            rows = grad.flatten(0, -2)  # [N, Z]
            if wants_x:
                # The later products add to the first one's result in their last step.
                grad_x = rows @ weight if grad_x is None else grad_x.addmm_(rows, weight)
            found.append(_gradient(weight, rows, inputs) if wants[2 * number] else None)
            # Left in fp32: autograd casts to the dtype of the leaf's gradient.
            found.append(rows.sum(dim=0, dtype=torch.float32) if wants[2 * number + 1] else None)
        return None if grad_x is None else grad_x.view(x.shape), *found


def _gradient(weight: Tensor, grad: Tensor, inputs: Tensor) -> Tensor | None:
    """Add the weight's gradient to its sum, or return it if there is no sum to add to."""
    if not takes_products(weight):
        return grad.T @ inputs
    assert weight.grad is not None, "there is a gradient to add to"
    add_product_(weight.grad, grad.T, inputs)
    return None
