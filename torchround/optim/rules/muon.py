"""Muon: momentum whose matrices are orthogonalised before they are applied (Jordan et al. 2024).

The host keeps the momentum. A step's look-ahead goes to the devices in bf16, and comes back as a direction with
singular values near 1 (`orthogonalised`, which `engine/worker/orthogonalise.py` runs there). Then one pass updates momentum
and weight. The numbers are `torch.optim.Muon`'s. Each operation is rounded on its own, so that the compiled pass gives the
same bits. Only large symmetric products round differently: they are computed in bands of rows.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchround.config.optimizer_tables import MuonTable
from torchround.optim.formats import StateValue
from torchround.optim.optimizer import Optimizer, ParameterFacts, Tensors, UpdateRule
from torchround.optim.rules.adamw import AdamWRule
from torchround.planning.update_costs import piece_elements, row_bands

# The polynomial of one step, a X + b (X X^T) X + c (X X^T)^2 X (kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# A matrix of zeros is divided by this in place of its norm.
LEAST_NORM = 1e-7

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


def orthogonalised(matrices: Tensor) -> Tensor:
    """Compute bf16 matrices whose singular values are all near 1, with the same singular vectors.

    `matrices` are `[n, rows, columns]`, or a single one. Each is divided by its Frobenius norm and goes through five
    Newton-Schulz steps. Tall ones are transposed before and after, so that the products are of the shorter side.
    """
    if matrices.ndim == 3 and matrices.device.type == "cpu":
        # One by one: a batched product may add in another order, and then experts would not equal single matrices.
        return torch.stack([orthogonalised(matrix) for matrix in matrices])
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    matrix = matrices.bfloat16()
    matrix = matrix.mT if is_tall else matrix
    norm = matrix.norm() if matrix.ndim == 2 else matrix.flatten(1).norm(dim=1)[:, None, None]
    matrix = iterated(matrix / norm.clamp(min=LEAST_NORM))
    return matrix.mT if is_tall else matrix


def iterated(matrix: Tensor) -> Tensor:
    """Apply the five steps to a matrix `[rows, columns]` of norm 1, or a batch of them, in its own dtype.

    Two of a step's three products are symmetric: of many rows only the bands under the diagonal are computed.
    """
    a, b, c = COEFFICIENTS
    is_batch = matrix.ndim == 3
    multiply, multiply_add = (torch.bmm, torch.baddbmm) if is_batch else (torch.mm, torch.addmm)
    rows = matrix.shape[-2]
    gram, polynomial = (matrix.new_empty(*matrix.shape[:-1], rows) for _ in range(2))
    for _ in range(STEPS):
        for start, stop in row_bands(rows):
            band = gram[..., start:stop, :stop]
            multiply(matrix[..., start:stop, :], matrix[..., :stop, :].mT, out=band)
            gram[..., :start, start:stop] = band[..., :start].mT
        for start, stop in row_bands(rows):
            band, rows_of_gram = polynomial[..., start:stop, :stop], gram[..., start:stop, :]
            multiply_add(rows_of_gram[..., :stop], rows_of_gram, gram[..., :stop], beta=b, alpha=c, out=band)
            polynomial[..., :start, start:stop] = band[..., :start].mT
        matrix = multiply_add(matrix, polynomial, matrix, beta=a)
    return matrix


def pieces(flat: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """Cut a parameter of `shape`, a matrix or a stack of them, in flat memory into pieces `[n, rows, columns]`."""
    for piece in flat.split(piece_elements(shape)):
        yield piece.view(-1, *shape[-2:])
