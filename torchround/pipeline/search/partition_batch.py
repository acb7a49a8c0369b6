"""Many partitions as arrays, one per row, and random moves of their stage boundaries.

Shapes: K partitions, S stages of the longest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchround.pipeline.partition import Partition

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]

# Most single layers that one move takes from a stage to another.
MOST_TRANSFERS = 3
# Shares of the moved partitions whose fused stage changes, that get a stage more, and that lose one.
FUSED_SHARE, SPLIT_SHARE, MERGE_SHARE = 0.1, 0.2, 0.2


@dataclass(frozen=True)
class Candidate:
    """A partition with its number of rounds."""

    partition: Partition
    rounds: int


@dataclass(frozen=True)
class PartitionBatch:
    """K partitions. `counts` [K, S]: layers per stage in dispatch order, 0 after a partition's last stage.

    `fused_at` [K]: position of the fused stage; forward stages come before it, backward stages after it.
    """

    counts: Integers
    fused_at: Integers

    def __len__(self) -> int:
        return len(self.counts)

    @property
    def num_stages(self) -> Integers:
        """Stages of each partition [K]."""
        return np.asarray(np.count_nonzero(self.counts, axis=1))

    def take(self, rows: Integers | Booleans) -> "PartitionBatch":
        """Select rows by their indices or by a boolean per row."""
        return PartitionBatch(self.counts[rows], self.fused_at[rows])

    def partition(self, row: int) -> Partition:
        """Convert one row."""
        counts, fused_at = self.counts[row].tolist(), int(self.fused_at[row])
        backward = [count for count in counts[fused_at + 1 :] if count]
        return Partition(tuple(counts[:fused_at]), counts[fused_at], tuple(backward))

    def has_gradients(self) -> Booleans:
        """Tell which stages are fused or backward [K, S]."""
        return np.asarray(np.arange(self.counts.shape[1]) >= self.fused_at[:, None])

    def is_backward(self) -> Booleans:
        """Tell which stages are backward [K, S]."""
        return np.asarray(np.arange(self.counts.shape[1]) > self.fused_at[:, None])

    def ranges(self, num_layers: int) -> tuple[Integers, Integers]:
        """Compute the first layer and the end of each stage, both [K, S]; both are 0 after the last stage.

        Along the dispatch order forward and fused stages end at the running sum of layers. Backward stages go
        down again from the split, where the running sum is L.
        """
        running = np.cumsum(self.counts, axis=1)
        fused = np.take_along_axis(self.counts, self.fused_at[:, None], axis=1)
        turned = 2 * num_layers - fused - running
        starts = np.where(self.is_backward(), turned, running - self.counts)
        return starts, starts + self.counts


def batch_of(partitions: Sequence[Partition]) -> PartitionBatch:
    """Convert partitions to the rows of a batch."""
    most = max((partition.num_stages for partition in partitions), default=0)
    counts = np.zeros((len(partitions), most), dtype=np.int64)
    for row, partition in enumerate(partitions):
        counts[row, : partition.num_stages] = (*partition.forward, partition.fused, *partition.backward)
    return PartitionBatch(
        counts, np.array([len(partition.forward) for partition in partitions], dtype=np.int64)
    )


def joined(batches: Sequence[PartitionBatch]) -> PartitionBatch:
    """Concatenate batches, padded to the longest partition."""
    most = max(batch.counts.shape[1] for batch in batches)
    counts = [np.pad(batch.counts, ((0, 0), (0, most - batch.counts.shape[1]))) for batch in batches]
    return PartitionBatch(np.concatenate(counts), np.concatenate([batch.fused_at for batch in batches]))


def moved(parents: PartitionBatch, random: np.random.Generator, most_stages: int) -> PartitionBatch:
    """Return a copy of each row with one to a few random moves.

    A move cuts a stage in two, joins two stages, changes the fused stage, or takes single layers from one
    stage to another of the same direction. All random numbers are drawn at once: few large numpy calls are
    what makes the search fast.
    """
    draw = random.random((5 + MOST_TRANSFERS, 2, len(parents)))
    kind, has_room = draw[0, 0], parents.num_stages < most_stages
    batch = _split(parents, (kind < SPLIT_SHARE) & has_room, draw[1])
    batch = _merge(batch, (kind >= SPLIT_SHARE) & (kind < SPLIT_SHARE + MERGE_SHARE), draw[2])
    _change_fused(batch, kind > 1 - FUSED_SHARE, draw[3], np.where(draw[0, 1] < 0.5, 1, -1))
    transfers = draw[4, 0] * (MOST_TRANSFERS + 1)
    for move in range(MOST_TRANSFERS):
        _transfer(batch, transfers > move, draw[5 + move])
    return batch


def _random_stage(batch: PartitionBatch, draw: Floats) -> tuple[Integers, Integers, Integers]:
    """Choose a stage [K] that is not the fused one; return it with its direction's first stage and end."""
    num_stages = batch.num_stages
    stage = np.minimum((draw * (num_stages - 1)).astype(np.int64), np.maximum(num_stages - 2, 0))
    # Skip the fused stage: the draw is over one stage fewer, and those from the fused one on move up by one.
    stage += stage >= batch.fused_at
    stage = np.minimum(stage, num_stages - 1)
    forward = stage < batch.fused_at
    return stage, np.where(forward, 0, batch.fused_at + 1), np.where(forward, batch.fused_at, num_stages)


