"""The seconds of a partition's stages, the bytes that they move, and the updates that they wait for.

Each stage costs a few look-ups in running sums over the layers. A stage takes at least as long as its transfers in the
busier direction: weights and gradients once per round, boundaries with each micro-batch, and kept activations, down in a
forward stage and up in a backward stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add

from torchround.planning.costs import Costs, LayerCost
from torchround.planning.partition import Partition
from torchround.planning.rates import RATES
from torchround.planning.update_modes import SYNC, UpdateMode, mode_of


@dataclass(frozen=True)
class KeptLink:
    """The link of each device to the host.

    - `bytes_per_s`: what one direction moves while the other one is busy too.
    - `gradient_share`: bytes of a gradient as it travels per byte of it as it is accumulated.
    """

    bytes_per_s: float
    gradient_share: float = 1.0


@dataclass(frozen=True)
class StageTimes:
    """The seconds of a partition's stages in one update mode, in dispatch order.

    The host updates groups of layers one after the other: all layers at once, or if it updates by layer, those of each
    fused and backward stage.

    - `entry_s`: from the previous stage's output of a micro-batch to this stage's, hop included, if the
      device is free.
    - `total_s`: busy time per micro-batch.
    - `boundary_from`: the forward stage whose output a recomputation may have to wait for; -1 if the gradient
      always arrives later anyway.
    - `group_s`: seconds of the update of each group.
    - `waits`: the update that each stage waits for, and the seconds from its start until the stage's layers are updated. Of G
      groups, `G * age + g` is an update of group g, and the last age that of the gradients of the step before. There are
      `known_updates` ages.
    - `jobs`: what devices do for the update, in the order in which they take it: the stage that completes the layer's
      gradient, the seconds of the device, and those of a copy in each direction.
    """

    partition: Partition
    mode: UpdateMode
    entry_s: Sequence[float]
    total_s: Sequence[float]
    boundary_from: Sequence[int]
    hop_s: float
    group_s: Sequence[float]
    waits: Sequence[tuple[int, float]]
    jobs: Sequence[tuple[int, float, float]]

    @property
    def known_updates(self) -> int:
        """The ages of the updates that a step knows of: one for each version, and two at least, as updates follow each other."""
        return max(2, self.mode.versions)


class LayerSums:
    """Running sums over the layers, which give the seconds and bytes of any stage.

    With a `link`, stages also wait for their transfers. Their bytes for one micro-batch depend on `num_micro_batches`.
    """

    def __init__(
        self, costs: Costs, recompute: str = "stage", link: KeptLink | None = None, num_micro_batches: int = 1
    ) -> None:
        self.costs, self.recompute, self.link = costs, recompute, link
        self.num_micro_batches = num_micro_batches
        self.forward_s, self.recompute_s = costs.running("forward_s"), costs.running("recompute_s")
        self.backward_s, self.updated_s = costs.running("backward_s"), costs.running("optimizer_s")
        self.both_s = list(map(add, self.recompute_s, self.backward_s))  # of whole backward stages
        self.completed_with = costs.completed_with()
        self.jobs = layers_with_jobs(costs)
        self._outputs = costs.values("boundary_bytes")
        # By first layer of a stage, its input: the first layer reads integers alone.
        self._inputs = [0, *self._outputs[:-1]]

    def times(
        self, partition: Partition, update: str = SYNC.name, rounds: int = 1, stale_layers: int = 0
    ) -> StageTimes:
        """Compute the times of a partition's stages; `stale_layers` is K of `bounded`, at most all before the fused stage."""
        mode = mode_of(update)
        ranges, num_forward, hop_s = partition.ranges, len(partition.forward), self.costs.hop_s
        stale = min(stale_layers, ranges[num_forward][0]) if mode.updates_by_layer else 0
        early_s, late_s = self.seconds(partition, rounds)
        # A backward stage recomputes while its gradient is still on its way, so only the rest is on the gradient's path.
        entry_s = [seconds + hop_s for seconds in late_s]
        if mode.updates_by_layer:
            group_s = [self.updated_s[stop] - self.updated_s[start] for start, stop in ranges[num_forward:]]
            waits = self._bounded_waits(partition, stale)
        else:
            group_s, source = [self.updated_s[-1]], max(2, mode.versions) - mode.versions
            waits = [(source, self.updated_s[stop]) for _, stop in ranges]
        return StageTimes(
            partition=partition,
            mode=mode,
            entry_s=entry_s,
            total_s=list(map(add, early_s, late_s)),
            boundary_from=_boundary_waits(partition, early_s, entry_s, stale),
            hop_s=hop_s,
            group_s=group_s,
            waits=waits,
            jobs=[
                (completing_stage(partition, index), layer.job_s, layer.job_link_s)
                for index, layer in self.jobs
            ],
        )

    def seconds(self, partition: Partition, rounds: int | None = None) -> tuple[list[float], list[float]]:
        """Compute the seconds of each stage for one micro-batch: before and after it needs the output of the stage before.

        Only a backward stage has a first part: it recomputes from its boundary activation, which has been on the host
        since the forward, and needs the incoming gradient after that. It skips what its layers keep. With
        `recompute = "layer"` the activations of one layer are held at a time, so each layer but the stage's last is
        computed once more. With `rounds` the stages also wait for the link, if there is one.
        """
        forward_s, again_s, backward_s = self.forward_s, self.recompute_s, self.backward_s
        ranges, fused = partition.ranges, len(partition.forward)
        split, end = ranges[fused]
        late = [forward_s[stop] - forward_s[start] for start, stop in ranges[: fused + 1]]
        late[fused] += backward_s[end] - backward_s[split]
        early, backward = [0.0] * (fused + 1), ranges[fused + 1 :]
        early += [again_s[stop] - again_s[start] for start, stop in backward]
        late += [backward_s[stop] - backward_s[start] for start, stop in backward]
        if self.recompute == "layer":
            # The fused stage's activations stay on the device, so it keeps nothing elsewhere.
            late[fused] += forward_s[end - 1] - forward_s[split]
            for index, (start, stop) in enumerate(backward, start=fused + 1):
                late[index] += again_s[stop - 1] - again_s[start]
        if self.link is not None and rounds is not None:
            for index, moved in enumerate(zip(*self.stage_bytes(partition, rounds), strict=True)):
                wait_s = max(moved) / self.link.bytes_per_s - (early[index] + late[index])
                part = early if index > fused else late
                part[index] += max(wait_s, 0.0)
        return early, late

    def stage_bytes(
        self, partition: Partition, rounds: int, stale_layers: int = 0
    ) -> tuple[list[float], list[float]]:
        """Count the bytes of each stage up and down for one micro-batch; `stale_layers` keep the inputs inside a stage too."""
        weights, gradients = self.costs.running("weight_bytes"), self.costs.running("gradient_bytes")
        kept, inputs, outputs = self.costs.running("kept_bytes"), self._inputs, self._outputs
        # A stage's weights and gradients move once per round, the rest with each micro-batch.
        share = rounds / self.num_micro_batches
        gradient_share = share * (self.link.gradient_share if self.link is not None else 1.0)
        num_forward, up, down = len(partition.forward), [], []
        for index, (start, stop) in enumerate(partition.ranges):
            up.append((weights[stop] - weights[start]) * share + inputs[start])
            between = outputs[stop - 1] + kept[stop] - kept[start]
            between += sum(inputs[start + 1 : min(stop, stale_layers + 1)])
            if index < num_forward:
                down.append(between)
                continue
            down.append((gradients[stop] - gradients[start]) * gradient_share + inputs[start])
            if index > num_forward:
                up[-1] += between  # the gradient of its output, and what the forward has kept
        return up, down

    def host_s(self, rounds: int, partition: Partition) -> float:
        """Compute the least seconds per step of the host's memory: the update, sums over rounds, and the copies of all devices."""
        update_s = self.updated_s[-1]
        if rounds > 1:
            update_s *= 1 + rounds * self.costs.adding_share
        if self.link is None:
            return float(update_s)
        moved_bytes = self.num_micro_batches * sum(map(sum, self.stage_bytes(partition, rounds)))
        return max(update_s, (update_s * RATES.update_bytes_per_s + moved_bytes) / RATES.host_bytes_per_s)

    def work_s(self, fused: int) -> float:
        """Compute the least busy seconds of one micro-batch in any partition with this fused stage.

        With `recompute = "layer"` a layer of the fused stage is computed twice too, except the last.
        """
        split = self.costs.num_layers - fused
        once = split if self.recompute == "stage" else self.costs.num_layers - 1
        saved_s = self.forward_s[split] - self.recompute_s[split]
        return float(self.forward_s[-1] + self.backward_s[-1] + (self.forward_s[once] - saved_s))

    def _bounded_waits(self, partition: Partition, stale_layers: int) -> list[tuple[int, float]]:
        """List the update that each stage of a step in `bounded` waits for, as `StageTimes.waits`."""
        num_forward, num_groups, waits = len(partition.forward), len(partition.backward) + 1, []
        for index, (start, stop) in enumerate(partition.ranges):
            is_stale = index < num_forward and stop <= stale_layers
            if index < num_forward and not is_stale:
                start = max(start, stale_layers)  # what the stage reads in the newest version
            # The layer that is updated last: shared weights are updated with the first layer that uses them.
            layer = min(self.completed_with[start:stop])
            source = completing_stage(partition, layer)
            group = source - num_forward + (0 if is_stale else num_groups)
            waits.append((group, self.updated_s[partition.ranges[source][1]] - self.updated_s[layer]))
        return waits


