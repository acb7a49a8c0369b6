"""A partition's stages as the step time needs them, built in O(stages) from running sums of the layers' costs."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition


@dataclass(frozen=True)
class StageTimes:
    """The stages of a partition in dispatch order. Seconds.

    `entry_s`: from the previous stage's output of a micro-batch (hop included) to this stage's, if the
    device is free. `total_s`: busy time per micro-batch. `updated_after_s`: when the optimizer has updated
    all layers the stage reads, counted from the start of the update. `boundary_from`: the forward stage
    whose output a recomputation may have to wait for, -1 where the gradient always comes later anyway.
    """

    entry_s: Sequence[float]
    total_s: Sequence[float]
    updated_after_s: Sequence[float]
    boundary_from: Sequence[int]
    hop_s: float

    @property
    def update_s(self) -> float:
        """One update of all layers."""
        return max(self.updated_after_s)


class LayerSums:
    """Running sums over the layers: any stage's seconds by two look-ups. The same figures as `stage_seconds`."""

    def __init__(self, costs: Costs, recompute: str = "stage") -> None:
        self.hop_s = costs.hop_s
        self.forward_s = [0.0, *accumulate(layer.forward_s for layer in costs.layers)]
        self.backward_s = [0.0, *accumulate(layer.backward_s for layer in costs.layers)]
        self.updated_s = [0.0, *accumulate(layer.optimizer_s for layer in costs.layers)]
        self.recompute = recompute
        self.updates_take_time = self.updated_s[-1] > 0

    def times(self, forward: Sequence[int], fused: int, backward: Sequence[int]) -> StageTimes:
        """Stage times of the partition with these layer counts."""
        starts = [0, *accumulate(forward)]
        split, num_layers = starts[-1], starts[-1] + fused
        cuts = [split]
        for count in backward:
            cuts.append(cuts[-1] - count)
        sums, hop_s = self.forward_s, self.hop_s
        total = [sums[stop] - sums[start] for start, stop in pairwise(starts)]
        entry = [seconds + hop_s for seconds in total]
        fused_s = self._recompute_s(split, num_layers) + self._after_recompute_s(split, num_layers)
        total.append(fused_s)
        entry.append(fused_s + hop_s)
        before = []
        for stop, start in pairwise(cuts):
            before.append(self._recompute_s(start, stop))
            after_s = self._after_recompute_s(start, stop)
            total.append(before[-1] + after_s)
            entry.append(after_s + hop_s)
        updated = [0.0] * len(total)
        if self.updates_take_time:
            updated = [self.updated_s[stop] for stop in (*starts[1:], num_layers, *cuts[:-1])]
        return StageTimes(entry, total, updated, _boundary_waits(starts, cuts, before, entry), hop_s)

    def work_s(self, fused: int) -> float:
        """Least busy seconds of one micro-batch in any partition with this fused stage.

        With `recompute = "layer"` a layer of the fused stage is computed twice too, except the last.
        """
        num_layers = len(self.forward_s) - 1
        once = num_layers - fused if self.recompute == "stage" else num_layers - 1
        return self.forward_s[-1] + self.backward_s[-1] + self.forward_s[once]

    def _recompute_s(self, start: int, stop: int) -> float:
        return self.forward_s[stop] - self.forward_s[start]

    def _after_recompute_s(self, start: int, stop: int) -> float:
        seconds = self.backward_s[stop] - self.backward_s[start]
        if self.recompute == "layer":
            seconds += self.forward_s[stop - 1] - self.forward_s[start]
        return seconds


def stage_times(partition: Partition, costs: Costs, recompute: str = "stage") -> StageTimes:
    """Times of each stage of `partition`."""
    return LayerSums(costs, recompute).times(partition.forward, partition.fused, partition.backward)


def _boundary_waits(
    starts: Sequence[int], cuts: Sequence[int], before_s: Sequence[float], entry_s: Sequence[float]
) -> list[int]:
    """A recomputation of e seconds need not wait for its boundary if the gradient takes e longer to arrive.

    `starts`: first layers of the forward stages and of the fused one; `cuts`: of the fused and backward ones.
    """
    num_forward = len(starts) - 1
    waits = [-1] * (num_forward + 1)
    if not before_s or max(before_s) <= entry_s[num_forward]:
        return waits + [-1] * len(before_s)  # each gradient has been through the fused stage
    arrival = [0.0, *accumulate(entry_s)]
    producer = num_forward - 1
    for index, start in enumerate(cuts[1:]):
        while producer > 0 and starts[producer] >= start:
            producer -= 1
        chain_s = arrival[num_forward + 1 + index] - arrival[producer + 1]
        waits.append(producer if start > 0 and chain_s < before_s[index] else -1)
    return waits
