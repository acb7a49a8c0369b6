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
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class Candidate:
    """A partition with its rounds."""

    partition: Partition
    rounds: int


@dataclass(frozen=True)
class PartitionBatch:
    """`counts` [K, S] layers per stage in dispatch order, `fused_at` [K] positions of the fused stages."""

    counts: Integers
    fused_at: Integers

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_stages(self) -> Integers:
        """Stages of each partition [K]."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    def take(self, rows: Integers | Booleans) -> "PartitionBatch":
        """The rows at these indices, or where a mask is true."""
        return PartitionBatch(self.counts[rows], self.fused_at[rows])

    def partition(self, row: int) -> Partition:
        counts, fused_at = self.counts[row].tolist(), int(self.fused_at[row])
        backward = [count for count in counts[fused_at + 1 :] if count]
        return Partition(tuple(counts[:fused_at]), counts[fused_at], tuple(backward))

    def has_gradients(self) -> Booleans:
        """Where the stage is fused or backward [K, S]."""
        return np.asarray(np.arange(self.counts.shape[1]) >= self.fused_at[:, None])

    def is_backward(self) -> Booleans:
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


def rows_of(partitions: Sequence[Partition]) -> PartitionBatch:
    """Partitions as rows."""
    most = max((partition.num_stages for partition in partitions), default=0)
    counts = np.zeros((len(partitions), most), dtype=np.int64)
    for row, partition in enumerate(partitions):
        counts[row, : partition.num_stages] = (*partition.forward, partition.fused, *partition.backward)
    return PartitionBatch(
        counts, np.array([len(partition.forward) for partition in partitions], dtype=np.int64)
    )


def joined(parts: Sequence[PartitionBatch]) -> PartitionBatch:
    """PartitionBatch one after the other."""
    most = max(part.counts.shape[1] for part in parts)
    counts = [np.pad(part.counts, ((0, 0), (0, most - part.counts.shape[1]))) for part in parts]
    return PartitionBatch(np.concatenate(counts), np.concatenate([part.fused_at for part in parts]))


# Random moves of stage boundaries, one partition a row, for the local search.
#
# A move takes a layer from one stage and gives it to another of the same direction, cuts a stage in two, joins
# two, or changes the fused stage.
#
# Shapes: K partitions, S stages of the one with most.


MOST_TRANSFERS = 3
# Shares of the children whose fused stage is changed, which get a stage more, and which lose one.
FUSED_SHARE, SPLIT_SHARE, MERGE_SHARE = 0.1, 0.2, 0.2


def moved(parents: PartitionBatch, random: np.random.Generator, most_stages: int) -> PartitionBatch:
    """Each row with one to a few random moves."""
    draw = random.random((5 + MOST_TRANSFERS, 2, len(parents)))
    kind, room = draw[0, 0], parents.num_stages < most_stages
    rows = _split(parents, (kind < SPLIT_SHARE) & room, draw[1])
    rows = _merge(rows, (kind >= SPLIT_SHARE) & (kind < SPLIT_SHARE + MERGE_SHARE), draw[2])
    _change_fused(rows, kind > 1 - FUSED_SHARE, draw[3], np.where(draw[0, 1] < 0.5, 1, -1))
    transfers = draw[4, 0] * (MOST_TRANSFERS + 1)
    for move in range(MOST_TRANSFERS):
        _transfer(rows, transfers > move, draw[5 + move])
    return rows


def _random_stage(rows: PartitionBatch, draw: Floats) -> tuple[Integers, Integers, Integers]:
    """A random stage [K] that is not the fused one, and its direction's first stage and end."""
    num_stages = rows.num_stages
    stage = np.minimum((draw * (num_stages - 1)).astype(np.int64), np.maximum(num_stages - 2, 0))
    stage += stage >= rows.fused_at
    stage = np.minimum(stage, num_stages - 1)
    forward = stage < rows.fused_at
    return stage, np.where(forward, 0, rows.fused_at + 1), np.where(forward, rows.fused_at, num_stages)


def _transfer(rows: PartitionBatch, wanted: Booleans, draw: Floats) -> None:
    """Move one layer between two stages of the same direction, in place, where a layer stays behind."""
    source, first, end = _random_stage(rows, draw[0])
    target = first + np.minimum((draw[1] * (end - first)).astype(np.int64), end - first - 1)
    row = np.flatnonzero(wanted & (source != rows.fused_at) & (rows.counts[_all(rows), source] > 1))
    rows.counts[row, source[row]] -= 1
    rows.counts[row, target[row]] += 1


def _split(rows: PartitionBatch, wanted: Booleans, draw: Floats) -> PartitionBatch:
    """Cut a stage in two where wanted and possible."""
    counts = np.pad(rows.counts, ((0, 0), (0, 1)))
    stage, _, _ = _random_stage(rows, draw[0])
    size = rows.counts[_all(rows), stage]
    legal = wanted & (stage != rows.fused_at) & (size > 1)
    position = np.arange(counts.shape[1])
    counts = np.take_along_axis(counts, position - (legal[:, None] & (position > stage[:, None])), axis=1)
    row = np.flatnonzero(legal)
    first = 1 + (draw[1] * (size - 1)).astype(np.int64)
    counts[row, stage[row]] = first[row]
    counts[row, stage[row] + 1] = (size - first)[row]
    return PartitionBatch(counts, rows.fused_at + (legal & (stage < rows.fused_at)))


def _merge(rows: PartitionBatch, wanted: Booleans, draw: Floats) -> PartitionBatch:
    """Join a stage with the next one of its direction where wanted and possible."""
    stage, _, end = _random_stage(rows, draw[0])
    legal = wanted & (stage != rows.fused_at) & (stage + 1 < end)
    size = rows.counts[_all(rows), stage]
    counts = np.pad(rows.counts, ((0, 0), (0, 1)))
    position = np.arange(rows.counts.shape[1])
    counts = np.take_along_axis(counts, position + (legal[:, None] & (position >= stage[:, None])), axis=1)
    row = np.flatnonzero(legal)
    counts[row, stage[row]] += size[row]
    return PartitionBatch(counts, rows.fused_at - (legal & (stage < rows.fused_at)))


def _change_fused(rows: PartitionBatch, wanted: Booleans, draw: Floats, change: Integers) -> None:
    """Give the fused stage a layer more or less, in place, at the cost or gain of one stage each way."""
    all_rows, backward_stages = _all(rows), rows.num_stages - 1 - rows.fused_at
    forward = (draw[0] * rows.fused_at).astype(np.int64)
    backward = np.minimum(
        rows.fused_at + 1 + (draw[1] * backward_stages).astype(np.int64), rows.counts.shape[1] - 1
    )
    smallest = np.minimum(rows.counts[all_rows, forward], rows.counts[all_rows, backward]) - change
    legal = wanted & (rows.fused_at > 0) & (smallest > 0)
    row = np.flatnonzero(legal & (rows.counts[all_rows, rows.fused_at] + change > 0))
    rows.counts[row, rows.fused_at[row]] += change[row]
    rows.counts[row, forward[row]] -= change[row]
    rows.counts[row, backward[row]] -= change[row]


def _all(rows: PartitionBatch) -> Integers:
    return np.arange(len(rows))
