"""One planning problem: estimated step times of many partitions, the exact one of each, and which fit into memory.

Shapes: K partitions, S stages, L layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchround.pipeline.costs import UPDATE_BYTES, Costs
from torchround.pipeline.memory import (
    KEPT_BUFFERS,
    LOSS_BUFFERS,
    STAGING_BUFFERS,
    MemoryLimits,
    device_memory,
)
from torchround.pipeline.partition import Partition, split_evenly
from torchround.pipeline.search.batch_time import BatchTimes, batch_async_seconds, batch_sync_seconds
from torchround.pipeline.search.host_table import HostTable
from torchround.pipeline.search.partition_batch import (
    Booleans,
    Candidate,
    Floats,
    Integers,
    PartitionBatch,
    batch_of,
)
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds
from torchround.pipeline.simulation.step_time import LayerSums, step_seconds

# Adding a round on the host moves 10 bytes per trained parameter: a 2-byte gradient is read, a float32 sum is
# read and written. An update moves 28 (`costs.UPDATE_BYTES`), and its seconds are known.
ADDING_SHARE = 10 / UPDATE_BYTES
# Partitions timed together: few enough for their arrays to stay in the processor's cache.
CHUNK = 1024
# Step times closer than this share count as equal; among equals the plan with fewer rounds and stages wins.
SAME_STEP = 1e-9


class PlanningProblem:
    """A question to the planner: layer costs, devices, micro-batches, update mode and memory limits.

    - `idle_weight`: what a second of a device's idle time adds to a plan's rank, in seconds.
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
    ) -> None:
        self.whole_costs = costs
        if stale_layers and costs.kept:
            # What the forward of a stale layer has made is of older weights than its backward computes with.
            costs = costs.keeping(
                [names if layer >= stale_layers else () for layer, names in enumerate(costs.kept)]
            )
        self.costs, self.limits, self.update = costs, limits, update
        self.stale_layers = stale_layers
        self.num_devices, self.num_micro_batches = num_devices, num_micro_batches
        self.num_layers = costs.num_layers
        self.sums = LayerSums(costs, limits.recompute)
        self.forward_s = np.array(self.sums.forward_s)
        self.recompute_s = np.array(self.sums.recompute_s)
        self.backward_s = np.array(self.sums.backward_s)
        self.updated_s = np.array(self.sums.updated_s)
        # Running sums of whole stages: a fused one computes all, a backward one skips what is kept.
        self.fused_s: list[float] = (self.forward_s + self.backward_s).tolist()
        self.both_s: list[float] = (self.recompute_s + self.backward_s).tolist()
        self.memory = MemoryTable(costs, limits)
        self.host = HostTable(costs, limits, num_devices, num_micro_batches, update, stale_layers or 0)
        self.widest, self.even = self.memory.stage_limits(even=False), self.memory.stage_limits(even=True)
        self.idle_weight = 0.0
        self._exact: dict[Candidate, float] = {}

    def sizes(self, rounds: int) -> list[int]:
        """Return the number of micro-batches of each round."""
        return [len(part) for part in split_evenly(self.num_micro_batches, rounds)]

    def exact_s(self, candidate: Candidate) -> float:
        """Compute the step time by the exact recurrence, once for each candidate."""
        # The search meets the same candidate in several generations, and again at the end.
        if candidate not in self._exact:
            step_s = self._step_s(candidate)
            self._exact[candidate] = max(step_s, self.host_s(candidate.rounds))
        return self._exact[candidate]

    def _step_s(self, candidate: Candidate) -> float:
        partition, devices = candidate.partition, self.num_devices
        if self.update == "bounded":
            stale = self.num_layers if self.stale_layers is None else self.stale_layers
            return bounded_step_seconds(self.sums, partition, stale, devices, self.num_micro_batches)
        times = self.sums.times(partition.forward, partition.fused, partition.backward)
        return step_seconds(times, devices, self.num_micro_batches, candidate.rounds, self.update)

    def with_stale_layers(self, stale_layers: int) -> "PlanningProblem":
        """Return the same problem with this number of stale layers."""
        question = self.whole_costs, self.num_devices, self.num_micro_batches, self.update, self.limits
        return PlanningProblem(*question, stale_layers)

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
        partition = candidate.partition
        times = self.sums.times(partition.forward, partition.fused, partition.backward)
        return self._with_idle(step_s, sum(times.total_s))

    def _with_idle(self, step_s: Any, micro_batch_s: Any) -> Any:
        busy_s = micro_batch_s * self.num_micro_batches / self.num_devices
        return step_s + self.idle_weight * (step_s - busy_s)

    def host_s(self, rounds: int) -> float:
        """Estimate the seconds of host memory traffic per step if its rounds are added up there."""
        return self.sums.updated_s[-1] * (1 + rounds * ADDING_SHARE) if rounds > 1 else 0.0

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
        return device_memory(partition, self.costs, self.num_devices, size, self.limits).total_bytes

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
        sizes, host_s = self.sizes(rounds), self.host_s(rounds)

        def rank_s(times: BatchTimes) -> Floats:
            step_s = np.maximum(batch_seconds(times, sizes, self.num_devices), host_s)
            return np.asarray(self._with_idle(step_s, times.total_s.sum(axis=0)))

        return self._in_order_of_stages(rows, rank_s)

    def _in_order_of_stages(self, rows: PartitionBatch, seconds: Callable[[BatchTimes], Floats]) -> Floats:
        """Call `seconds` on chunks that begin with the partitions of most stages, as `batch_time.py` expects them."""
        num_stages = rows.num_stages
        # Sorted by falling numbers of stages, a chunk's partitions
        # that lack a stage are at its end and can be sliced off.
        order = np.argsort(-num_stages, kind="stable")
        result = np.empty(len(rows))
        for first in range(0, len(rows), CHUNK):
            part = order[first : first + CHUNK]
            result[part] = seconds(self._times(rows.take(part), num_stages[part]))
        return result

    def _times(self, rows: PartitionBatch, num_stages: Integers) -> BatchTimes:
        """Compute the stage times of all rows; each row equals `LayerSums.times`."""
        starts, stops = rows.ranges(self.num_layers)
        is_backward = rows.is_backward()
        forward_s = self._forward_again_s(starts, stops, is_backward)
        after_s = self.backward_s[stops] - self.backward_s[starts]
        if self.limits.recompute == "layer":
            after_s = after_s + self._forward_again_s(starts, stops - 1, is_backward)
        total_s = forward_s + np.where(rows.has_gradients(), after_s, 0.0)
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


