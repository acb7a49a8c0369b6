"""One planning problem: all that a search asks about a candidate plan, such as its step time, work and memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from operator import add

from torchround.planning.costs import Costs
from torchround.planning.host_buffers import HostBatch
from torchround.planning.keep_rule import KeptItem, kept_names
from torchround.planning.memory import MemoryLimits, device_memory
from torchround.planning.partition import Partition, split_evenly
from torchround.planning.stage_times import KeptLink, LayerSums
from torchround.planning.step_time import step_seconds
from torchround.planning.update_modes import mode_of

# A step that overlaps others and waits for its weights, not for a device, gets longer when an update takes longer than
# the costs say. So among steps of about the same length the search prefers the one with less idle time.
IDLE_WEIGHT = 0.5
# The choice of what to keep is made in this many steps, from nothing to everything.
KEPT_STEPS = 32
# Layers whose times differ by up to this factor count as equal.
MOST_UNEQUAL = 1.5


@dataclass(frozen=True)
class Candidate:
    """A partition with its number of rounds, and how many of the problem's items it keeps."""

    partition: Partition
    rounds: int
    kept: int = 0


@dataclass(eq=False)
class PlanningProblem:
    """A question to the planner: layer costs, devices, micro-batches, update mode and memory limits.

    - `stale_layers`: their number K, 0 unless the mode updates by layer. None leaves it open: each plan is timed with all
      layers before its fused stage stale, and its memory is counted with none. So no K makes it faster or smaller.
    - `link`: the link of each device to the host; None takes all transfers as hidden.
    - `items`: what a plan may keep beside what `costs` keep, in the order in which it is chosen.
    """

    costs: Costs
    num_devices: int
    num_micro_batches: int
    update: str
    limits: MemoryLimits
    stale_layers: int | None = 0
    link: KeptLink | None = None
    items: Sequence[KeptItem] = ()

    def __post_init__(self) -> None:
        costs, items = self.costs, self.items
        self.mode, self.num_layers = mode_of(self.update), costs.num_layers
        self.stale_layers = self.stale_layers if self.mode.updates_by_layer else 0
        self.overlaps = self.mode.overlaps(self.stale_layers)
        self.idle_weight = IDLE_WEIGHT if self.overlaps else 0.0
        # A few layers may differ: embedding and head do. Fewer micro-batches than devices never fill all of these.
        by_time = sorted(layer.forward_s + layer.backward_s for layer in costs.layers)
        tenth = min(len(by_time) // 10 + 2, len(by_time))
        alike = by_time[-tenth] <= MOST_UNEQUAL * by_time[tenth - 1]
        self.sorts_stages = alike and self.num_micro_batches >= self.num_devices
        self.batch = self.limits.batch or HostBatch((0,) * self.num_micro_batches, (costs,))
        self.amounts = sorted({round(len(items) * part / KEPT_STEPS) for part in range(KEPT_STEPS + 1)})
        self._sums: dict[int, tuple[Costs, LayerSums]] = {}
        self._steps: dict[Candidate, float] = {}
        self._host: dict[Candidate, int] = {}

    def costs_of(self, kept: int) -> Costs:
        return self._known(kept)[0]

    def sums_of(self, kept: int) -> LayerSums:
        return self._known(kept)[1]

    def _known(self, kept: int) -> tuple[Costs, LayerSums]:
        if kept not in self._sums:
            costs = self.costs.keeping(kept_names(self.costs, self.items[:kept])) if kept else self.costs
            if self.stale_layers and costs.kept:
                # The forward of a stale layer has computed with older weights than its backward does.
                stale = self.stale_layers
                costs = costs.keeping(
                    [names if layer >= stale else () for layer, names in enumerate(costs.kept)]
                )
            sums = LayerSums(costs, self.limits.recompute, self.link, self.num_micro_batches)
            self._sums[kept] = costs, sums
        return self._sums[kept]

    def exact_s(self, candidate: Candidate) -> float:
        """Compute the step time by the exact recurrence, once for each candidate."""
        if candidate not in self._steps:
            host_s = self.sums_of(candidate.kept).host_s(candidate.rounds, candidate.partition)
            launches_s = self.num_micro_batches * self.costs.launch_s
            step_s = self.simulated_s(candidate, self.stale_layers)
            self._steps[candidate] = max(step_s, host_s, launches_s)
        return self._steps[candidate]

    def simulated_s(self, candidate: Candidate, stale_layers: int | None) -> float:
        """Compute the seconds in which the devices run a step with this number of stale layers; None is the most."""
        stale = self.num_layers if stale_layers is None else stale_layers
        sums, partition = self.sums_of(candidate.kept), candidate.partition
        times = sums.times(partition, self.mode.name, candidate.rounds, stale)
        return step_seconds(times, self.num_devices, self.num_micro_batches, candidate.rounds)

    def busy_s(self, candidate: Candidate) -> float:
        """Compute the seconds that all devices together are busy with a step, or wait for the link."""
        early_s, late_s = self.sums_of(candidate.kept).seconds(candidate.partition, candidate.rounds)
        return self.num_micro_batches * (sum(early_s) + sum(late_s)) + self.costs.job_s

    def device_s(self, candidate: Candidate) -> list[float]:
        """Bound the step time by each device, in dispatch order: it idles until its first input and after its last output.

        Steps without a flush follow each other, so devices take turns with the slots of a step: those that are a common
        divisor of both numbers apart are done by as many devices.
        """
        early_s, late_s = self.sums_of(candidate.kept).seconds(candidate.partition, candidate.rounds)
        total_s, devices, hop_s = list(map(add, early_s, late_s)), self.num_devices, self.costs.hop_s
        sizes = [len(part) for part in split_evenly(self.num_micro_batches, candidate.rounds)]
        slots_s = [size * seconds for size in sizes for seconds in total_s]
        if not self.mode.has_flush:
            apart = gcd(len(slots_s), devices)
            return [sum(slots_s[first::apart]) * apart / devices for first in range(apart)]
        stages, busy_s = len(total_s), []
        arrival_s = [0.0, *accumulate(seconds + hop_s for seconds in late_s)]
        for first in range(min(devices, stages)):
            last = stages - 1 - (len(slots_s) - 1 - first) % devices
            ends_s = arrival_s[-1] - arrival_s[last + 1] if last >= 0 else 0.0
            begins_s = arrival_s[first + 1] - total_s[first] - hop_s
            busy_s.append(begins_s + sum(slots_s[first::devices]) + ends_s)
        return busy_s

    def least_rank_s(self, candidate: Candidate) -> float:
        """Bound the rank of a candidate, several times as fast as it is timed."""
        device_s = self.device_s(candidate)
        most_s = max(device_s)
        busy_s = sum(device_s) / len(device_s) + self.costs.job_s / self.num_devices
        return most_s + self.idle_weight * (most_s - busy_s)

    def rank_s(self, candidate: Candidate) -> float:
        """Compute what the search minimises: the step time, and in modes without a flush part of a device's idle time."""
        step_s = self.exact_s(candidate)
        if not self.idle_weight:
            return step_s
        return step_s + self.idle_weight * (step_s - self.busy_s(candidate) / self.num_devices)

    def bubble(self, candidate: Candidate, step_s: float) -> float:
        return 1 - self.busy_s(candidate) / (self.num_devices * step_s) if step_s else 0.0

    def fits_limits(self, candidate: Candidate) -> bool:
        partition, limit = candidate.partition, self.limits.host_bytes
        if (self.stale_layers or 0) > self.num_layers - partition.fused:
            return False
        if not self.fits_device(partition, candidate.rounds, candidate.kept):
            return False
        return limit is None or self.host_bytes(candidate) <= limit

    def fits_device(self, partition: Partition, rounds: int, kept: int = 0) -> bool:
        limit = self.limits.device_bytes
        return limit is None or self.device_bytes(partition, rounds, kept) <= limit

    def device_bytes(self, partition: Partition, rounds: int, kept: int = 0) -> int:
        run = self.num_devices, self.num_micro_batches, rounds, self.limits, self.stale_layers or 0
        return device_memory(partition, self.costs_of(kept), *run).total_bytes

    def boundary_bytes(self, candidate: Candidate) -> int:
        if candidate not in self._host:
            kept = self.costs_of(candidate.kept).kept
            stale = self.stale_layers or 0
            run = candidate.partition, candidate.rounds, self.num_devices, self.mode.name, stale
            self._host[candidate] = self.batch.boundary_bytes(*run, kept)
        return self._host[candidate]

    def host_bytes(self, candidate: Candidate) -> int:
        nbytes = self.boundary_bytes(candidate) + self.batch.integers_and_losses_bytes()
        if candidate.rounds > 1:
            nbytes += self.limits.rounds_bytes
        if self.limits.devices_on_host:
            device_bytes = self.device_bytes(candidate.partition, candidate.rounds, candidate.kept)
            nbytes += self.limits.devices_on_host * device_bytes
        return nbytes
