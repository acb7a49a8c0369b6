"""Step times of many partitions at once, for ranking: the recurrence of `step_time.py` over numpy arrays.

These step times are never above the exact ones, because two delays are left out: waits of recomputations for
their boundaries, and old lines beyond `LINES`. So the search ranks and stops by them, and proves its choice
with `step_time.py`.

Shapes: K partitions, in order of falling numbers of stages; S stages of the first; N devices; U starting
states.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torchround.pipeline.search.partition_batch import Floats, Integers

# Lines kept at each stage. With 6, the figures of 1920 partitions near the best of three models were all
# exact; with 4, three were not.
LINES = 6
NEVER = float("-inf")


@dataclass(frozen=True)
class BatchTimes:
    """Entry, total and updated-after seconds of each stage, each [S, K] (see `StageTimes`); `num_stages` [K]."""

    entry_s: Floats
    total_s: Floats
    updated_s: Floats
    num_stages: Integers


def batch_sync_seconds(times: BatchTimes, sizes: Sequence[int], num_devices: int) -> Floats:
    """Compute the seconds of a step from idle devices to idle devices [K]."""
    free = np.zeros((num_devices, len(times.num_stages), 1))
    return np.asarray(_run_step(times, sizes, free, np.zeros((len(times.num_stages), 1))).max(axis=(0, 2)))


def batch_async_seconds(times: BatchTimes, sizes: Sequence[int], num_devices: int) -> Floats:
    """Compute the seconds per step [K] in the steady state.

    The state is the times at which each device becomes free and the last two updates start. A step maps it
    linearly in the (max, +) algebra. One run from all N + 2 unit states gives the matrix, and the matrix
    gives the growth per step.
    """
    candidates, states = len(times.num_stages), num_devices + 2
    unit = np.full((states, candidates, states), NEVER)
    unit[np.arange(states), :, np.arange(states)] = 0.0
    free, last_update, update_before = unit[:num_devices], unit[num_devices], unit[num_devices + 1]
    free = _run_step(times, sizes, free, update_before)
    update_s = times.updated_s.max(axis=0)[:, None]
    update = np.maximum(free.max(axis=0), last_update + update_s)
    return _largest_cycle_means(np.concatenate([free, update[None], last_update[None]]))


def _largest_cycle_means(after: Floats) -> Floats:
    """Apply Karp's theorem to all K matrices (see `step_time.py`); `after[i, k, j]` is the edge from j to i."""
    edges = np.ascontiguousarray(after.transpose(2, 1, 0))  # [from, K, to]: the maximum runs over whole rows
    n = len(edges)
    heaviest = [np.zeros(edges.shape[1:])]
    for _ in range(n):
        heaviest.append((edges + heaviest[-1].T[:, :, None]).max(axis=0))
    lengths = np.arange(n, 0, -1)[:, None, None]
    reached = np.isfinite(np.array(heaviest))
    with np.errstate(invalid="ignore"):
        means = (heaviest[n] - np.array(heaviest[:n])) / lengths
    means = np.where(reached[:n], means, np.inf).min(axis=0)
    return np.asarray(np.where(reached[n], means, -np.inf).max(axis=1))


def _run_step(times: BatchTimes, sizes: Sequence[int], free: Floats, update_start_s: Floats) -> Floats:
    """Run one step: from the times `free` [N, K, U] at which the devices of the next slots are free to those after it.

    Stage i starts no earlier than `update_start_s` [K, U] plus its updated-after seconds. Partitions with
    fewer stages have the last columns, so slicing them off leaves the partitions that have a stage.
    """
    num_devices = len(free)
    free = free.copy()
    entry_s, total_s, updated_s = (
        array[:, :, None] for array in (times.entry_s, times.total_s, times.updated_s)
    )
    waits = bool(times.updated_s.any() or update_start_s.any())
    stages = np.arange(len(times.total_s))[:, None]
    counts = (times.num_stages > stages).sum(axis=1).tolist()
    # After S stages the device of slot S comes first: each
    # partition's devices turn by its own number of stages.
    turned = (np.arange(num_devices)[:, None] + times.num_stages) % num_devices
    turned = np.broadcast_to(turned[:, :, None], free.shape)
    for size in sizes:
        lines = _Lines(free.shape[1:], size - 1)
        for stage, count in enumerate(counts):
            lines.narrow(count)
            device = free[stage % num_devices, :count]
            start = device
            if waits:
                start = np.maximum(device, update_start_s[:count] + updated_s[stage, :count])
            lines.add_stage(start, entry_s[stage, :count], total_s[stage, :count], device)
        free = np.take_along_axis(free, turned, axis=0)
    return free


class _Lines:
    """The lines of `step_time.py` for K x U cases, as arrays [1 + LINES, K, U].

    Lines 1 to LINES are the newest ones. Line 0 stands for all older ones: it is the one whose last
    micro-batch left latest when it was replaced. Planning spends its time here, hence few numpy calls on
    large arrays.
    """

    def __init__(self, shape: tuple[int, ...], last: int) -> None:
        self.last, self.stage = last, 0
        self.bases = np.full((1 + LINES, *shape), NEVER)
        self.slopes, self.ends = np.zeros_like(self.bases), np.full_like(self.bases, NEVER)

    def narrow(self, count: int) -> None:
        """Keep the first `count` of the K cases."""
        if count < self.bases.shape[1]:
            self.bases, self.slopes = self.bases[:, :count], self.slopes[:, :count]
            self.ends = self.ends[:, :count]

    def add_stage(self, start: Floats, entry_s: Floats, total_s: Floats, end: Floats) -> None:
        """Add a stage whose device may start at `start`; write the end of its last micro-batch into `end`."""
        newest = 1 + self.stage % LINES
        if self.stage:
            if self.stage >= LINES:
                later = self.ends[newest] > self.ends[0]
                np.copyto(self.bases[0], self.bases[newest], where=later)
                np.copyto(self.slopes[0], self.slopes[newest], where=later)
            # A micro-batch passes the stage in `entry_s`, and no faster in a row than `total_s` each.
            self.bases += entry_s
            np.maximum(self.slopes, total_s, out=self.slopes)
        np.add(start, total_s, out=self.bases[newest])
        self.slopes[newest] = total_s
        np.multiply(self.slopes, self.last, out=self.ends)
        self.ends += self.bases
        self.ends.max(axis=0, out=end)
        self.stage += 1
