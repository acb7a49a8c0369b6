"""One planning problem: estimated step times of many partitions, the exact one of each, and which fit into memory.

Shapes: K partitions, S stages, L layers.
"""

from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits, device_memory
from torchround.pipeline.partition import KeptNames, Partition, split_evenly
from torchround.pipeline.pool_count import PoolCount
from torchround.pipeline.search.batch_time import BatchTimes, batch_async_seconds, batch_sync_seconds
from torchround.pipeline.search.host_table import HostTable
from torchround.pipeline.search.memory_table import MemoryTable, StageLimits
from torchround.pipeline.search.partition_batch import (
    Booleans,
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    batch_of,
)
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds
from torchround.pipeline.simulation.kept_link import KeptLink, LinkWaits
from torchround.pipeline.simulation.step_time import LayerSums, StageTimes, step_seconds

# Partitions timed together: few enough for their arrays to stay in the processor's cache.
CHUNK = 1024
# Step times closer than this share count as equal; among equals the plan with fewer rounds and stages wins.
SAME_STEP = 1e-9


class PlanningProblem:
    """A question to the planner: layer costs, devices, micro-batches, update mode and memory limits.

    - `idle_weight`: what a second of a device's idle time adds to a plan's rank, in seconds.
    - `link`: the link of each device to the host; None takes all transfers as hidden.
    - `stale_layers`: the number in `bounded`, K. None leaves it open: each plan is timed with all layers before its
      fused stage stale, and its host memory is counted with none. So no K makes it faster or smaller.
    """

    def __init__(
        self,
        costs: Costs,
        num_devices: int,
        num_micro_batches: int,
        update: str,
        limits: MemoryLimits,
        stale_layers: int | None = 0,
        link: KeptLink | None = None,
    ) -> None:
        self.whole_costs = costs
        if stale_layers and costs.kept:
            # What the forward of a stale layer has made is of older weights than its backward computes with.
            costs = costs.keeping(
                [names if layer >= stale_layers else () for layer, names in enumerate(costs.kept)]
            )
        self.costs, self.limits, self.update, self.link = costs, limits, update, link
        self.stale_layers = stale_layers
        self.num_devices, self.num_micro_batches = num_devices, num_micro_batches
        self.num_layers = costs.num_layers
        waits = None
        if link is not None:
            waits = LinkWaits(costs, link, limits.recompute, num_micro_batches)
        self.sums = LayerSums(costs, limits.recompute, waits)
        self.forward_s = np.array(self.sums.forward_s)
        self.recompute_s = np.array(self.sums.recompute_s)
        self.backward_s = np.array(self.sums.backward_s)
        self.updated_s = np.array(self.sums.updated_s)
        # Running sums of whole stages: a fused one computes all, a backward one skips what is kept.
        self.fused_s: list[float] = (self.forward_s + self.backward_s).tolist()
        self.both_s: list[float] = (self.recompute_s + self.backward_s).tolist()
        self._pool: PoolCount | None = None
        self.idle_weight = 0.0
        self._exact: dict[Candidate, float] = {}

    # What is not asked of every problem: the choice of what to keep makes dozens of them.

    @cached_property
    def memory(self) -> MemoryTable:
        """Device memory of many partitions."""
        return MemoryTable(self.costs, self.limits, self.stale_layers or 0)

    @cached_property
    def host(self) -> HostTable:
        """Host memory of many partitions."""
        sizes = self.num_devices, self.num_micro_batches, self.update, self.stale_layers or 0
        return HostTable(self.costs, self.limits, *sizes, self._pool)

    @cached_property
    def widest(self) -> StageLimits:
        """How far a stage may reach next to the smallest layer."""
        return self.memory.stage_limits(even=False)

    @cached_property
    def even(self) -> StageLimits:
        """How far stages of about the same size may reach."""
        return self.memory.stage_limits(even=True)

    def sizes(self, rounds: int) -> list[int]:
        """Return the number of micro-batches of each round."""
        return [len(part) for part in split_evenly(self.num_micro_batches, rounds)]

    def exact_s(self, candidate: Candidate) -> float:
        """Compute the step time by the exact recurrence, once for each candidate."""
        # The search meets the same candidate in several generations, and again at the end.
        if candidate not in self._exact:
            step_s = self._step_s(candidate)
            host_s = self.sums.host_s(candidate.rounds, candidate.partition)
            self._exact[candidate] = max(step_s, host_s, self.num_micro_batches * self.costs.launch_s)
        return self._exact[candidate]

    def _step_s(self, candidate: Candidate) -> float:
        partition, devices = candidate.partition, self.num_devices
        if self.update == "bounded":
            stale = self.num_layers if self.stale_layers is None else self.stale_layers
            return bounded_step_seconds(self.sums, partition, stale, devices, self.num_micro_batches)
        times = self._stage_times(candidate)
        return step_seconds(times, devices, self.num_micro_batches, candidate.rounds, self.update)

    def with_stale_layers(self, stale_layers: int) -> "PlanningProblem":
        """Return the same problem with this number of stale layers."""
        return self._with(self.whole_costs, stale_layers)

    def busy_s(self, candidate: Candidate) -> float:
        """Compute the seconds that all devices together are busy with a step, or wait for the link."""
        return self.num_micro_batches * sum(self._stage_times(candidate).total_s) + self.costs.job_s

    def keeping(self, kept: KeptNames) -> "PlanningProblem":
        """Return the same problem with these activations kept."""
        problem = self._with(self.whole_costs.keeping(kept), self.stale_layers)
        problem._pool = self.host.pool  # its tables do not depend on what is kept
        return problem

    def _with(self, costs: Costs, stale_layers: int | None) -> "PlanningProblem":
        question = costs, self.num_devices, self.num_micro_batches, self.update, self.limits
        return PlanningProblem(*question, stale_layers, self.link)

    @property
    def overlap(self) -> str:
        """The mode whose plans are like those of this problem: `bounded` overlaps steps if any layer is stale."""
        if self.update != "bounded":
            return self.update
        return "sync" if self.stale_layers == 0 else "async"

    def rank_s(self, candidate: Candidate) -> float:
        """Compute what the search minimises: the step time plus `idle_weight` times a device's idle time in it."""
        step_s = self.exact_s(candidate)
        if not self.idle_weight:
            return step_s
        return self._with_idle(step_s, sum(self._stage_times(candidate).total_s))

    def _stage_times(self, candidate: Candidate) -> StageTimes:
        partition = candidate.partition
        return self.sums.times(
            partition.forward, partition.fused, partition.backward, rounds=candidate.rounds
        )

    def _with_idle(self, step_s: Any, micro_batch_s: Any) -> Any:
        busy_s = micro_batch_s * self.num_micro_batches / self.num_devices
        return step_s + self.idle_weight * (step_s - busy_s)

    def better(self, one: Candidate | None, other: Candidate) -> Candidate:
        """Return the candidate of lower rank; among equals the one with fewer rounds, then fewer stages, then `one`."""
        if one is None:
            return other
        one_s, other_s = self.rank_s(one), self.rank_s(other)
        if abs(one_s - other_s) > SAME_STEP * max(one_s, other_s):
            return one if one_s < other_s else other
        simple = [(c.rounds, c.partition.num_stages) for c in (one, other)]
        return other if simple[1] < simple[0] else one

    def fits_limits(self, candidate: Candidate) -> bool:
        """Check one candidate against the memory limits."""
        return bool(self.fits(batch_of([candidate.partition]), candidate.rounds)[0])

    def fits_device(self, partition: Partition, rounds: int) -> bool:
        """Check a partition against the device limit alone."""
        limit = self.limits.device_bytes
        return limit is None or self.device_bytes(partition, rounds) <= limit

    def device_bytes(self, partition: Partition, rounds: int) -> int:
        """Return what each device allocates."""
        size = self.limits.micro_batches_at_once(self.num_micro_batches, rounds)
        run = partition, self.costs, self.num_devices, size, self.limits
        return device_memory(*run, self.stale_layers or 0).total_bytes

    def host_bytes(self, candidate: Candidate) -> int:
        """Return what a plan takes of the host memory that `MemoryLimits.host_bytes` limits."""
        device_bytes = self.device_bytes(candidate.partition, candidate.rounds)
        return self.host.plan_bytes(candidate.partition, candidate.rounds, device_bytes)

    def host_bounds(self, rows: PartitionBatch, rounds: int) -> Integers:
        """Return a lower bound of `host_bytes` for rows [K]."""
        return self.host.bytes_of(rows, rounds, self._device_bytes(rows, rounds))

    def _device_bytes(self, rows: PartitionBatch, rounds: int) -> Integers:
        """Return what each device allocates [K]; zeros if no limit depends on it."""
        if not self.memory.counts_devices:
            return np.zeros(len(rows), dtype=np.int64)
        size = self.limits.micro_batches_at_once(self.num_micro_batches, rounds)
        return self.memory.device_bytes(rows, self.num_devices, size)

    def fits(self, rows: PartitionBatch, rounds: int) -> Booleans:
        """Check rows [K] against the memory limits."""
        limits, fits = self.limits, np.ones(len(rows), dtype=np.bool_)
        if self.stale_layers:
            fits = self._splits(rows) >= self.stale_layers
        device_bytes = self._device_bytes(rows, rounds)
        if limits.device_bytes is not None:
            fits = fits & (device_bytes <= limits.device_bytes)
        if limits.host_bytes is not None:
            fits = self.host.fits(rows, rounds, device_bytes, fits)
        return np.asarray(fits)

    def _splits(self, rows: PartitionBatch) -> Integers:
        """Return the first layer of each row's fused stage [K]."""
        return np.asarray(
            self.num_layers - np.take_along_axis(rows.counts, rows.fused_at[:, None], axis=1)[:, 0]
        )

    def estimate_s(self, rows: PartitionBatch, rounds: int) -> Floats:
        """Estimate ranks [K]; an estimate is never above the exact rank."""
        batch_seconds = batch_sync_seconds if self.overlap == "sync" else batch_async_seconds
        sizes, host_s = self.sizes(rounds), self.sums.host_s(rounds)

        def rank_s(times: BatchTimes) -> Floats:
            step_s = np.maximum(batch_seconds(times, sizes, self.num_devices), host_s)
            return np.asarray(self._with_idle(step_s, times.total_s.sum(axis=0)))

        return self._in_order_of_stages(rows, rounds, rank_s)

    def _in_order_of_stages(
        self, rows: PartitionBatch, rounds: int, seconds: Callable[[BatchTimes], Floats]
    ) -> Floats:
        """Call `seconds` on chunks that begin with the partitions of most stages, as `batch_time.py` expects them."""
        num_stages = rows.num_stages
        # Sorted by falling numbers of stages, a chunk's partitions
        # that lack a stage are at its end and can be sliced off.
        order = np.argsort(-num_stages, kind="stable")
        result = np.empty(len(rows))
        for first in range(0, len(rows), CHUNK):
            part = order[first : first + CHUNK]
            result[part] = seconds(self._times(rows.take(part), num_stages[part], rounds))
        return result

    def _times(self, rows: PartitionBatch, num_stages: Integers, rounds: int) -> BatchTimes:
        """Compute the stage times of all rows; each row equals `LayerSums.times`."""
        starts, stops = rows.ranges(self.num_layers)
        is_backward = rows.is_backward()
        forward_s = self._forward_again_s(starts, stops, is_backward)
        after_s = self.backward_s[stops] - self.backward_s[starts]
        if self.limits.recompute == "layer":
            after_s = after_s + self._forward_again_s(starts, stops - 1, is_backward)
        total_s = forward_s + np.where(rows.has_gradients(), after_s, 0.0)
        if self.sums.link_waits is not None:
            is_forward = ~rows.has_gradients() & (stops > starts)
            # A recomputation waits for what it brings up, while its gradient is still on its way.
            total_s = total_s + self.sums.link_waits.waits_s(starts, stops, is_forward, is_backward, rounds)
        entry_s = np.where(is_backward, after_s, total_s) + self.sums.hop_s
        # A stage of `bounded` waits for its own layers alone: without these waits no estimate is above the exact time.
        updated_s = np.zeros_like(self.updated_s) if self.update == "bounded" else self.updated_s
        return BatchTimes(
            np.ascontiguousarray(entry_s.T),
            np.ascontiguousarray(total_s.T),
            np.ascontiguousarray(updated_s[stops].T),
            num_stages,
        )

    def _forward_again_s(self, starts: Integers, stops: Integers, is_backward: Booleans) -> Floats:
        """Compute the seconds of these layers' forward [K, S], without what is kept in backward stages."""
        forward_s = self.forward_s[stops] - self.forward_s[starts]
        if not self.costs.kept:
            return np.asarray(forward_s)
        recompute_s = self.recompute_s[stops] - self.recompute_s[starts]
        return np.where(is_backward, recompute_s, forward_s)
