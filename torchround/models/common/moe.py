"""Mixture of experts: the router, and the load that a balance penalty is computed from.

Shapes: B sequences, T tokens, N = B T, D model width, E experts, k experts per token, R = N k rows sorted by
expert.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from torchround.models.common.config import ModelConfigError
from torchround.models.common.primitives import frozen_elements, init_linear_

# Kept per row: the choice, two permutations and the expert in int64; probability, sums and weight in fp32.
ROW_SCALARS_BYTES = 4 * 8 + 4 * 4


@dataclass(frozen=True)
class MoEShape:
    """`num_chosen` of `num_experts` experts serve each token, with the router's probabilities as weights.

    With `normalised` the weights of a token add up to 1: a softmax over the chosen experts alone.
    `balance_coefficient` times the load-balance penalty is added to the training loss; 0 leaves it out.
    """

    num_experts: int
    num_chosen: int
    ffn_size: int
    normalised: bool = True
    balance_coefficient: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.num_chosen <= self.num_experts:
            raise ModelConfigError(
                f"num_chosen = {self.num_chosen}, must be 1 to num_experts = {self.num_experts}"
            )
        if self.ffn_size < 1:
            raise ModelConfigError(f"expert ffn_size = {self.ffn_size}, must be at least 1")
        if self.balance_coefficient < 0:
            raise ModelConfigError(f"balance_coefficient = {self.balance_coefficient}, must not be negative")


class Experts(Protocol):
    """The E feed-forwards of one block. The object is also an `nn.Module`."""

    def __call__(self, rows: Tensor, weights: Tensor, routes: "Routes") -> Tensor:
        """Rows `[R, D]` and their routing weights `[R]` fp32 to weighted outputs `[R, D]`."""
        ...

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None: ...

    def row_flops(self) -> float:
        """Matrix-product FLOPs of one row."""
        ...

    def frozen_row_flops(self) -> float:
        """Those of them that are products with frozen weights."""
        ...

    def row_elements(self) -> int:
        """Elements kept for the backward per row, besides the row itself."""
        ...


class MoE(nn.Module):
    """`[B, T, D]` in and out; the load `[B, 2, E]` fp32 when asked for."""

    def __init__(
        self, hidden_size: int, shape: MoEShape, experts: Experts, router_bias: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        self.router = nn.Linear(hidden_size, shape.num_experts, bias=router_bias, device="meta")
        self.experts = experts

    def forward(self, x: Tensor) -> Tensor:
        return self._mix(x, *self._choose(self._route(x)))

    def forward_with_load(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Also, per sequence and expert: how many tokens chose it, and the sum of its probabilities."""
        probabilities = self._route(x)
        weights, chosen = self._choose(probabilities)
        return self._mix(x, weights, chosen), expert_load(probabilities, chosen)

    def _route(self, x: Tensor) -> Tensor:
        return self.router(x).softmax(dim=-1, dtype=torch.float32)  # [B, T, E]

    def _choose(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = probabilities.topk(self.shape.num_chosen, dim=-1)  # [B, T, k]
        if self.shape.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights, chosen

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        routes = make_routes(chosen.flatten(0, 1), self.shape.num_experts)
        rows = dispatch(x.flatten(0, 1), routes)  # [R, D]
        rows = self.experts(rows, sort_pairs(weights.flatten(0, 1), routes), routes)
        return combine(rows, routes).view_as(x)

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_linear_(self.router.weight, generator)
        if self.router.bias is not None:
            with torch.no_grad():
                self.router.bias.zero_()
        self.experts.init_weights(generator, output_scale)

    def forward_flops(self, num_tokens: int) -> float:
        per_token = 2.0 * self.router.weight.numel() + self.shape.num_chosen * self.experts.row_flops()
        return num_tokens * per_token

    def frozen_flops(self, num_tokens: int) -> float:
        per_token = 2.0 * frozen_elements(self.router.weight)
        return num_tokens * (per_token + self.shape.num_chosen * self.experts.frozen_row_flops())

    def activation_bytes(self, num_tokens: int, element_bytes: int) -> int:
        row_bytes = (
            self.router.in_features + self.experts.row_elements()
        ) * element_bytes + ROW_SCALARS_BYTES
        return num_tokens * (4 * self.shape.num_experts + self.shape.num_chosen * row_bytes)

    def workspace_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Rows in and out of the experts, their gradients, and those of what the experts keep."""
        row_elements = 4 * self.router.in_features + self.experts.row_elements()
        return num_tokens * self.shape.num_chosen * row_elements * element_bytes


def expert_load(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """`[B, 2, E]` fp32: tokens of each sequence that chose an expert, and the sums of its probabilities."""
    every = torch.arange(probabilities.shape[-1], device=chosen.device)
    counts = (chosen.flatten(1)[..., None] == every).sum(dim=1)  # [B, E], exact in any order
    return torch.stack((counts.float(), probabilities.sum(dim=1)), dim=1)


def balance_penalty(load: Tensor, num_tokens: int) -> Tensor:
    """Penalty `[B]` of each sequence: `E sum_e (share of tokens that chose e) (mean probability of e)`.

    Switch Transformer, equations 4 to 6. `load [B, 2, E]` is summed over layers and `num_tokens` counts a
    sequence's tokens once per layer. Perfect balance gives k. Per sequence, so that the sum over a step does
    not depend on how it was cut into micro-batches.
    """
    counts, probabilities = load.unbind(dim=1)
    return load.shape[-1] * (counts * probabilities).sum(dim=-1) / num_tokens**2


# Which tokens go to which experts: a permutation of (token, choice) pairs, sorted by expert.
#
# Everything happens on the tokens' device without waiting for it, and every backward is a gather: no atomic
# additions, so equal runs give equal bits.
#
# Shapes: N tokens of the micro-batch, D model width, E experts, k experts per token, R = N k rows.


@dataclass(frozen=True)
class Routes:
    """Rows sorted by expert. All int64 but `ends`.

    `pairs [R]`: the (token, choice) pair `token * k + choice` in each row. `rows [R]`: the row of each pair,
    the inverse permutation. `experts [R]`: the expert of each row. `ends [E]` int32: one past each expert's
    last row, as `torch.nn.functional.grouped_mm` wants its offsets; equal to its predecessor without rows.
    """

    pairs: Tensor
    rows: Tensor
    experts: Tensor
    ends: Tensor
    choices: int


def make_routes(chosen: Tensor, num_experts: int) -> Routes:
    """From the experts `chosen [N, k]` for each token. Pairs of one expert stay in token order."""
    experts, pairs = chosen.flatten().sort(stable=True)
    rows = torch.empty_like(pairs).scatter_(0, pairs, torch.arange(len(pairs), device=pairs.device))
    every = torch.arange(num_experts, device=chosen.device)
    ends = torch.searchsorted(experts, every, right=True, out_int32=True)
    return Routes(pairs, rows, experts, ends, chosen.shape[1])


def dispatch(tokens: Tensor, routes: Routes) -> Tensor:
    """`[N, D]` to `[R, D]`: each token in the rows of its k experts."""
    return _Dispatch.apply(tokens, routes.pairs, routes.rows, routes.choices)


def combine(rows: Tensor, routes: Routes) -> Tensor:
    """`[R, D]` to `[N, D]`: the sum of each token's k rows, added in fp32."""
    return _Combine.apply(rows, routes.pairs, routes.rows, routes.choices)


def sort_pairs(values: Tensor, routes: Routes) -> Tensor:
    """`[N, k]` to `[R]`: one number per pair, in row order."""
    return _Permute.apply(values.flatten(), routes.pairs, routes.rows)


def _spread(tokens: Tensor, pairs: Tensor, choices: int) -> Tensor:
    return tokens[pairs // choices]


def _gather_sums(sorted_rows: Tensor, rows: Tensor, choices: int) -> Tensor:
    by_token = sorted_rows[rows].unflatten(0, (-1, choices))  # [N, k, D]
    return by_token.sum(dim=1, dtype=torch.float32).to(sorted_rows.dtype)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, pairs: Tensor, rows: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.choices = choices
        return _spread(tokens, pairs, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (rows,) = ctx.saved_tensors
        return _gather_sums(grads[0], rows, ctx.choices), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sorted_rows: Tensor, pairs: Tensor, rows: Tensor, choices: int) -> Tensor:
        ctx.save_for_backward(pairs)
        ctx.choices = choices
        return _gather_sums(sorted_rows, rows, choices)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        (pairs,) = ctx.saved_tensors
        return _spread(grads[0], pairs, ctx.choices), None, None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, pairs: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return values[pairs]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rows,) = ctx.saved_tensors
        return grads[0][rows], None, None