def _transfer(batch: PartitionBatch, wanted: Booleans, draw: Floats) -> None:
    """Move one layer between two stages of the same direction, in place, if the first stage keeps a layer."""
    source, first, end = _random_stage(batch, draw[0])
    target = first + np.minimum((draw[1] * (end - first)).astype(np.int64), end - first - 1)
    row = np.flatnonzero(wanted & (source != batch.fused_at) & (batch.counts[_all(batch), source] > 1))
    batch.counts[row, source[row]] -= 1
    batch.counts[row, target[row]] += 1


def _split(batch: PartitionBatch, wanted: Booleans, draw: Floats) -> PartitionBatch:
    """Cut a stage in two in each wanted row whose chosen stage has two layers or more."""
    counts = np.pad(batch.counts, ((0, 0), (0, 1)))
    stage, _, _ = _random_stage(batch, draw[0])
    size = batch.counts[_all(batch), stage]
    legal = wanted & (stage != batch.fused_at) & (size > 1)
    # Every stage behind the cut moves one position back.
    position = np.arange(counts.shape[1])
    counts = np.take_along_axis(counts, position - (legal[:, None] & (position > stage[:, None])), axis=1)
    row = np.flatnonzero(legal)
    first = 1 + (draw[1] * (size - 1)).astype(np.int64)
    counts[row, stage[row]] = first[row]
    counts[row, stage[row] + 1] = (size - first)[row]
    return PartitionBatch(counts, batch.fused_at + (legal & (stage < batch.fused_at)))


def _merge(batch: PartitionBatch, wanted: Booleans, draw: Floats) -> PartitionBatch:
    """Join a stage with the next one of its direction in each wanted row that has a next one."""
    stage, _, end = _random_stage(batch, draw[0])
    legal = wanted & (stage != batch.fused_at) & (stage + 1 < end)
    size = batch.counts[_all(batch), stage]
    # Every stage from the chosen one on takes the place of
    # the one before; the chosen one's layers join the next.
    counts = np.pad(batch.counts, ((0, 0), (0, 1)))
    position = np.arange(batch.counts.shape[1])
    counts = np.take_along_axis(counts, position + (legal[:, None] & (position >= stage[:, None])), axis=1)
    row = np.flatnonzero(legal)
    counts[row, stage[row]] += size[row]
    return PartitionBatch(counts, batch.fused_at - (legal & (stage < batch.fused_at)))


def _change_fused(batch: PartitionBatch, wanted: Booleans, draw: Floats, change: Integers) -> None:
    """Give the fused stage a layer more or less, in place.

    One stage of each direction gives or gets that layer, because both directions cover the layers before the
    fused stage.
    """
    all_rows, backward_stages = _all(batch), batch.num_stages - 1 - batch.fused_at
    forward = (draw[0] * batch.fused_at).astype(np.int64)
    backward = np.minimum(
        batch.fused_at + 1 + (draw[1] * backward_stages).astype(np.int64), batch.counts.shape[1] - 1
    )
    smallest = np.minimum(batch.counts[all_rows, forward], batch.counts[all_rows, backward]) - change
    legal = wanted & (batch.fused_at > 0) & (smallest > 0)
    row = np.flatnonzero(legal & (batch.counts[all_rows, batch.fused_at] + change > 0))
    batch.counts[row, batch.fused_at[row]] += change[row]
    batch.counts[row, forward[row]] -= change[row]
    batch.counts[row, backward[row]] -= change[row]


def _all(batch: PartitionBatch) -> Integers:
    return np.arange(len(batch))
