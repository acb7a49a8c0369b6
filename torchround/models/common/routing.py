"""Which tokens go to which experts: a permutation of (token, choice) pairs, sorted by expert.

Everything happens on the tokens' device without waiting for it, and every backward is a gather: no atomic
additions, so equal runs give equal bits.

Shapes: N tokens of the micro-batch, D model width, E experts, k experts per token, R = N k rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


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
