"""Costs -> partition: which layers each stage holds, forward and backward split independently.

RoundPipe section 3.2: the forward ranges and the fused range cover all layers once; the fused range and the
backward ranges cover them once more, from the deepest layer to the first.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class StageKind(str, Enum):
    FORWARD = "forward"
    FUSED = "fused"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Stage:
    """Contiguous layers `start <= l < stop` that one device runs for all micro-batches of a round."""

    kind: StageKind
    start: int
    stop: int


class PartitionError(ValueError):
    """Ranges that do not cover every layer exactly once in each direction."""


@dataclass(frozen=True)
class Partition:
    """Layer counts per stage, in dispatch order.

    `forward`: layers of each forward stage, from layer 0. `fused`: layers of the fused stage, which ends at
    layer L. `backward`: layers of each further backward stage, from the deepest down to layer 0.
    `sum(forward) + fused = sum(backward) + fused = L`.
    """

    forward: tuple[int, ...]
    fused: int
    backward: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = (*self.forward, self.fused, *self.backward)
        if any(count < 1 for count in counts):
            raise PartitionError(f"every stage needs at least one layer, got {self}")
        if sum(self.forward) != sum(self.backward):
            raise PartitionError(
                f"forward stages hold {sum(self.forward)} layers before the fused stage, "
                f"backward stages {sum(self.backward)}; they must be equal"
            )

    @property
    def num_layers(self) -> int:
        return sum(self.forward) + self.fused

    @property
    def num_stages(self) -> int:
        return len(self.forward) + 1 + len(self.backward)

    def stages(self) -> tuple[Stage, ...]:
        """All stages in dispatch order: forward, fused, backward."""
        stages, start = [], 0
        for count in self.forward:
            stages.append(Stage(StageKind.FORWARD, start, start + count))
            start += count
        stages.append(Stage(StageKind.FUSED, start, start + self.fused))
        stop = start
        for count in self.backward:
            stages.append(Stage(StageKind.BACKWARD, stop - count, stop))
            stop -= count
        return tuple(stages)

    @staticmethod
    def from_lists(forward: Sequence[int], fused: int, backward: Sequence[int]) -> "Partition":
        return Partition(tuple(forward), fused, tuple(backward))
