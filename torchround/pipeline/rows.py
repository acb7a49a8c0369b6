"""Many partitions as arrays, one a row.

Shapes: K partitions, S stages of the one with most. `counts[k, i]` is how many layers the i-th dispatched
stage of partition k holds, 0 after its last; the fused stage is at `fused_at[k]`, forward stages before it,
backward ones after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchround.pipeline.partition import Partition

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Candidate:
    """A partition with its rounds."""

    partition: Partition
    rounds: int


@dataclass(frozen=True)
class Rows:
    """`counts` [K, S] layers per stage in dispatch order, `fused_at` [K] positions of the fused stages."""

    counts: Integers
    fused_at: Integers

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_stages(self) -> Integers:
        """Stages of each partition [K]."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    def take(self, rows: Integers | Mask) -> "Rows":
        """The rows at these indices, or where a mask is true."""
        return Rows(self.counts[rows], self.fused_at[rows])

    def partition(self, row: int) -> Partition:
        counts, fused_at = self.counts[row].tolist(), int(self.fused_at[row])
        backward = [count for count in counts[fused_at + 1 :] if count]
        return Partition(tuple(counts[:fused_at]), counts[fused_at], tuple(backward))

    def has_gradients(self) -> Mask:
        """Where the stage is fused or backward [K, S]."""
        return np.asarray(np.arange(self.counts.shape[1]) >= self.fused_at[:, None])

    def is_backward(self) -> Mask:
        """Where the stage is a backward one [K, S]."""
        return np.asarray(np.arange(self.counts.shape[1]) > self.fused_at[:, None])

    def ranges(self, num_layers: int) -> tuple[Integers, Integers]:
        """First layer and end of each stage, both [K, S]; 0 and 0 after the last.

        Counted along the dispatch order, forward and fused stages end at the running sum; backward ones go
        down again from the split, and the running sum is L at the split.
        """
        running = np.cumsum(self.counts, axis=1)
        fused = np.take_along_axis(self.counts, self.fused_at[:, None], axis=1)
        turned = 2 * num_layers - fused - running
        starts = np.where(self.is_backward(), turned, running - self.counts)
        return starts, starts + self.counts


def rows_of(partitions: Sequence[Partition]) -> Rows:
    """Partitions as rows."""
    most = max((partition.num_stages for partition in partitions), default=0)
    counts = np.zeros((len(partitions), most), dtype=np.int64)
    for row, partition in enumerate(partitions):
        counts[row, : partition.num_stages] = (*partition.forward, partition.fused, *partition.backward)
    return Rows(counts, np.array([len(partition.forward) for partition in partitions], dtype=np.int64))


def joined(parts: Sequence[Rows]) -> Rows:
    """Rows one after the other."""
    most = max(part.counts.shape[1] for part in parts)
    counts = [np.pad(part.counts, ((0, 0), (0, most - part.counts.shape[1]))) for part in parts]
    return Rows(np.concatenate(counts), np.concatenate([part.fused_at for part in parts]))
