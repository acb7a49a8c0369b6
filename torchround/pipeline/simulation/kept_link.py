"""The time that stages wait for the link because of kept activations.

Weights, gradients and boundaries are taken as hidden behind computation; `torchround plan` prints their load. Kept
activations are many more bytes, and a plan need not have them. So a stage that keeps anything takes at least as
long as its transfers: down in a forward stage, up in a backward stage, beside all that moves there anyway.

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
    """The seconds by which keeping makes stages wait for the link, from running sums over the layers [L + 1]."""

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
        stages = partition.stages()
        starts, stops = (
            np.array([getattr(stage, end) for stage in stages], dtype=np.int64) for end in ("start", "stop")
        )
        forward, backward = (
            np.array([stage.kind is kind for stage in stages])
            for kind in (StageKind.FORWARD, StageKind.BACKWARD)
        )
        waits: list[float] = self.waits_s(starts, stops, forward, backward, rounds).tolist()
        return waits

    def waits_s(
        self, starts: Integers, stops: Integers, is_forward: Booleans, is_backward: Booleans, rounds: int
    ) -> Floats:
        """Compute the seconds of stages [.., S] for one micro-batch; a stage without layers has none.

        Keeping changes a stage from the longer of its computation and its transfers without keeping to the longer
        of the two with it. The step time counts computation alone, so this is the difference to that.
        """
        kept = np.where(is_forward | is_backward, self._kept[stops] - self._kept[starts], 0.0)
        # A stage's weights and gradients move once per round, the rest with each micro-batch.
        per_micro_batch = rounds / self._num_micro_batches
        incoming, outgoing = self._inputs[starts], self._outputs[stops - 1]
        up = (self._weights[stops] - self._weights[starts]) * per_micro_batch + incoming
        up = up + np.where(is_backward, outgoing, 0.0)
        gradients = (self._gradients[stops] - self._gradients[starts]) * per_micro_batch
        down = np.where(is_forward, outgoing, gradients + incoming)
        rate = self._link.bytes_per_s
        link_s = np.maximum(up, down) / rate
        kept_link_s = np.maximum(up + kept * is_backward, down + kept * is_forward) / rate
        whole_s = self._computed_s(self._forward_s, starts, stops, is_forward)
        saved_s = np.where(is_backward, self._saved(starts, stops), 0.0)
        waits = saved_s + np.maximum(whole_s - saved_s, kept_link_s) - np.maximum(whole_s, link_s)
        return np.where(kept > 0, np.maximum(waits, 0.0), 0.0)

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


def _running(values: list[float] | list[int]) -> Floats:
    return np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
