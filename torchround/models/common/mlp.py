"""SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`.

The activation keeps its two inputs and recomputes `silu(gate)` in the backward, so that the block keeps the
`6 B T F` bytes of RoundPipe appendix B.1 instead of `8 B T F`.

Shapes: B sequences, T tokens, D model width, F feed-forward width.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.models.common.initialise import init_linear_
from torchround.models.common.work import frozen_elements


class SwiGLU(nn.Module):
    """`[B, T, D]` in and out."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, ffn_size, bias=False, device="meta")
        self.up = nn.Linear(hidden_size, ffn_size, bias=False, device="meta")
        self.down = nn.Linear(ffn_size, hidden_size, bias=False, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(self.gate(x), self.up(x)))

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_linear_(self.gate.weight, generator)
        init_linear_(self.up.weight, generator)
        init_linear_(self.down.weight, generator, output_scale)

    def forward_flops(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * 3 * self.gate.weight.numel()

    def frozen_flops(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * frozen_elements(self.gate.weight, self.up.weight, self.down.weight)

    def activation_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Kept for the backward besides the input: gate, up, and their product."""
        return 3 * num_tokens * self.gate.out_features * element_bytes

    def workspace_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """In the backward: gradients of the product and of its two factors."""
        return 3 * num_tokens * self.gate.out_features * element_bytes


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up`, elementwise."""
    return _SwiGLU.apply(gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        grad_gate = torch.ops.aten.silu_backward(grads[0] * up, gate)
        return grad_gate, F.silu(gate).mul_(grads[0])