@dataclass(frozen=True)
class StageLimits:
    """How far a stage may reach within the device limit. A stage of one layer is always allowed here.

    - `first_layers`: the earliest first layer of a fused or backward stage by its end (1 to L; entry 0 is unused).
    - `last_ends`: the latest end of a forward stage by its first layer.
    """

    first_layers: list[int]
    last_ends: list[int]


class MemoryTable:
    """The counts of `memory.py` as arrays, to check many partitions at once.

    It holds running sums over the layers and, if device memory counts, the compute peak of every possible
    stage.
    """

    def __init__(self, costs: Costs, limits: MemoryLimits) -> None:
        layers = costs.layers
        self.limits = limits
        self.num_layers = len(layers)
        self.counts_devices = limits.device_bytes is not None or limits.devices_on_host > 0
        self.weights = _running([layer.weight_bytes for layer in layers])
        self.gradients = _running([layer.gradient_bytes for layer in layers])
        kept = [layer.kept_bytes for layer in layers]
        self.kept = _running(kept)
        # The most that a layer before each one keeps.
        self.most_kept = np.maximum.accumulate(np.array([0, *kept], dtype=np.int64))
        # By first layer of a stage, its input; entry 0 is unused.
        self.inputs = np.array([0, *(layer.boundary_bytes for layer in layers[:-1])], dtype=np.int64)
        # Of any plan of several stages, for ranges that must not leave out what fits.
        self.least_staging = STAGING_BUFFERS * min(self.inputs[1:].tolist(), default=0)
        self.loss_bytes = LOSS_BUFFERS * layers[-1].boundary_bytes
        if self.counts_devices:
            self.compute = _compute_table(costs, limits.recompute)
            single = np.arange(self.num_layers)
            self.largest = (
                max(layer.weight_bytes for layer in layers),
                max(layer.gradient_bytes for layer in layers),
                int(self.compute[single, single + 1].max()),
            )
            self.least = (
                min(layer.weight_bytes for layer in layers),
                min(layer.gradient_bytes for layer in layers),
            )

    def device_bytes(self, rows: PartitionBatch, num_devices: int, micro_batches_per_round: int) -> Integers:
        """Compute what each device allocates [K], as `memory.device_memory`."""
        starts, stops = rows.ranges(self.num_layers)
        integer_bytes = self.limits.integer_bytes * micro_batches_per_round
        return self._device_bytes(rows, starts, stops, num_devices) + integer_bytes

    def stage_limits(self, even: bool) -> StageLimits:
        """Compute how far stages may reach: if `even`, next to stages as large; otherwise next to the smallest layer.

        Even stages of that reach fit together. A wider stage than the other limit fits with nothing.
        """
        if self.limits.device_bytes is None:
            return StageLimits([0] * (self.num_layers + 1), [self.num_layers] * self.num_layers)
        start, stop = np.arange(self.num_layers)[:, None], np.arange(self.num_layers + 1)
        needed = self._needed(
            self.weights[stop] - self.weights[start],
            self.gradients[stop] - self.gradients[start],
            self.compute,
            even,
        )
        if even:
            needed += KEPT_BUFFERS * (np.maximum(self.kept[stop] - self.kept[start], 0) + self.most_kept[-1])
        needed[0, -1] += self.loss_bytes - self.least_staging  # a plan of one stage stages losses alone
        first = np.argmax((needed <= self.limits.device_bytes) | (start >= stop - 1), axis=0)
        zero = np.zeros(1, dtype=np.int64)
        room = self.limits.device_bytes - int(self._needed(zero, zero, zero, even)[0])
        room = (room // 2 if even else room) + self.largest[0]
        ends = np.searchsorted(self.weights, self.weights[:-1] + room, side="right") - 1
        return StageLimits(first.tolist(), np.maximum(ends, np.arange(self.num_layers) + 1).tolist())

    def _needed(self, weights: Integers, gradients: Integers, compute: Integers, even: bool) -> Integers:
        """Compute the bytes of a device that runs this stage; of the others it runs at least the largest layer."""
        weights = np.maximum(weights, self.largest[0])
        gradients = np.maximum(gradients, self.largest[1])
        neighbours = weights + gradients if even else sum(self.least)
        return np.asarray(
            weights
            + gradients
            + neighbours
            + self._rounding_bytes(gradients)
            + np.maximum(compute, self.largest[2])
            + self.least_staging
        )

    def _rounding_bytes(self, largest: Integers) -> Integers:
        """Compute the buffer to round gradients in, by the gradients of the largest stage."""
        rounded = (self.limits.rounding_share * largest).astype(np.int64)
        return np.asarray(np.minimum(rounded, self.limits.rounding_bytes))

    def _device_bytes(
        self, rows: PartitionBatch, starts: Integers, stops: Integers, num_devices: int
    ) -> Integers:
        """Compute what each device allocates [K], as `memory.device_memory`, without the round's integers."""
        has_gradients, position = rows.has_gradients(), np.arange(rows.counts.shape[1])
        weights = self.weights[stops] - self.weights[starts]
        gradients = np.where(has_gradients, self.gradients[stops] - self.gradients[starts], 0)
        # Sizes are 0 after a partition's last stage, so no sum below is too large because of those columns.
        is_last = position >= rows.num_stages[:, None] - num_devices
        ends_evaluation = ~rows.is_backward() & (position > rows.fused_at[:, None] - num_devices)
        is_first_gradient = has_gradients & (position < rows.fused_at[:, None] + num_devices)
        slots = _most_of_two(weights, is_last | ends_evaluation, position < num_devices, num_devices)
        slots += _most_of_two(gradients, is_last, is_first_gradient, num_devices)
        # Each layer is in a fused or backward stage too, which
        # needs at least what a forward stage with it needs.
        compute = np.where(has_gradients, self.compute[starts, stops], 0).max(axis=1)
        staging = STAGING_BUFFERS * self.inputs[starts].max(axis=1)
        staging = np.where(rows.num_stages == 1, self.loss_bytes, staging)
        bytes_in_all = slots + self._rounding_bytes(gradients.max(axis=1)) + compute + staging
        if self.kept[-1]:
            bytes_in_all += self._kept_bytes(rows, starts, stops)
        return np.asarray(bytes_in_all)

    def _kept_bytes(self, rows: PartitionBatch, starts: Integers, stops: Integers) -> Integers:
        """Compute the buffers for kept activations [K], as `memory.kept_space`."""
        of_stages = np.where(rows.is_backward(), self.kept[stops] - self.kept[starts], 0).max(axis=1)
        fused = np.take_along_axis(rows.counts, rows.fused_at[:, None], axis=1)[:, 0]
        return np.asarray(KEPT_BUFFERS * (self.most_kept[self.num_layers - fused] + of_stages))


def _most_of_two(sizes: Integers, is_last: Booleans, is_first: Booleans, num_devices: int) -> Integers:
    """Compute the largest sum of two sizes [K, S] that can follow each other on a device, as `memory.py` does [K]."""
    most = np.where(is_last, sizes, 0).max(axis=1) + np.where(is_first, sizes, 0).max(axis=1)
    if sizes.shape[1] > num_devices:
        most = np.maximum(most, (sizes[:, :-num_devices] + sizes[:, num_devices:]).max(axis=1))
    return np.asarray(most)


def _running(values: list[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)]).astype(np.int64)


def _compute_table(costs: Costs, recompute: str) -> Integers:
    """Tabulate the compute peak [L, L + 1] of a fused or backward stage by its first layer and its end."""
    layers = costs.layers
    kept = _running([layer.activation_bytes for layer in layers])
    boundary = _running([layer.boundary_bytes for layer in layers])
    scratch = np.array([layer.workspace_bytes for layer in layers], dtype=np.int64)
    if recompute == "layer":
        scratch = scratch + np.array([layer.activation_bytes for layer in layers], dtype=np.int64)
        kept = boundary
    table = np.zeros((len(layers), len(layers) + 1), dtype=np.int64)
    for start in range(len(layers)):
        table[start, start + 1 :] = kept[start + 1 :] - kept[start]
        table[start, start + 1 :] += np.maximum.accumulate(scratch[start:])
    return table
