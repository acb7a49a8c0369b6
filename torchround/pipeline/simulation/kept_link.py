"""The time that stages wait for the link, and the bytes that all devices together move.

A stage takes at least as long as its transfers in the busier direction: weights and gradients once per round, boundaries
with each micro-batch, and kept activations, down in a forward stage and up in a backward stage.

Shapes: K partitions, S stages, L layers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition, StageKind

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Booleans = NDArray[np.bool_]


@dataclass(frozen=True)
class KeptLink:
    """The link of each device to the host.

    - `bytes_per_s`: what one direction moves while the other one is busy too.
    - `gradient_share`: bytes of a gradient as it travels per byte of it as it is accumulated.
    """

    bytes_per_s: float
    gradient_share: float = 1.0


class LinkWaits:
    """The seconds by which stages wait for the link, from running sums over the layers [L + 1]."""

    def __init__(self, costs: Costs, link: KeptLink, recompute: str, num_micro_batches: int) -> None:
        layers = costs.layers
        self._link, self._num_micro_batches = link, num_micro_batches
        self._is_layerwise = recompute == "layer"
        self._weights = _running([layer.weight_bytes for layer in layers])
        self._gradients = _running([link.gradient_share * layer.gradient_bytes for layer in layers])
        self._kept = _running([layer.kept_bytes for layer in layers])
        self._forward_s = _running([layer.forward_s for layer in layers])
        self._saved_s = _running([layer.saved_s for layer in layers])
        self._backward_s = _running([layer.backward_s for layer in layers])
        outputs = [layer.boundary_bytes for layer in layers]
        self._outputs = np.array(outputs, dtype=np.float64)
        # By first layer of a stage, its input: the first layer reads integers alone.
        self._inputs = np.array([0, *outputs[:-1], 0], dtype=np.float64)

    def of(self, partition: Partition, rounds: int) -> list[float]:
        """Return the seconds of each stage for one micro-batch, in dispatch order."""
        waits: list[float] = self.waits_s(*_arrays(partition), rounds).tolist()
        return waits

    def moved_bytes(self, partition: Partition, rounds: int) -> float:
        """Count the bytes of a step between the host and all devices, both ways."""
        up, down = self._bytes(*_arrays(partition), rounds)
        return self._num_micro_batches * float(up.sum() + down.sum())

    def waits_s(
        self, starts: Integers, stops: Integers, is_forward: Booleans, is_backward: Booleans, rounds: int
    ) -> Floats:
        """Compute the seconds of stages [.., S] for one micro-batch; a stage without layers has none."""
        up, down = self._bytes(starts, stops, is_forward, is_backward, rounds)
        computed_s = self._computed_s(self._forward_s, starts, stops, is_forward)
        computed_s = computed_s - np.where(is_backward, self._saved(starts, stops), 0.0)
        waits = np.maximum(np.maximum(up, down) / self._link.bytes_per_s - computed_s, 0.0)
        return np.where(stops > starts, waits, 0.0)

    def _bytes(
        self, starts: Integers, stops: Integers, is_forward: Booleans, is_backward: Booleans, rounds: int
    ) -> tuple[Floats, Floats]:
        """Count the bytes of stages [.., S] up and down for one micro-batch."""
        kept = self._kept[stops] - self._kept[starts]
        # A stage's weights and gradients move once per round, the rest with each micro-batch.
        per_micro_batch = rounds / self._num_micro_batches
        incoming, outgoing = self._inputs[starts], self._outputs[stops - 1]
        up = (self._weights[stops] - self._weights[starts]) * per_micro_batch + incoming
        up = up + np.where(is_backward, outgoing + kept, 0.0)
        gradients = (self._gradients[stops] - self._gradients[starts]) * per_micro_batch
        return up, np.where(is_forward, outgoing + kept, gradients + incoming)

    def _computed_s(
        self, forward_s: Floats, starts: Integers, stops: Integers, is_forward: Booleans
    ) -> Floats:
        """Compute the seconds of a stage that recomputes all."""
        seconds = forward_s[stops] - forward_s[starts]
        after_s = self._backward_s[stops] - self._backward_s[starts]
        if self._is_layerwise:
            after_s = after_s + forward_s[stops - 1] - forward_s[starts]
        return np.asarray(seconds + np.where(is_forward, 0.0, after_s))

    def _saved(self, starts: Integers, stops: Integers) -> Floats:
        """Compute the seconds of recomputation that a backward stage saves."""
        saved_s = self._saved_s[stops] - self._saved_s[starts]
        if self._is_layerwise:
            saved_s = saved_s + self._saved_s[stops - 1] - self._saved_s[starts]
        return np.asarray(saved_s)


def _arrays(partition: Partition) -> tuple[Integers, Integers, Booleans, Booleans]:
    """Return the first layers of a partition's stages, their ends, and which are forward and backward stages."""
    stages = partition.stages()
    starts, stops = (
        np.array([getattr(stage, end) for stage in stages], dtype=np.int64) for end in ("start", "stop")
    )
    forward, backward = (
        np.array([stage.kind is kind for stage in stages]) for kind in (StageKind.FORWARD, StageKind.BACKWARD)
    )
    return starts, stops, forward, backward


def _running(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
