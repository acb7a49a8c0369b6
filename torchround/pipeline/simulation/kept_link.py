"""The time that stages wait for the link, and the bytes that all devices together move.

A stage takes at least as long as its transfers in the busier direction: weights and gradients once per round, boundaries
with each micro-batch, and kept activations, down in a forward stage and up in a backward stage.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition


@dataclass(frozen=True)
class KeptLink:
    """The link of each device to the host.

    - `bytes_per_s`: what one direction moves while the other one is busy too.
    - `gradient_share`: bytes of a gradient as it travels per byte of it as it is accumulated.
    """

    bytes_per_s: float
    gradient_share: float = 1.0


class LinkWaits:
    """The seconds by which stages wait for the link, from running sums over the layers."""

    def __init__(self, costs: Costs, link: KeptLink, recompute: str, num_micro_batches: int) -> None:
        layers = costs.layers
        self._bytes_per_s, self._num_micro_batches = link.bytes_per_s, num_micro_batches
        self._is_layerwise = recompute == "layer"
        self._weights = _running(layer.weight_bytes for layer in layers)
        self._gradients = _running(link.gradient_share * layer.gradient_bytes for layer in layers)
        self._kept = _running(layer.kept_bytes for layer in layers)
        self._forward_s = _running(layer.forward_s for layer in layers)
        self._recompute_s = _running(layer.recompute_s for layer in layers)
        self._backward_s = _running(layer.backward_s for layer in layers)
        self._outputs = [layer.boundary_bytes for layer in layers]
        # By first layer of a stage, its input: the first layer reads integers alone.
        self._inputs = [0, *self._outputs[:-1]]

    def of(self, partition: Partition, rounds: int) -> list[float]:
        """Return the seconds of each stage for one micro-batch, in dispatch order."""
        num_forward = len(partition.forward)
        waits = []
        for number, (start, stop, up, down) in enumerate(self.stage_bytes(partition, rounds)):
            sums = self._forward_s if number <= num_forward else self._recompute_s
            computed_s = sums[stop] - sums[start]
            if number >= num_forward:
                computed_s += self._backward_s[stop] - self._backward_s[start]
                if self._is_layerwise:
                    computed_s += sums[stop - 1] - sums[start]
            waits.append(max(max(up, down) / self._bytes_per_s - computed_s, 0.0))
        return waits

    def moved_bytes(self, partition: Partition, rounds: int) -> float:
        """Count the bytes of a step between the host and all devices, both ways."""
        return self._num_micro_batches * sum(
            up + down for _, _, up, down in self.stage_bytes(partition, rounds)
        )

    def stage_bytes(
        self, partition: Partition, rounds: int, stale_layers: int = 0
    ) -> list[tuple[int, int, float, float]]:
        """Return each stage's first layer, its end, and its bytes up and down for one micro-batch.

        With `stale_layers` (`bounded`) their inputs inside a stage also go down in the forward and up in the backward.
        """
        weights, gradients, kept, outputs = self._weights, self._gradients, self._kept, self._outputs
        # A stage's weights and gradients move once per round, the rest with each micro-batch.
        share, start = rounds / self._num_micro_batches, 0
        moved: list[tuple[int, int, float, float]] = []
        for count in partition.forward:
            stop = start + count
            up = (weights[stop] - weights[start]) * share + self._inputs[start]
            stale = sum(outputs[start : max(start, min(stop - 1, stale_layers))])
            moved.append((start, stop, up, outputs[stop - 1] + kept[stop] - kept[start] + stale))
            start = stop
        stop = start + partition.fused
        for number, count in enumerate((partition.fused, *partition.backward)):
            start = stop - count
            up = (weights[stop] - weights[start]) * share + self._inputs[start]
            down = (gradients[stop] - gradients[start]) * share + self._inputs[start]
            if number:
                stale = sum(outputs[start : max(start, min(stop - 1, stale_layers))])
                up += outputs[stop - 1] + kept[stop] - kept[start] + stale
            moved.append((start, stop, up, down))
            stop = start
        return moved


def _running(values: Iterable[float]) -> list[float]:
    return [0.0, *accumulate(values)]
