"""One planning problem: what many partitions take, for ranking, and what one takes, exactly."""

from collections.abc import Callable
from typing import Any

import numpy as np

from torchround.pipeline.batch_time import (
    BatchTimes,
    batch_async_seconds,
    batch_sync_seconds,
)
from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits, device_memory
from torchround.pipeline.memory_table import MemoryTable
from torchround.pipeline.partition import Partition
from torchround.pipeline.rows import Candidate, Floats, Integers, Mask, Rows, rows_of
from torchround.pipeline.schedule import split_evenly
from torchround.pipeline.stage_times import LayerSums
from torchround.pipeline.step_time import step_seconds

# Adding a round on the host moves 10 bytes per trained parameter (a 2-byte gradient, a float32 sum read and
# written), an update 28 (FIGURES section 4).
ADDING_SHARE = 10 / 28
# Partitions timed in one go: few enough for their lines to stay in the processor's cache.
CHUNK = 1024
# Step times closer than this share are equal; of equal plans the one with fewer rounds and stages is taken.
SAME_STEP = 1e-9


class Problem:
    """Costs, devices, micro-batches, update mode and limits."""

    def __init__(
        self, costs: Costs, num_devices: int, num_micro_batches: int, update: str, limits: MemoryLimits
    ) -> None:
        self.costs, self.limits, self.update = costs, limits, update
        self.num_devices, self.num_micro_batches = num_devices, num_micro_batches
        self.num_layers = costs.num_layers
        self.sums = LayerSums(costs, limits.recompute)
        self.forward_s = np.array(self.sums.forward_s)
        self.backward_s = np.array(self.sums.backward_s)
        self.updated_s = np.array(self.sums.updated_s)
        self.both_s: list[float] = (self.forward_s + self.backward_s).tolist()
        self.memory = MemoryTable(costs, limits)
        self.first_layers, self.last_ends = self.memory.first_layers(), self.memory.last_ends()
        self.idle_weight = 0.0
        self._exact: dict[Candidate, float] = {}

    def sizes(self, rounds: int) -> list[int]:
        """Micro-batches of each round."""
        return [len(part) for part in split_evenly(self.num_micro_batches, rounds)]

    def exact_s(self, candidate: Candidate) -> float:
        """The step time by the exact recurrence, computed once for each candidate."""
        if candidate not in self._exact:
            partition, devices = candidate.partition, self.num_devices
            times = self.sums.times(partition.forward, partition.fused, partition.backward)
            step_s = step_seconds(times, devices, self.num_micro_batches, candidate.rounds, self.update)
            self._exact[candidate] = max(step_s, self.host_s(candidate.rounds))
        return self._exact[candidate]

    def rank_s(self, candidate: Candidate) -> float:
        """What the search makes small: the step time, and `idle_weight` of a device's idle time in it."""
        step_s = self.exact_s(candidate)
        if not self.idle_weight:
            return step_s
        partition = candidate.partition
        times = self.sums.times(partition.forward, partition.fused, partition.backward)
        return self._with_idle(step_s, sum(times.total_s))

    def _with_idle(self, step_s: Any, micro_batch_s: Any) -> Any:
        busy_s = micro_batch_s * self.num_micro_batches / self.num_devices
        return step_s + self.idle_weight * (step_s - busy_s)

    def host_s(self, rounds: int) -> float:
        """Seconds of host memory traffic per step, if its rounds are added up there (DESIGN section 4)."""
        return self.sums.updated_s[-1] * (1 + rounds * ADDING_SHARE) if rounds > 1 else 0.0

    def better(self, one: Candidate | None, other: Candidate) -> Candidate:
        """The one of lower rank; of equals the one with fewer rounds, then fewer stages, then the first."""
        if one is None:
            return other
        one_s, other_s = self.rank_s(one), self.rank_s(other)
        if abs(one_s - other_s) > SAME_STEP * max(one_s, other_s):
            return one if one_s < other_s else other
        simple = [(c.rounds, c.partition.num_stages) for c in (one, other)]
        return other if simple[1] < simple[0] else one

    def fits_limits(self, candidate: Candidate) -> bool:
        """Whether this candidate keeps within the memory limits."""
        return bool(self.fits(rows_of([candidate.partition]), candidate.rounds)[0])

    def fits_device(self, partition: Partition, rounds: int) -> bool:
        """Whether the device limit alone would allow this partition."""
        limit, size = self.limits.device_bytes, -(-self.num_micro_batches // rounds)
        needed = device_memory(partition, self.costs, size, self.limits).total_bytes
        return limit is None or needed <= limit

    def fits(self, rows: Rows, rounds: int) -> Mask:
        """Which rows [K] keep within the memory limits."""
        return self.memory.fits(rows, self.num_devices, self.num_micro_batches, rounds, self.update)

    def estimate_s(self, rows: Rows, rounds: int) -> Floats:
        """Ranks [K], never above the exact ones."""
        batch_seconds = batch_sync_seconds if self.update == "sync" else batch_async_seconds
        sizes, host_s = self.sizes(rounds), self.host_s(rounds)

        def rank_s(times: BatchTimes) -> Floats:
            step_s = np.maximum(batch_seconds(times, sizes, self.num_devices), host_s)
            return np.asarray(self._with_idle(step_s, times.total_s.sum(axis=0)))

        return self._in_order_of_stages(rows, rank_s)

    def _in_order_of_stages(self, rows: Rows, seconds: Callable[[BatchTimes], Floats]) -> Floats:
        """`seconds` with the partitions of most stages first, as `batch_time.py` wants them."""
        num_stages = rows.num_stages
        order = np.argsort(-num_stages, kind="stable")
        result = np.empty(len(rows))
        for first in range(0, len(rows), CHUNK):
            part = order[first : first + CHUNK]
            result[part] = seconds(self._times(rows.take(part), num_stages[part]))
        return result

    def _times(self, rows: Rows, num_stages: Integers) -> BatchTimes:
        """Stage times of all rows; equal to `LayerSums.times` row by row."""
        starts, stops = rows.ranges(self.num_layers)
        forward_s = self.forward_s[stops] - self.forward_s[starts]
        after_s = self.backward_s[stops] - self.backward_s[starts]
        if self.limits.recompute == "layer":
            after_s = after_s + self.forward_s[stops - 1] - self.forward_s[starts]
        total_s = forward_s + np.where(rows.has_gradients(), after_s, 0.0)
        entry_s = np.where(rows.is_backward(), after_s, total_s) + self.sums.hop_s
        return BatchTimes(
            np.ascontiguousarray(entry_s.T),
            np.ascontiguousarray(total_s.T),
            np.ascontiguousarray(self.updated_s[stops].T),
            num_stages,
        )
