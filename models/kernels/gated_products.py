"""Gated products of a feed-forward for accelerators: one kernel forward and one backward.

`fused_gated_product` is SwiGLU or GeGLU. `clamped_product` is GPT-OSS's: it adds each expert's bias to gates and values
first, which alternate in memory. `add_expert_bias` is the bias behind its projection down. All compute in fp32 and
round where a result is written. The backward keeps the inputs alone.

Shapes: R rows (tokens, or tokens sorted by expert), F feed-forward width, E experts, Z width of a bias.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from torchround.models.kernels.operation import operation, uses_triton


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


def _product_shape(gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    return torch.empty_like(gate)


@operation("gated_product(Tensor gate, Tensor up, Tensor? weights, str activation) -> Tensor", _product_shape)
def gated_product(gate: Tensor, up: Tensor, weights: Tensor | None, activation: str) -> Tensor:
    """Return the product, of the gate's shape and dtype."""
    if uses_triton(gate):
        from torchround.models.kernels.gated_products_triton import launch_gated_product

        return launch_gated_product(gate, up, weights, activation)
    product = _activate(gate.float(), activation) * up.float()
    return (product if weights is None else product * weights[:, None]).to(gate.dtype)


def _product_backward_shapes(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    rows = 0 if weights is None else len(weights)
    return torch.empty_like(gate), torch.empty_like(up), gate.new_empty(rows, dtype=torch.float32)


@operation(
    "gated_product_backward(Tensor grad, Tensor gate, Tensor up, Tensor? weights, str activation)"
    " -> (Tensor, Tensor, Tensor)",
    _product_backward_shapes,
)
def gated_product_backward(
    grad: Tensor, gate: Tensor, up: Tensor, weights: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and of the weights in fp32 (of no elements if there are none)."""
    if uses_triton(grad):
        from torchround.models.kernels.gated_products_triton import launch_gated_product_backward

        return launch_gated_product_backward(grad, gate, up, weights, activation)
    outer, wide_gate, wide_up = grad.float(), gate.float(), up.float()
    active = _activate(wide_gate, activation)
    grad_weights = outer.new_empty(0)
    if weights is not None:
        grad_weights = (outer * active * wide_up).sum(dim=-1)  # [R, F] -> [R]
        outer = outer * weights[:, None]
    if activation == "silu":
        grad_gate = torch.ops.aten.silu_backward(outer * wide_up, wide_gate)
    else:
        grad_gate = torch.ops.aten.gelu_backward(outer * wide_up, wide_gate, approximate="tanh")
    return grad_gate.to(gate.dtype), (outer * active).to(up.dtype), grad_weights


def _activate(gate: Tensor, activation: str) -> Tensor:
    return F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")


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


def _clamped_shape(
    gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


@operation(
    "clamped_product(Tensor gate_up, Tensor bias, Tensor experts, Tensor weights, float limit, float alpha)"
    " -> Tensor",
    _clamped_shape,
)
def clamped_product_forward(
    gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> Tensor:
    """Return the product `[R, F]`."""
    if uses_triton(gate_up):
        from torchround.models.kernels.gated_products_triton import launch_clamped_product

        return launch_clamped_product(gate_up, bias, experts, weights, limit, alpha)
    wide = gate_up.float() + bias[experts].float()
    gate, up = wide[:, ::2].clamp(max=limit), wide[:, 1::2].clamp(min=-limit, max=limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1) * weights[:, None]).to(gate_up.dtype)


def _clamped_backward_shapes(
    grad: Tensor, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_up), torch.empty_like(weights)


@operation(
    "clamped_product_backward(Tensor grad, Tensor gate_up, Tensor bias, Tensor experts, Tensor weights,"
    " float limit, float alpha) -> (Tensor, Tensor)",
    _clamped_backward_shapes,
)
def clamped_product_backward(
    grad: Tensor, gate_up: Tensor, bias: Tensor, experts: Tensor, weights: Tensor, limit: float, alpha: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of `gate_up [R, 2 F]` and of the weights `[R]`."""
    if uses_triton(grad):
        from torchround.models.kernels.gated_products_triton import launch_clamped_product_backward

        return launch_clamped_product_backward(grad, gate_up, bias, experts, weights, limit, alpha)
    wide = gate_up.float() + bias[experts].float()
    gate, up = wide[:, ::2].clamp(max=limit), wide[:, 1::2].clamp(min=-limit, max=limit)
    open_share = torch.sigmoid(alpha * gate)
    active = gate * open_share
    outer = grad.float()
    grad_weights = (outer * active * (up + 1)).sum(dim=-1)
    outer = outer * weights[:, None]
    grad_gate = outer * (up + 1) * (open_share + alpha * active * (1 - open_share))
    # The clamp passes gradients within its limits; gates have no lower one.
    grad_gate = grad_gate.where(wide[:, ::2] <= limit, 0.0)
    grad_up = (outer * active).where(wide[:, 1::2].abs() <= limit, 0.0)
    both = torch.stack((grad_gate, grad_up), dim=-1).flatten(-2)  # [R, F, 2] -> [R, 2 F]
    return both.to(gate_up.dtype), grad_weights


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
        return grad, grad_bias, None, None, torch.ops.torchround.dot_with_bias(grad, bias, experts)


def _bias_shape(rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    return torch.empty_like(rows)


@operation("add_expert_bias(Tensor rows, Tensor bias, Tensor experts, Tensor weights) -> Tensor", _bias_shape)
def add_weighted_bias(rows: Tensor, bias: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the sum `[R, Z]`."""
    if uses_triton(rows):
        from torchround.models.kernels.gated_products_triton import launch_expert_bias

        return launch_expert_bias(rows, bias, experts, weights)
    return (rows.float() + bias[experts].float() * weights[:, None]).to(rows.dtype)


def _dot_shape(grad: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    return grad.new_empty(len(grad), dtype=torch.float32)


@operation("dot_with_bias(Tensor grad, Tensor bias, Tensor experts) -> Tensor", _dot_shape)
def dot_with_bias(grad: Tensor, bias: Tensor, experts: Tensor) -> Tensor:
    """Multiply each row of `grad [R, Z]` with its expert's bias and add up, `[R]` fp32: the weights' gradient."""
    if uses_triton(grad):
        from torchround.models.kernels.gated_products_triton import launch_dot_with_bias

        return launch_dot_with_bias(grad, bias, experts)
    return (grad.float() * bias[experts].float()).sum(dim=-1)


def _sum_shape(rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty((len(ends), rows.shape[1]), dtype=torch.float32)


@operation("sum_by_expert(Tensor rows, Tensor ends, Tensor? weights) -> Tensor", _sum_shape)
def sum_by_expert(rows: Tensor, ends: Tensor, weights: Tensor | None) -> Tensor:
    """Add up each expert's rows of `[R, Z]`, times `weights [R]` if given, to `[E, Z]` fp32."""
    if uses_triton(rows):
        from torchround.models.kernels.gated_products_triton import launch_sum_by_expert

        return launch_sum_by_expert(rows, ends, weights)
    wide = rows.float() if weights is None else rows.float() * weights[:, None]
    experts = torch.searchsorted(
        ends, torch.arange(len(rows), device=rows.device, dtype=ends.dtype), right=True
    )
    # It adds up in a fixed order; the plain sum by index adds atomically on some kinds.
    return torch.ops.aten.embedding_dense_backward(wide, experts, len(ends), -1, False)
