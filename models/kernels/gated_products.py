"""Gated products of a feed-forward by Triton: one kernel forward and one backward.

`fused_gated_product` is SwiGLU or GeGLU. `clamped_product` is GPT-OSS's: it adds each expert's bias to gates and values
first, which alternate in memory. `add_expert_bias` is the bias behind its projection down. All compute in fp32 and
round where a result is written. The backward keeps the inputs alone.

Shapes: R rows (tokens, or tokens sorted by expert), F feed-forward width, E experts, Z width of a bias.
"""

from typing import Any

import torch
from torch import Tensor

from torchround.models.kernels.operation import operation


def fused_gated_product(gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    """Return `activation(gate) * up` of `[..., F]`, times `weights [R]` fp32 if given."""
    return _FusedGatedProduct.apply(gate, up, weights, activation)


class _FusedGatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weights)
        ctx.activation = activation
        return torch.ops.torchround.gated_product(gate, up, weights, activation)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        gate, up, weights = ctx.saved_tensors
        *found, grad_weights = torch.ops.torchround.gated_product_backward(
            grads[0].contiguous(), gate, up, weights, ctx.activation
        )
        return *found, None if weights is None else grad_weights, None


@operation(
    "gated_product(Tensor gate, Tensor up, Tensor? weights, str activation) -> Tensor",
    "gated_products_triton.launch_gated_product",
)
@operation(
    "add_expert_bias(Tensor rows, Tensor bias, Tensor experts, Tensor weights) -> Tensor",
    "gated_products_triton.launch_expert_bias",
)
def product_result(gate: Tensor, *_: Any) -> Tensor:
    """Make room for the product."""
    return torch.empty_like(gate)


@operation(
    "gated_product_backward(Tensor grad, Tensor gate, Tensor up, Tensor? weights, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    "gated_products_triton.launch_gated_product_backward",
)
def product_gradients(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Make room for the gradients of gate and up, and of the weights in fp32 (of no elements if there are none)."""
    rows = 0 if weights is None else len(weights)
    return torch.empty_like(gate), torch.empty_like(up), gate.new_empty(rows, dtype=torch.float32)


def clamped_product(
    gate_up: Tensor,
    bias: Tensor,
    experts: Tensor,
    ends: Tensor,
    weights: Tensor,
    limit: float,
    alpha: float,
) -> Tensor:
    """Return `(up + 1) * gate * sigmoid(alpha gate) * weight`, with gate <= limit and |up| <= limit, `[R, F]`.

    `gate_up [R, 2 F]` with the row's expert's `bias [E, 2 F]` added has gates in the even channels and ups in the odd
    ones. `experts [R]` is the expert of each row, sorted; `ends [E]` is one past each expert's last row. `weights` is
    `[R]` fp32.
    """
    return _FusedClampedProduct.apply(gate_up, bias, experts, ends, weights, limit, alpha)


class _FusedClampedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        gate_up: Tensor,
        bias: Tensor,
        experts: Tensor,
        ends: Tensor,
        weights: Tensor,
        limit: float,
        alpha: float,
    ) -> Tensor:
        inputs = (gate_up.contiguous(), bias, experts, weights)
        ctx.save_for_backward(*inputs, ends)
        ctx.settings = (limit, alpha)
        return torch.ops.torchround.clamped_product(*inputs, limit, alpha)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, ends = ctx.saved_tensors
        grad, grad_weights = torch.ops.torchround.clamped_product_backward(
            grads[0].contiguous(), *inputs, *ctx.settings
        )
        grad_bias = None
        if ctx.needs_input_grad[1]:
            grad_bias = torch.ops.torchround.sum_by_expert(grad, ends, None)
        return grad, grad_bias, None, None, grad_weights, None, None


@operation(
    "clamped_product(Tensor gate_up, Tensor bias, Tensor experts, Tensor weights, float limit, float alpha)"
    " -> Tensor",
    "gated_products_triton.launch_clamped_product",
)
def clamped_result(gate_up: Tensor, *_: Any) -> Tensor:
    """Make room for the product `[R, F]`."""
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@operation(
    "clamped_product_backward(Tensor grad, Tensor gate_up, Tensor bias, Tensor experts, Tensor weights,"
    " float limit, float alpha) -> (Tensor, Tensor)",
    "gated_products_triton.launch_clamped_product_backward",
)
def clamped_gradients(
    grad: Tensor, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, *_: Any
) -> tuple[Tensor, Tensor]:
    """Make room for the gradients of `gate_up [R, 2 F]` and of the weights `[R]`."""
    return torch.empty_like(gate_up), torch.empty_like(weights)


def add_expert_bias(rows: Tensor, bias: Tensor, experts: Tensor, ends: Tensor, weights: Tensor) -> Tensor:
    """Return `rows [R, Z]` with each row's expert's `bias [E, Z]` added, times the row's weight (`weights [R]`)."""
    return _FusedExpertBias.apply(rows, bias, experts, ends, weights)


class _FusedExpertBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, experts: Tensor, ends: Tensor, weights: Tensor
    ) -> Tensor:
        ctx.save_for_backward(bias, experts, ends, weights)
        return torch.ops.torchround.add_expert_bias(rows.contiguous(), bias, experts, weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        bias, experts, ends, weights = ctx.saved_tensors
        grad = grads[0].contiguous()
        grad_bias = (
            torch.ops.torchround.sum_by_expert(grad, ends, weights) if ctx.needs_input_grad[1] else None
        )
        # Each row of the gradient times its expert's bias, added up: the weights' gradient.
        return grad, grad_bias, None, None, torch.ops.torchround.dot_with_bias(grad, bias, experts)


@operation(
    "dot_with_bias(Tensor grad, Tensor bias, Tensor experts) -> Tensor",
    "gated_products_triton.launch_dot_with_bias",
)
def dot_result(grad: Tensor, *_: Any) -> Tensor:
    """Make room for the products `[R]` fp32."""
    return grad.new_empty(len(grad), dtype=torch.float32)


@operation(
    "sum_by_expert(Tensor rows, Tensor ends, Tensor? weights) -> Tensor",
    "gated_products_triton.launch_sum_by_expert",
)
def sum_result(rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Make room for each expert's sum of rows, `[E, Z]` fp32."""
    return rows.new_empty((len(ends), rows.shape[1]), dtype=torch.float32)
