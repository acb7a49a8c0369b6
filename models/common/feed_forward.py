"""The two kinds of feed-forward of a block: one gated MLP for every token, or a mixture of experts (MoE).

Both map `[B, T, D]` to `[B, T, D]` and count their own work. The mixture also measures the load that a balance
penalty is computed from.

Shapes: B sequences, T tokens, N = B T, D model width, F feed-forward width, E experts, k experts per token,
R = N k rows sorted by expert.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from torchround.accelerators import PLANNED_KIND
from torchround.keeping import keep
from torchround.layer import LayerWork
from torchround.models.common.chunks import in_chunks, work_in_chunks
from torchround.models.common.config import ModelConfigError
from torchround.models.common.experts import ExpertStack, combine, dispatch, make_routes, sort_pairs
from torchround.models.common.lora import kept_linears, linear_work
from torchround.models.common.primitives import gated_product, init_part_
from torchround.models.kernels.projections import Projection, project_all

# Kept per row: two permutations and the expert in int64, the weight in fp32.
ROW_SCALARS_BYTES = 3 * 8 + 4


class GatedMLP(nn.Module):
    """`down(silu(gate(x)) * up(x))`."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate = Projection(hidden_size, ffn_size)
        self.up = Projection(hidden_size, ffn_size)
        self.down = Projection(ffn_size, hidden_size)

    def forward(self, x: Tensor, is_read: bool = True) -> Tensor:
        """Compute the output; unless it `is_read`, its graph alone counts (`in_chunks`)."""
        return in_chunks(self, self._mix, x.flatten(0, -2), is_read=is_read).view_as(x)

    def _mix(self, x: Tensor) -> Tensor:
        gate, up = keep("gate_up", project_all, x, (self.gate, self.up))
        return keep("down", self.down, gated_product(gate, up))

    init_weights = init_part_

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count three products. The backward needs gate, up and their product; the scratch is their gradients."""
        row_bytes, width = self.gate.in_features * element_bytes, self.gate.out_features

        def at_once(tokens: int) -> LayerWork:
            inner_bytes = 3 * tokens * width * element_bytes
            inward = kept_linears("gate_up", (self.gate, self.up), tokens, element_bytes, 2 * width)
            down = kept_linears("down", (self.down,), tokens, element_bytes)
            return LayerWork(activation_bytes=inner_bytes, workspace_bytes=inner_bytes) + inward + down

        return work_in_chunks(at_once, num_tokens, row_bytes)


@dataclass(frozen=True)
class MoEShape:
    """The sizes of a mixture: `num_chosen` of `num_experts` experts serve each token.

    The router's probabilities weight the experts' outputs. With `normalised` the weights of a token add up to 1: a
    softmax over the chosen experts alone. The training loss gets `balance_coefficient` times the load-balance
    penalty; 0 leaves it out.
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


class MoE(nn.Module):
    """A router and its experts, which `make_experts(hidden_size, num_experts, ffn_size)` makes as the family has them."""

    def __init__(
        self,
        hidden_size: int,
        shape: MoEShape,
        make_experts: Callable[[int, int, int], ExpertStack],
        router_bias: bool = False,
    ) -> None:
        super().__init__()
        self.shape = shape
        self.router = Projection(hidden_size, shape.num_experts, router_bias)
        self.experts = make_experts(hidden_size, shape.num_experts, shape.ffn_size)

    def forward(self, x: Tensor, is_read: bool = True) -> Tensor:
        """Compute the output; unless it `is_read`, its graph alone counts (`in_chunks`)."""
        return self.forward_with_choice(x, is_read)[0]

    def forward_with_choice(self, x: Tensor, is_read: bool = True) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output, the router's probabilities `[B, T, E]` fp32 and each token's experts `[B, T, k]`."""
        probabilities = self.router(x).softmax(dim=-1, dtype=torch.float32)  # [B, T, E]
        weights, chosen = probabilities.topk(self.shape.num_chosen, dim=-1)  # [B, T, k]
        if self.shape.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        flat = (part.flatten(0, 1) for part in (x, weights, chosen))  # [B, T, ..] -> [N, ..]
        mixed = in_chunks(self.experts, self._mix, *flat, is_read=is_read).view_as(x)
        return mixed, probabilities, chosen

    def _mix(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Pass tokens `[N, D]` through their `chosen [N, k]` experts, with `weights [N, k]`."""
        routes = make_routes(chosen, self.shape.num_experts)
        rows = self.experts(dispatch(x, routes), sort_pairs(weights, routes), routes)  # [N, D] -> [R, D]
        return combine(rows, routes)  # [R, D] -> [N, D]

    def init_weights(self, generator: torch.Generator, output_scale: float) -> None:
        init_part_(self.router, generator, output_scale)
        self.experts.init_weights(generator, output_scale)

    def work(self, num_tokens: int, element_bytes: int, device: str = PLANNED_KIND) -> LayerWork:
        """Count the router's product and the experts' work on R rows.

        The backward also needs the probabilities of all experts (fp32), the dispatched rows and each row's numbers.
        The scratch is the rows in and out of the experts and their gradients, or what the activation needs between them,
        beside the scratch of the experts.
        """
        row_bytes = self.router.in_features * element_bytes

        def at_once(tokens: int) -> LayerWork:
            num_rows = tokens * self.shape.num_chosen
            experts = self.experts.work(num_rows, element_bytes, device)
            activation_bytes = self.experts.activation_scratch_bytes(num_rows, element_bytes, device)
            return replace(
                experts,
                activation_bytes=experts.activation_bytes + num_rows * (row_bytes + ROW_SCALARS_BYTES),
                workspace_bytes=max(4 * num_rows * row_bytes, activation_bytes) + experts.workspace_bytes,
            )

        # The choice in int64; probability, sums and weight in fp32.
        routing_bytes = num_tokens * (4 * self.shape.num_experts + self.shape.num_chosen * (8 + 3 * 4))
        work = linear_work(self.router, num_tokens, element_bytes) + work_in_chunks(
            at_once, num_tokens, row_bytes
        )
        return replace(work, activation_bytes=work.activation_bytes + routing_bytes)


def expert_load(probabilities: Tensor, chosen: Tensor) -> Tensor:
    """Count, per sequence and expert, the tokens that chose it, and add up its probabilities.

    `probabilities` is `[B, T, E]`, `chosen` `[B, T, k]`. Returns `[B, 2, E]` fp32: counts, then sums.
    """
    every = torch.arange(probabilities.shape[-1], device=chosen.device)
    counts = (chosen.flatten(1)[..., None] == every).sum(dim=1)  # [B, T k, E] -> [B, E], exact in any order
    return torch.stack((counts.float(), probabilities.sum(dim=1)), dim=1)


def balance_penalty(load: Tensor, num_tokens: int) -> Tensor:
    """Compute each sequence's penalty `[B]`: `E sum_e (share of tokens that chose e) (mean probability of e)`.

    Switch Transformer (arXiv 2101.03961), equations 4 to 6. `load [B, 2, E]` is summed over layers, and
    `num_tokens` counts a sequence's tokens once per layer. Perfect balance gives k. The penalty is one of
    sequences, so its sum over a step does not depend on how the step was cut into micro-batches.
    """
    counts, probabilities = load.unbind(dim=1)
    return load.shape[-1] * (counts * probabilities).sum(dim=-1) / num_tokens**2
