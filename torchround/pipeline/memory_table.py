"""Which of many partitions keep within the memory limits: `memory.py`'s counts as arrays.

Shapes: K partitions, S stages, L layers.
"""

import numpy as np

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import STAGING_BUFFERS, MemoryLimits, rounds_in_flight
from torchround.pipeline.rows import Integers, Mask, Rows


class MemoryTable:
    """Running sums over the layers and, if devices are limited, the compute peak of every possible stage."""

    def __init__(self, costs: Costs, limits: MemoryLimits) -> None:
        layers = costs.layers
        self.limits = limits
        self.num_layers = len(layers)
        self.weights = _running([layer.weight_bytes for layer in layers])
        self.gradients = _running([layer.gradient_bytes for layer in layers])
        self.outputs = np.array([layer.boundary_bytes for layer in layers], dtype=np.int64)
        self.inputs = np.concatenate([np.zeros(1, dtype=np.int64), self.outputs[:-1]])
        self.staging_bytes = STAGING_BUFFERS * int(self.outputs.max())
        if limits.device_bytes is not None:
            self.compute = _compute_table(costs, limits.recompute)
            single = np.arange(self.num_layers)
            self.largest = (
                max(layer.weight_bytes for layer in layers),
                max(layer.gradient_bytes for layer in layers),
                int(self.compute[single, single + 1].max()),
            )

    def fits(self, rows: Rows, num_devices: int, num_micro_batches: int, rounds: int, update: str) -> Mask:
        """Which rows [K] keep within the device limit and the host limit."""
        fits = np.ones(len(rows), dtype=np.bool_)
        if self.limits.device_bytes is None and self.limits.host_bytes is None:
            return fits
        starts, stops = rows.ranges(self.num_layers)
        size = -(-num_micro_batches // rounds)
        if self.limits.device_bytes is not None:
            needed = self._device_bytes(rows, starts, stops) + self.limits.integer_bytes * size
            fits &= needed <= self.limits.device_bytes
        if self.limits.host_bytes is not None:
            in_flight = [
                rounds_in_flight(num_devices, stages, rounds, update) for stages in rows.num_stages.tolist()
            ]
            alive = np.array(in_flight, dtype=np.int64) * size
            fits &= self._host_bytes(starts) * alive <= self.limits.host_bytes
        return fits

    def first_layers(self) -> list[int]:
        """By a stage's end (1 to L, 0 unused): its first layer at the earliest, if it has gradients.

        The other stages may be of one layer each. A stage of one layer is always allowed.
        """
        first = np.zeros(self.num_layers + 1, dtype=np.int64)
        if self.limits.device_bytes is not None:
            start, stop = np.arange(self.num_layers)[:, None], np.arange(self.num_layers + 1)
            needed = self._needed(
                self.weights[stop] - self.weights[start],
                self.gradients[stop] - self.gradients[start],
                self.compute,
            )
            first = np.argmax((needed <= self.limits.device_bytes) | (start >= stop - 1), axis=0)
        return [int(layer) for layer in first]

    def last_ends(self) -> list[int]:
        """By a forward stage's first layer: its end at the latest."""
        ends = np.full(self.num_layers, self.num_layers)
        if self.limits.device_bytes is not None:
            zero = np.zeros(1, dtype=np.int64)
            room = (self.limits.device_bytes - int(self._needed(zero, zero, zero)[0])) // 2 + self.largest[0]
            ends = np.searchsorted(self.weights, self.weights[:-1] + room, side="right") - 1
            ends = np.maximum(ends, np.arange(self.num_layers) + 1)
        return [int(end) for end in ends]

    def _needed(self, weights: Integers, gradients: Integers, compute: Integers) -> Integers:
        """Bytes of a device with this stage and otherwise stages of one layer."""
        weights = np.maximum(weights, self.largest[0])
        gradients = np.maximum(gradients, self.largest[1])
        return np.asarray(
            2 * weights
            + self._gradient_bytes(gradients)
            + np.maximum(compute, self.largest[2])
            + self.staging_bytes
        )

    def _gradient_bytes(self, slots: Integers) -> Integers:
        """Two slots, and the buffer to round them in."""
        rounded = (self.limits.rounding_share * slots).astype(np.int64)
        return np.asarray(2 * slots + np.minimum(rounded, self.limits.rounding_bytes))

    def _device_bytes(self, rows: Rows, starts: Integers, stops: Integers) -> Integers:
        """What each device allocates [K], without the round's integers (`memory.device_memory`)."""
        weights = (self.weights[stops] - self.weights[starts]).max(axis=1)
        has_gradients = rows.has_gradients()
        gradients = np.where(has_gradients, self.gradients[stops] - self.gradients[starts], 0).max(axis=1)
        # Every layer is in a fused or backward stage too, so forward stages never need the most.
        compute = np.where(has_gradients, self.compute[starts, stops], 0).max(axis=1)
        return np.asarray(2 * weights + self._gradient_bytes(gradients) + compute + self.staging_bytes)

    def _host_bytes(self, starts: Integers) -> Integers:
        """Boundaries [K] of one micro-batch (`memory.host_activation_bytes`): each stage's first layer once."""
        cut = np.zeros((len(starts), self.num_layers), dtype=np.bool_)
        cut[np.arange(len(starts))[:, None], starts] = True
        return np.asarray(cut @ self.inputs + int(self.outputs.max()))


def _running(values: list[int]) -> Integers:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)]).astype(np.int64)


def _compute_table(costs: Costs, recompute: str) -> Integers:
    """Compute peak [L, L + 1] of a fused or backward stage by its first layer and its end."""
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
