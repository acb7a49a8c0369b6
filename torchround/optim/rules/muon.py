"""Muon: momentum whose matrices are orthogonalised before they are applied (Jordan et al. 2024).

The host keeps the momentum. A step's look-ahead goes to the devices in bf16, and comes back as a direction with
singular values near 1 (`engine/worker/orthogonalise.py`). Then one pass updates momentum and weight. The numbers are
`torch.optim.Muon`'s. Each operation is rounded on its own, so that the compiled pass gives the same bits.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from torchround.config.optimizer_tables import MuonTable
from torchround.optim.formats import StateValue
from torchround.optim.optimizer import Optimizer, ParameterFacts, Tensors, UpdateRule
from torchround.optim.rules.adamw import AdamWRule

# One element's arithmetic, as `kernel.py` compiles it. Each operation is one of `MuonRule.new_values`.
KERNEL_SOURCE = """
inline void update_values(float *values, float gradient, Numbers n) {
    const float scaled = gradient * n[0];
    values[0] = (scaled - values[0]) * n[1] + values[0];
}
inline float updated_weight(float weight, const float *, float, float direction, Numbers n) {
    return weight * n[2] + direction * n[3];
}
"""


@dataclass(frozen=True)
class MuonRule(UpdateRule):
    """Muon for matrices of one shape. `lr_ratio` is what the shape multiplies the learning rate by."""

    momentum: float
    weight_decay: float
    lr_ratio: float

    values = (StateValue("momentum_buffer"),)
    kernel_source = KERNEL_SOURCE
    uses_direction = True

    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        return gradient_scale, 1.0 - self.momentum, 1.0 - lr * self.weight_decay, -lr * self.lr_ratio

    def new_values(
        self, weight: Tensor, values: Tensors, gradient: Tensor, numbers: Tensors, direction: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Compute the new weight and the new momentum.

        m = momentum + (1 - beta) * (gradient * gradient_scale - momentum)
        w = (1 - lr * weight_decay) * weight - lr * lr_ratio * direction
        """
        assert direction is not None, "a step of Muon has a direction"
        _, _, decay, minus_step = numbers
        updated = weight.mul(decay).add_(direction.mul(minus_step))
        return updated, (self._new_momentum(values, gradient, numbers)[0],)

    def look_ahead(self, values: Tensors, gradient: Tensor, numbers: Tensors) -> Tensor:
        """Compute what devices orthogonalise: the new momentum, with Nesterov's `m + (1 - beta) * (gradient - m)`."""
        momentum, scaled = self._new_momentum(values, gradient, numbers)
        return momentum.sub(momentum.sub(scaled).mul_(numbers[1]))

    @staticmethod
    def _new_momentum(values: Tensors, gradient: Tensor, numbers: Tensors) -> tuple[Tensor, Tensor]:
        (momentum,) = values
        scaled = gradient.mul(numbers[0])
        return scaled.sub(momentum).mul_(numbers[1]).add_(momentum), scaled


@dataclass(frozen=True)
class OtherRateRule(AdamWRule):
    """AdamW at `lr_ratio` times the learning rate of the matrices."""

    lr_ratio: float = 1.0

    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        return super().numbers(lr * self.lr_ratio, update, gradient_scale)


class Muon(Optimizer[MuonTable]):
    """Muon for the matrices of blocks, each expert its own matrix, and AdamW for everything else."""

    table = MuonTable

    def rule_of(self, parameter: ParameterFacts) -> UpdateRule:
        """Choose the rule of a parameter. Matrices whose learning rate their shape changes alike share one."""
        keys = self.settings
        decay = keys.weight_decay if parameter.is_decayed else 0.0
        if parameter.is_block_matrix:
            return MuonRule(keys.momentum, decay, lr_ratio(parameter.shape))
        ratio = 1.0 if keys.adamw_lr is None else keys.adamw_lr / keys.lr
        return OtherRateRule(keys.betas, keys.eps, decay, ratio)


def lr_ratio(shape: torch.Size) -> float:
    """Scale the learning rate of a matrix `[..., rows, columns]`: a step is as large as AdamW's (arXiv 2502.16982)."""
    return 0.2 * math.sqrt(max(shape[-2:]))
