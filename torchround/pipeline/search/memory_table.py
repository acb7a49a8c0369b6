"""Device memory of many partitions at once, and how far their stages can reach within it.

Shapes: K partitions, S stages, L layers.
"""

from dataclasses import dataclass

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import (
    KEPT_BUFFERS,
    LOSS_BUFFERS,
    RESTART_BUFFERS,
    STAGING_BUFFERS,
    MemoryLimits,
)
from torchround.pipeline.search.partition_batch import Booleans, Integers, PartitionBatch


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

    def __init__(self, costs: Costs, limits: MemoryLimits, stale_layers: int = 0) -> None:
        layers = costs.layers
        self.limits, self.stale_layers = limits, stale_layers
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
        self.job_slots = max(layer.job_slot_bytes for layer in layers)
        self.job_scratch = max(layer.job_scratch_bytes for layer in layers)
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
        beside = self.limits.integer_bytes * micro_batches_per_round + self.limits.constant_bytes
        return self._device_bytes(rows, starts, stops, num_devices) + beside

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
        staging = self._staging_bytes(rows, starts, stops)
        staging = np.where(rows.num_stages == 1, self.loss_bytes, staging)
        bytes_in_all = slots + self._rounding_bytes(gradients.max(axis=1)) + staging
        bytes_in_all += np.maximum(compute, self.job_scratch) + self.job_slots
        if self.kept[-1]:
            bytes_in_all += self._kept_bytes(rows, starts, stops)
        return np.asarray(bytes_in_all)

    def _staging_bytes(self, rows: PartitionBatch, starts: Integers, stops: Integers) -> Integers:
        """Compute the staging buffers [K] of plans of several stages, as `memory.staging_space`."""
        largest = self.inputs[starts].max(axis=1)
        if not self.stale_layers:
            return np.asarray(STAGING_BUFFERS * largest)
        fused = np.take_along_axis(rows.counts, rows.fused_at[:, None], axis=1)[:, 0]
        stale = np.minimum(self.stale_layers, np.maximum(self.num_layers - fused - 1, 0))
        largest = np.maximum(largest, np.maximum.accumulate(self.inputs)[stale])
        restarts = np.where(rows.is_backward(), np.minimum(stops, self.stale_layers + 1) - starts - 1, 0)
        buffers = STAGING_BUFFERS + RESTART_BUFFERS * np.maximum(restarts, 0).max(axis=1)
        return np.asarray(buffers * largest)

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
