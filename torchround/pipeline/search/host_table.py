"""Host memory of many partitions at once: bounds decide most of them, the exact count decides the rest.

The count is `pool_count.PoolCount`, which is the engine's own reservation. The search asks it of hundreds of
partitions, so a bound from above and one from below are computed first, for all of them in a few calls.

Shapes: K partitions, L layers.
"""

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits, rounds_in_flight
from torchround.pipeline.partition import Partition
from torchround.pipeline.pool_count import PoolCount, boundaries_of
from torchround.pipeline.search.partition_batch import Booleans, Integers, PartitionBatch


class HostTable:
    """The host memory of plans for one problem, as far as it depends on the plan.

    `pool` is the count of a problem that differs in what is kept alone.
    """

    def __init__(
        self,
        costs: Costs,
        limits: MemoryLimits,
        num_devices: int,
        num_micro_batches: int,
        update: str,
        stale_layers: int = 0,
        pool: PoolCount | None = None,
    ) -> None:
        self._batch = limits.batch or boundaries_of(costs, num_micro_batches)
        self.pool = pool or PoolCount(self._batch, num_devices, update, stale_layers)
        self._stale_layers = stale_layers
        self._limits = limits
        self._num_devices = num_devices
        # Frozen layers and validations let a pass begin beside the previous one, as `async` does.
        self._overlaps = update != "sync" or self._batch.validates or self._batch.frozen_layers > 0
        # By size, what the input of each layer takes of the pool [L]. The first layer reads the integers alone.
        num_sizes = len(self._batch.output_bytes)
        self._inputs = np.array(
            [
                [0, *(self._batch.buffer_bytes(cut, size) for cut in range(1, costs.num_layers))]
                for size in range(num_sizes)
            ],
            dtype=np.int64,
        )
        # By size, what the layers before each one keep together [L + 1].
        self._kept = costs.kept
        kept = [
            [self._batch.kept_bytes(self._kept, layer, size) for layer in range(costs.num_layers)]
            for size in range(num_sizes)
        ]
        self._kept_before = np.cumsum([[0, *of_size] for of_size in kept], axis=1, dtype=np.int64)
        self._is_even = all(len(set(inputs[1:])) <= 1 for inputs in self._inputs.tolist())
        self._known: dict[tuple[Partition, int], int] = {}

    def boundary_bytes(self, partition: Partition, rounds: int) -> int:
        """Return what a plan's boundaries and kept activations take of the pool."""
        key = partition, rounds
        # The search meets the same partition in several generations.
        if key not in self._known:
            self._known[key] = self.pool.boundary_bytes(partition, rounds, self._kept)
        return self._known[key]

    def plan_bytes(self, partition: Partition, rounds: int, device_bytes: int) -> int:
        """Return all that `MemoryLimits.host_bytes` limits; `device_bytes` is the memory of each device."""
        return self.boundary_bytes(partition, rounds) + self._besides(rounds, device_bytes)

    def fits(self, rows: PartitionBatch, rounds: int, device_bytes: Integers, wanted: Booleans) -> Booleans:
        """Check the `wanted` rows [K] against the host limit; `device_bytes` [K] is the memory of each device."""
        limit = self._limits.host_bytes
        assert limit is not None, "without a limit every row fits"
        room = limit - np.asarray(
            self._besides(rounds, 0) + self._limits.devices_on_host * device_bytes, dtype=np.int64
        )
        lowest, highest = self._bounds(rows, rounds)
        fits = wanted & (lowest <= room)
        if rounds == 1 and self._is_even and not self._overlaps:
            return np.asarray(fits)  # the lower bound is the count itself
        for row in np.flatnonzero(fits & (highest > room)).tolist():
            fits[row] = self.boundary_bytes(rows.partition(row), rounds) <= room[row]
        return np.asarray(fits)

    def bytes_of(self, rows: PartitionBatch, rounds: int, device_bytes: Integers) -> Integers:
        """Return a lower bound [K] of `plan_bytes`, to rank rows by."""
        besides = self._besides(rounds, 0) + self._limits.devices_on_host * device_bytes
        return np.asarray(self._bounds(rows, rounds)[0] + besides)

    def _besides(self, rounds: int, device_bytes: int) -> int:
        sums_bytes = self._limits.rounds_bytes if rounds > 1 else 0
        fixed_bytes = self._batch.integers_and_losses_bytes() + sums_bytes
        return fixed_bytes + self._limits.devices_on_host * device_bytes

    def _bounds(self, rows: PartitionBatch, rounds: int) -> tuple[Integers, Integers]:
        """Compute bounds [K] of the boundaries' bytes from below and from above.

        Below: all micro-batches of the first round, which has most, hold at once what they hold after the
        forward. Above: all rounds that may be under way hold every boundary of every stage and one more, and all
        that is kept.
        """
        num_layers = self._inputs.shape[1]
        first_round = self._batch.in_rounds(rounds)[0]
        inputs = sum(number * self._inputs[size] for size, number in first_round.items())
        starts, _ = rows.ranges(num_layers)
        at = np.arange(len(rows))[:, None]
        kept, cut = (np.zeros((len(rows), num_layers), dtype=np.bool_) for _ in range(2))
        # Columns after a partition's last stage start at 0, where no boundary is.
        kept[at, np.where(rows.has_gradients(), starts, 0)] = True
        cut[at, starts] = True
        if self._stale_layers:
            fused = np.take_along_axis(rows.counts, rows.fused_at[:, None], axis=1)
            stale = np.arange(num_layers) <= np.minimum(self._stale_layers, num_layers - fused - 1)
            kept |= stale
            cut |= stale
        inputs = np.asarray(inputs, dtype=np.int64)
        splits = num_layers - np.take_along_axis(rows.counts, rows.fused_at[:, None], axis=1)[:, 0]
        kept_first = sum(number * self._kept_before[size] for size, number in first_round.items())
        lowest = kept @ inputs + np.asarray(kept_first, dtype=np.int64)[splits]
        update = "async" if self._overlaps else "sync"
        all_rounds = len(self._batch.sizes) if self._batch.validates else 0
        in_flight = np.array(
            [
                rounds_in_flight(self._num_devices, stages, rounds, update) * sum(first_round.values())
                for stages in rows.num_stages.tolist()
            ],
            dtype=np.int64,
        )
        largest = self._inputs.max(axis=0)
        each = cut @ largest + int(largest.max(initial=0)) + self._kept_before.max(axis=0)[splits]
        return lowest, each * np.maximum(in_flight, 2 * all_rounds)
