"""SwiGLU experts over rows sorted by expert, as one grouped product or a loop.

A row's routing weight is applied before the projection down, where rows are narrow: then no expert output
has to be kept for the backward.

Shapes: R rows sorted by expert, E experts, D model width, F expert width.
"""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.common.initialise import init_linear_
from models.common.routing import Routes


class SwiGLUExperts(nn.Module):
    """`down_e(silu(gate_e(row)) * up_e(row) * weight)` for each row of expert e."""

    def __init__(self, hidden_size: int, num_experts: int, ffn_size: int) -> None:
        super().__init__()
        inward, outward = (num_experts, ffn_size, hidden_size), (num_experts, hidden_size, ffn_size)
        self.gate = nn.Parameter(torch.empty(inward, device="meta"))
        self.up = nn.Parameter(torch.empty(inward, device="meta"))
        self.down = nn.Parameter(torch.empty(outward, device="meta"))

    def forward(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
        gate, up = self.product("gate", rows, routes), self.product("up", rows, routes)  # [R, F]
        return self.product("down", _WeightedSwiGLU.apply(gate, up, weights), routes)

    def product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        """Rows times their expert's `gate`, `up` or `down`."""
        return grouped_product(rows, getattr(self, name).transpose(1, 2), routes.ends)

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_linear_(self.gate, generator)
        init_linear_(self.up, generator)
        init_linear_(self.down, generator, output_scale)

    def row_flops(self) -> float:
        return 2.0 * 3 * self.gate[0].numel()

    def row_elements(self) -> int:
        """Gate, up, and their product."""
        return 3 * self.gate.shape[1]


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`[R, A] x [E, A, Z] -> [R, Z]`: each expert's rows times its matrix; experts may have no rows."""
    if _has_grouped_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=ends)
    bounds = [0, *ends.tolist()]  # on a CUDA device this waits for it
    # unbind, not indexing: its backward writes the matrices' gradients once instead of E times.
    parts = zip(pairwise(bounds), weights.unbind(0), strict=True)
    return torch.cat([rows[start:stop] @ weight for (start, stop), weight in parts])


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    # bf16 on compute capability 8.0 or later, with rows of 16 bytes or multiples (torch's documentation).
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    aligned = all(size % 8 == 0 for size in weights.shape[1:])
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


class _WeightedSwiGLU(torch.autograd.Function):
    """`silu(gate) * up * weight`, keeping just these three."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weights)
        return F.silu(gate).mul_(up).mul_(weights[:, None])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weights = ctx.saved_tensors
        active = F.silu(gate)
        grad_weights = (grads[0] * active * up).sum(dim=-1, dtype=torch.float32)
        grad = grads[0] * weights[:, None].to(gate.dtype)
        return torch.ops.aten.silu_backward(grad * up, gate), active.mul_(grad), grad_weights
