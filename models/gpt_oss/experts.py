"""GPT-OSS experts: biases, and a SwiGLU whose inputs are cut and whose gates alternate with its values.

Parameters have the shapes and order of the released 16-bit files. Shapes: R rows sorted by expert, E experts,
D model width, F expert width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from models.common.experts import grouped_product
from models.common.initialise import init_linear_
from models.common.lookup import lookup, lookup_gradient
from models.common.routing import Routes


class GptOssExperts(nn.Module):
    """`weight * (down_e(act(gate_up_e(row) + bias_e)) + bias_e)` for each row of expert e."""

    undecayed = ("gate_up_bias", "down_bias")

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int, limit: float, alpha: float) -> None:
        super().__init__()
        self.limit, self.alpha = limit, alpha
        inward, outward = (num_experts, hidden_size, 2 * ffn_size), (num_experts, ffn_size, hidden_size)
        self.gate_up = nn.Parameter(torch.empty(inward, device="meta"))
        self.gate_up_bias = nn.Parameter(torch.empty(num_experts, 2 * ffn_size, device="meta"))
        self.down = nn.Parameter(torch.empty(outward, device="meta"))
        self.down_bias = nn.Parameter(torch.empty(num_experts, hidden_size, device="meta"))

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        gate_up = grouped_product(rows, self.gate_up, routes.ends)  # [R, 2 F]
        gate_up = gate_up + lookup(self.gate_up_bias, routes.experts)
        product = _ClampedSwiGLU.apply(gate_up, weights, self.limit, self.alpha)  # [R, F]
        mixed = grouped_product(product, self.down, routes.ends)
        return mixed + _WeightedLookup.apply(self.down_bias, routes.experts, weights)

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_linear_(self.gate_up, generator)
        init_linear_(self.down, generator, output_scale)
        with torch.no_grad():
            self.gate_up_bias.zero_()
            self.down_bias.zero_()

    def row_flops(self) -> float:
        return 2.0 * (self.gate_up[0].numel() + self.down[0].numel())

    def row_elements(self) -> int:
        """Gates and values together, and their product."""
        return 3 * self.down.shape[1]


class _ClampedSwiGLU(torch.autograd.Function):
    """`(up + 1) * gate * sigmoid(alpha gate) * weight` with gate <= limit and |up| <= limit.

    Gates are the even channels, ups the odd ones. Only the inputs are kept.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, limit: float, alpha: float) -> Tensor:
        ctx.save_for_backward(gate_up, weights)
        ctx.limit, ctx.alpha = limit, alpha
        gate, up = _cut(gate_up, limit)
        return (gate * torch.sigmoid(alpha * gate)).mul_(up + 1).mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        gate_up, weights = ctx.saved_tensors
        gate, up = _cut(gate_up, ctx.limit)
        open_share = torch.sigmoid(ctx.alpha * gate)
        active = gate * open_share
        grad_weights = (grads[0] * active * (up + 1)).sum(dim=-1, dtype=torch.float32)
        grad = grads[0] * weights[:, None].to(gate_up.dtype)
        grad_gate = grad * (up + 1) * (open_share + ctx.alpha * active * (1 - open_share))
        grad_gate_up = torch.stack((grad_gate, grad * active), dim=-1).flatten(-2)
        return grad_gate_up.mul_(_within(gate_up, ctx.limit)), grad_weights, None, None


def _cut(gate_up: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    return gate.clamp(max=limit), up.clamp(min=-limit, max=limit)


def _within(gate_up: Tensor, limit: float) -> Tensor:
    """Where the cut passes gradients."""
    within = gate_up <= limit
    within[..., 1::2] &= gate_up[..., 1::2] >= -limit
    return within


class _WeightedLookup(torch.autograd.Function):
    """`table[index] * weight`, keeping neither the rows nor their product."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(table, index, weights)
        return table[index].mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        table, index, weights = ctx.saved_tensors
        grad_weights = (grads[0] * table[index]).sum(dim=-1, dtype=torch.float32)
        return lookup_gradient(grads[0].float() * weights[:, None], index, len(table)), None, grad_weights
