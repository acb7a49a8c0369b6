"""What an optimizer takes of the host: bytes that it keeps for a trained parameter, and bytes that an update moves.

The run makes these numbers from its optimizer, state format and update mode. This room knows no optimizer.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchround.planning.update_modes import mode_of

# The type in which devices compute for updates.
JOB_DTYPE, JOB_ELEMENT_BYTES = "bfloat16", 2
# An fp32 weight, and the residual of a 16-bit device weight.
FULL_WEIGHT_BYTES, RESIDUAL_BYTES = 4, 2
# Bands of a symmetric product. Fewer rows would fill a device badly, and edges are those of its tiles. More bands would
# save little: 5 save 2/5 of a product, and no number saves more than half. docs/optimizers.md has what they save here.
LEAST_BAND_ROWS, MOST_BANDS, BAND_EDGE_ROWS = 512, 5, 128
# Matrices of a stack go up together, up to this number of elements; a larger matrix goes alone.
PIECE_ELEMENTS = 16 * 2**20
# A sum over rounds is read and written in fp32 for each round.
SUM_TRAFFIC_BYTES = 8


def row_bands(rows: int) -> list[tuple[int, int]]:
    """Cut the rows of a symmetric product into bands, each computed up to its last row's diagonal, and mirrored."""
    count = max(min(rows // LEAST_BAND_ROWS, MOST_BANDS), 1)
    edges = [round(rows * band / count / BAND_EDGE_ROWS) * BAND_EDGE_ROWS for band in range(count)]
    return list(pairwise([*edges, rows]))


def newton_schulz_flops(shape: Sequence[int], steps: int) -> float:
    """Count the products that orthogonalise a matrix, or each of a stack of matrices [E, m, n].

    With m the shorter side, a step computes `X X^T` (2 m^2 n), its square (2 m^3), and their sum times X (2 m^2 n). The
    first two are symmetric, and only the `row_bands` of them are computed.
    """
    short, long = sorted(shape[-2:])
    banded = sum((stop - start) * stop for start, stop in row_bands(short))
    return math.prod(shape[:-2]) * steps * 2.0 * (banded * (long + short) + short**2 * long)


def piece_elements(shape: Sequence[int]) -> int:
    *stack, rows, columns = shape
    return rows * columns * min(max(PIECE_ELEMENTS // (rows * columns), 1), math.prod(stack))


def slot_bytes(shape: Sequence[int]) -> int:
    return 2 * 2 * piece_elements(shape)


def scratch_bytes(shape: Sequence[int]) -> int:
    """Count the bytes for the products of a parameter of `shape`: bf16 tensors of its largest piece.

    Three have the size of the piece: two results and a transposed copy. Two are squares of the shorter side.
    """
    elements, (short, long) = piece_elements(shape), sorted(shape[-2:])
    squares = elements // (short * long) * short * short
    return 2 * (3 * elements + 2 * squares)


@dataclass(frozen=True)
class RuleCosts:
    """Host memory of one update rule, in bytes per trained parameter.

    - `value_bytes`: the values that it keeps, in their state format, scales included.
    - `direction_bytes`: the direction that devices compute; 0 for a rule that uses none.
    """

    value_bytes: float
    direction_bytes: float = 0.0


@dataclass(frozen=True)
class UpdateCosts:
    """What the optimizer of a run keeps in host memory, and what its updates move.

    - `rules`: one for each update rule of the model's trained parameters. `BundleCount.by_rule` counts the parameters of
      each.
    - `splits_weights`: whether weights are kept as 16-bit device weights and residuals under modes that allow it.
    - `predicts`: whether modes that can predict write predicted device weights. These are no part of the weight, so fp32 is kept.
    - `smaller`: what other settings of the optimizer would cost, each by the change of the config that makes them. They keep
      less for some parameters at least.
    """

    rules: tuple[RuleCosts, ...]
    splits_weights: bool = False
    predicts: bool = False
    smaller: tuple[tuple[str, "UpdateCosts"], ...] = ()

    def is_split(self, update: str) -> bool:
        return self.splits_weights and mode_of(update).with_prediction(self.predicts).splits_weights

    def state_bytes(self, counts: Sequence[int], update: str) -> int:
        """Return what the optimizer keeps, weights beside the device weights included; `counts` are parameters by rule."""
        each = RESIDUAL_BYTES if self.is_split(update) else FULL_WEIGHT_BYTES
        per_rule = (each + rule.value_bytes + rule.direction_bytes for rule in self.rules)
        return round(sum(count * nbytes for count, nbytes in zip(counts, per_rule, strict=False)))

    def saved_bytes(self, counts: Sequence[int]) -> int:
        """Count a checkpoint's bytes of newest weights (split ones: 4 bytes too) and of values. Directions are not saved."""
        per_rule = (FULL_WEIGHT_BYTES + rule.value_bytes for rule in self.rules)
        return round(sum(count * nbytes for count, nbytes in zip(counts, per_rule, strict=False)))

    def traffic_bytes(
        self, counts: Sequence[int], update: str, element_bytes: int, gradient_bytes: int
    ) -> float:
        """Return the host memory traffic of one update; `counts` are parameters by rule.

        The gradient is read. Weights and values are read and written, device weights written. Split weights are read from
        the device weights. A rule with a direction writes what devices need from gradient and values first, and
        reads the direction later.
        """
        split = self.is_split(update)
        weight = 2 * (element_bytes + RESIDUAL_BYTES) if split else 2 * FULL_WEIGHT_BYTES + element_bytes
        total = 0.0
        for count, rule in zip(counts, self.rules, strict=False):
            moved = gradient_bytes + weight + 2 * rule.value_bytes
            if rule.direction_bytes:
                moved += gradient_bytes + rule.value_bytes + 2 * rule.direction_bytes
            total += count * moved
        return total

    def adding_share(
        self, counts: Sequence[int], update: str, element_bytes: int, gradient_bytes: int
    ) -> float:
        """Return the traffic of adding up one round's gradients on the host, as a share of an update's traffic."""
        traffic = self.traffic_bytes(counts, update, element_bytes, gradient_bytes)
        return sum(counts) * (gradient_bytes + SUM_TRAFFIC_BYTES) / traffic if traffic else 0.0