def completing_stage(partition: Partition, layer: int) -> int:
    """Return the index of the stage that completes a layer's gradient: the first one from the fused one on that has it."""
    fused, ranges = len(partition.forward), partition.ranges
    return next(index for index in range(fused, len(ranges)) if ranges[index][0] <= layer)


def layers_with_jobs(costs: Costs) -> list[tuple[int, LayerCost]]:
    """List the layers with work of devices for their update, in the order in which devices take it: the deepest first."""
    layers = reversed(list(enumerate(costs.layers)))
    return [(index, layer) for index, layer in layers if layer.job_s or layer.job_link_s]


def _boundary_waits(
    partition: Partition, early_s: Sequence[float], entry_s: Sequence[float], stale_layers: int
) -> list[int]:
    """Find the recomputations that may have to wait for their boundary activation, as `StageTimes.boundary_from`.

    A recomputation of e seconds never waits if its gradient arrives at least e seconds after the boundary.
    """
    ranges, fused = partition.ranges, len(partition.forward)
    waits = [-1] * len(ranges)
    # The common case, found without a loop: each gradient has been through the fused stage, which alone takes longer
    # than any recomputation.
    if max(early_s) <= entry_s[fused]:
        return waits
    arrival, producer = [0.0, *accumulate(entry_s)], fused - 1
    for index in range(fused + 1, len(ranges)):
        start, stop = ranges[index]
        # The last input that the recomputation takes from the host: each stale layer starts from its own.
        cut = max(start, min(stop - 1, stale_layers))
        while producer > 0 and ranges[producer][0] >= cut:
            producer -= 1
        if cut > 0 and arrival[index] - arrival[producer + 1] < early_s[index]:
            waits[index] = producer
    return waits
