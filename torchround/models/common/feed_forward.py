"""SwiGLU feed-forward: `down(silu(gate(x)) * up(x))`.

The activation keeps its two inputs and recomputes `silu(gate)` in the backward, so that the block keeps the
`6 B T F` bytes of RoundPipe appendix B.1 instead of `8 B T F`.

Shapes: B sequences, T tokens, D model width, F feed-forward width.
"""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.models.common.lora import Adapter, LoraShape
from torchround.models.common.moe import Routes
from torchround.models.common.primitives import frozen_elements, init_linear_


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


# SwiGLU experts over rows sorted by expert, as one grouped product or a loop; and low-rank adapters on stacks of them.
#
# A row's routing weight is applied before the projection down, where rows are narrow: then no expert output
# has to be kept for the backward.
#
# Shapes: R rows sorted by expert, E experts, D model width, F expert width; of an adapter A inputs, Z outputs, r rank.


class SwiGLUExperts(nn.Module):
    """`down_e(silu(gate_e(row)) * up_e(row) * weight)` for each row of expert e."""

    adaptable: tuple[str, ...] = ("gate", "up", "down")

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

    def frozen_row_flops(self) -> float:
        return 2.0 * frozen_elements(self.gate, self.up, self.down) / len(self.gate)

    def row_elements(self) -> int:
        """Gate, up, and their product."""
        return 3 * self.gate.shape[1]

    def with_adapters(self, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> "LoraExperts":
        return LoraExperts(self, lora, place, adapted)


class ExpertAdapter(Adapter, ABC):
    """Adapters on the parameters `adapted` of a stack of experts, each expert its own.

    Comes before the experts' class among the bases. On CUDA a rank that 8 does not divide takes the loop over
    experts.
    """

    adapted: tuple[str, ...]

    @abstractmethod
    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        """`[E, A, r]` and `[E, r, Z]`, made of the parameters `<name>_lora_a` and `<name>_lora_b`."""

    def product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        """Rows times their expert's matrix and adapter."""
        plain: Tensor = super().product(name, rows, routes)  # type: ignore[misc]
        if name not in self.adapted:
            return plain
        inward, outward = self.factors(name)
        dropped = self.drop(rows, use=1 + self.adapted.index(name))
        low = grouped_product(dropped, inward, routes.ends)
        return plain + grouped_product(low, outward, routes.ends) * self.lora.scale

    def row_flops(self) -> float:
        flops: float = super().row_flops()  # type: ignore[misc]
        return flops + sum(2.0 * (a[0].numel() + b[0].numel()) for a, b in map(self.factors, self.adapted))

    def row_elements(self) -> int:
        """And what each A gives; with dropout, its input and the mask."""
        elements: int = super().row_elements()  # type: ignore[misc]
        inputs = sum(self.factors(name)[0].shape[1] + 1 for name in self.adapted) if self.lora.dropout else 0
        return elements + len(self.adapted) * self.lora.rank + inputs


class LoraExperts(ExpertAdapter, SwiGLUExperts):
    """SwiGLU experts, frozen, with adapters `<name>_lora_a [E, r, A]`, `<name>_lora_b [E, Z, r]`."""

    def __init__(self, base: SwiGLUExperts, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> None:
        num_experts, ffn_size, hidden_size = base.gate.shape
        super().__init__(hidden_size, num_experts, ffn_size)
        self.gate, self.up, self.down = base.gate, base.up, base.down
        self.lora, self.place, self.seed, self.adapted = lora, place, None, adapted
        for name in adapted:
            _, outputs, inputs = getattr(base, name).shape
            a = torch.empty(num_experts, lora.rank, inputs, device="meta")
            b = torch.empty(num_experts, outputs, lora.rank, device="meta")
            setattr(self, f"{name}_lora_a", nn.Parameter(a))
            setattr(self, f"{name}_lora_b", nn.Parameter(b))

    def factors(self, name: str) -> tuple[Tensor, Tensor]:
        a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
        return a.transpose(1, 2), b.transpose(1, 2)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """`[R, A] x [E, A, Z] -> [R, Z]`: each expert's rows times its matrix; experts may have no rows."""
    if _has_grouped_kernel(rows, weights):
        return F.grouped_mm(rows, weights, offs=ends)
    if torch.compiler.is_compiling():
        return _OpaqueLoop.apply(rows, weights, ends)
    return _multiply_rows(rows, weights, ends)


def _has_grouped_kernel(rows: Tensor, weights: Tensor) -> bool:
    # bf16 on compute capability 8.0 or later, with rows of 16 bytes or multiples (torch's documentation).
    if rows.device.type != "cuda" or rows.dtype != torch.bfloat16 or not hasattr(F, "grouped_mm"):
        return False
    aligned = all(size % 8 == 0 for size in weights.shape[1:])
    return aligned and torch.cuda.get_device_capability(rows.device) >= (8, 0)


def _multiply_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    bounds = [0, *ends.tolist()]  # on a CUDA device this waits for it
    # unbind, not indexing: its backward writes the matrices' gradients once instead of E times.
    parts = zip(pairwise(bounds), weights.unbind(0), strict=True)
    return torch.cat([rows[start:stop] @ weight for (start, stop), weight in parts])


class _OpaqueLoop(torch.autograd.Function):
    """The loop for a compiler, which cannot know how many rows an expert has: operations that it calls as they are."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, ends)
        return _loop_over_rows(rows, weights, ends)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        rows, weights, ends = ctx.saved_tensors
        wants_rows, wants_weights, _ = ctx.needs_input_grad
        grad_rows = _loop_over_rows(grads[0], weights.transpose(1, 2), ends) if wants_rows else None
        grad_weights = _loop_over_matrices(rows, grads[0], ends) if wants_weights else None
        return grad_rows, grad_weights, None


@torch.library.custom_op("torchround::loop_over_rows", mutates_args=())
def _loop_over_rows(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return _multiply_rows(rows, weights, ends)


@_loop_over_rows.register_fake
def _loop_over_rows_shape(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weights.shape[2]))


@torch.library.custom_op("torchround::loop_over_matrices", mutates_args=())
def _loop_over_matrices(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """`[R, A] x [R, Z] -> [E, A, Z]`: each matrix's gradient, zero for an expert without rows."""
    bounds = pairwise([0, *ends.tolist()])
    return torch.stack([rows[start:stop].T @ grad[start:stop] for start, stop in bounds])


@_loop_over_matrices.register_fake
def _loop_over_matrices_shape(rows: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    return rows.new_empty((ends.shape[0], rows.shape[1], grad.shape[1]))


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
