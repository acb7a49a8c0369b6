"""Mixture of experts: the router, and the load that a balance penalty is computed from.

Shapes: B sequences, T tokens, N = B T, D model width, E experts, k experts per token, R = N k rows sorted by
expert.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from torchround.models.common.errors import ModelConfigError
from torchround.models.common.initialise import init_linear_
from torchround.models.common.routing import Routes, combine, dispatch, make_routes, sort_pairs
from torchround.models.common.work import frozen_elements

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

    def __call__(self, rows: Tensor, weights: Tensor, routes: Routes) -> Tensor:
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
