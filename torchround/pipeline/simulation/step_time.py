"""The exact time of one training step of a partition: a recurrence that takes O(1) per stage slot.

Within a round, micro-batch `m` leaves a stage at `max over lines (base + slope x m)`. A stage of duration d
that a device may start at r adds the line (r + d, d). Stages in a row are as fast as the slowest of them, so every
slope below d becomes d. So a slot costs the same for 1 or 1000 micro-batches,
and the result equals that of the event simulator (a test compares the two).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition, slots_before_late_jobs, split_evenly
from torchround.pipeline.rates import RATES
from torchround.pipeline.simulation.kept_link import LinkWaits
from torchround.pipeline.simulation.update_jobs import UpdateJob, run_jobs, update_jobs

NEVER = float("-inf")
# Most steps to run until one repeats; after that the steady state comes from the transition matrix.
MAX_WARM_UP_STEPS = 24

Lines = tuple[list[float], list[float]]
NextState = Callable[[Sequence[float]], list[float]]


@dataclass(frozen=True)
class StageTimes:
    """The seconds of a partition's stages, in dispatch order.

    - `entry_s`: from the previous stage's output of a micro-batch to this stage's, hop included, if the
      device is free.
    - `total_s`: busy time per micro-batch.
    - `updated_after_s`: from the start of the update until the optimizer has updated all layers that the
      stage reads.
    - `boundary_from`: the forward stage whose output a recomputation may have to wait for; -1 if the gradient
      always arrives later anyway.
    - `jobs`: what devices do for the update, with `job_from`, the stage that completes each job's gradient.
    - `num_forward`: the number of forward stages.
    """

    entry_s: Sequence[float]
    total_s: Sequence[float]
    updated_after_s: Sequence[float]
    boundary_from: Sequence[int]
    hop_s: float
    jobs: Sequence[UpdateJob] = ()
    job_from: Sequence[int] = ()
    num_forward: int = 0

    @property
    def update_s(self) -> float:
        """Seconds of one update of all layers."""
        return max(self.updated_after_s)


class LayerSums:
    """Running sums over the layers, which give any stage's seconds in two look-ups; they agree with `stage_seconds`.

    With `link_waits`, stages also wait for the link.
    """

    def __init__(self, costs: Costs, recompute: str = "stage", link_waits: LinkWaits | None = None) -> None:
        self.hop_s = costs.hop_s
        self.forward_s = [0.0, *accumulate(layer.forward_s for layer in costs.layers)]
        self.recompute_s = [0.0, *accumulate(layer.recompute_s for layer in costs.layers)]
        self.backward_s = [0.0, *accumulate(layer.backward_s for layer in costs.layers)]
        self.updated_s = [0.0, *accumulate(layer.optimizer_s for layer in costs.layers)]
        self.recompute = recompute
        self.link_waits = link_waits
        self.adding_share = costs.adding_share
        self.completed_with = costs.completed_with()
        self.updates_take_time = self.updated_s[-1] > 0
        self.jobs = update_jobs(costs)

    def times(
        self,
        forward: Sequence[int],
        fused: int,
        backward: Sequence[int],
        stale_layers: int = 0,
        rounds: int = 1,
    ) -> StageTimes:
        """Compute the stage times of the partition with these layer counts.

        In `bounded`, a recomputation starts each layer up to `stale_layers` from its own input. The waits for a link
        depend on the number of rounds.
        """
        starts = [0, *accumulate(forward)]
        split, num_layers = starts[-1], starts[-1] + fused
        cuts = [split]
        for count in backward:
            cuts.append(cuts[-1] - count)
        sums, again, back, hop_s = self.forward_s, self.recompute_s, self.backward_s, self.hop_s
        ranges = [(start, stop) for stop, start in pairwise(cuts)]
        total = [sums[stop] - sums[start] for start, stop in pairwise(starts)]
        total.append(sums[-1] - sums[split] + back[-1] - back[split])
        # A backward stage recomputes while its gradient is still on
        # its way, so only the rest is on the path of the gradient.
        before = [again[stop] - again[start] for start, stop in ranges]
        after = [back[stop] - back[start] for start, stop in ranges]
        if self.recompute == "layer":
            total[-1] += sums[num_layers - 1] - sums[split]
            after = [
                seconds + again[stop - 1] - again[start]
                for seconds, (start, stop) in zip(after, ranges, strict=True)
            ]
        if self.link_waits is not None:
            link_s = self.link_waits.of(Partition(tuple(forward), fused, tuple(backward)), rounds)
            total = [seconds + wait_s for seconds, wait_s in zip(total, link_s, strict=False)]
            before = [seconds + wait_s for seconds, wait_s in zip(before, link_s[len(total) :], strict=True)]
        entry = [seconds + hop_s for seconds in total] + [seconds + hop_s for seconds in after]
        total += [first_s + rest_s for first_s, rest_s in zip(before, after, strict=True)]
        updated = [0.0] * len(total)
        if self.updates_take_time:
            updated = [self.updated_s[stop] for stop in (*starts[1:], num_layers, *cuts[:-1])]
        waits = _boundary_waits(starts, cuts, before, entry, stale_layers)
        # The first stage, from the fused one on, that reaches down to a layer completes its gradient.
        job_from = [
            next(len(forward) + index for index, cut in enumerate(cuts) if cut <= job.layer)
            for job in self.jobs
        ]
        return StageTimes(entry, total, updated, waits, hop_s, self.jobs, job_from, len(forward))

    def host_s(self, rounds: int, partition: Partition | None = None) -> float:
        """Compute the least seconds per step of the host's memory: the update, sums over rounds, a partition's copies."""
        update_s = self.updated_s[-1]
        if rounds > 1:
            update_s *= 1 + rounds * self.adding_share
        if partition is None or self.link_waits is None:
            return update_s
        moved_bytes = update_s * RATES.update_bytes_per_s + self.link_waits.moved_bytes(partition, rounds)
        return max(update_s, moved_bytes / RATES.host_bytes_per_s)

    def work_s(self, fused: int) -> float:
        """Compute the least busy seconds of one micro-batch in any partition with this fused stage.

        With `recompute = "layer"` a layer of the fused stage is computed twice too, except the last.
        """
        num_layers = len(self.forward_s) - 1
        split = num_layers - fused
        once = split if self.recompute == "stage" else num_layers - 1
        saved_s = self.forward_s[split] - self.recompute_s[split]
        return self.forward_s[-1] + self.backward_s[-1] + (self.forward_s[once] - saved_s)


def stage_times(
    partition: Partition,
    costs: Costs,
    recompute: str = "stage",
    link_waits: LinkWaits | None = None,
    rounds: int = 1,
) -> StageTimes:
    """Compute the times of each stage of `partition`; the last two arguments are as in `LayerSums`."""
    sums = LayerSums(costs, recompute, link_waits)
    return sums.times(partition.forward, partition.fused, partition.backward, rounds=rounds)


def _boundary_waits(
    starts: Sequence[int],
    cuts: Sequence[int],
    before_s: Sequence[float],
    entry_s: Sequence[float],
    stale_layers: int,
) -> list[int]:
    """Find the recomputations that may have to wait for their boundary activation, as `StageTimes.boundary_from`.

    A recomputation of e seconds never waits if its gradient arrives at least e seconds after the boundary.
    `starts`: first layers of the forward stages and of the fused one; `cuts`: first layers of the fused stage
    and of the backward ones.
    """
    num_forward = len(starts) - 1
    waits = [-1] * (num_forward + 1)
    # The common case, found without a loop: the fused stage alone takes longer than any recomputation.
    if not before_s or max(before_s) <= entry_s[num_forward]:
        return waits + [-1] * len(before_s)  # each gradient has been through the fused stage
    arrival = [0.0, *accumulate(entry_s)]
    producer = num_forward - 1
    for index, (stop, start) in enumerate(pairwise(cuts)):
        # The last input that the recomputation takes from the host: it arrives after the others.
        cut = max(start, min(stop - 1, stale_layers))
        while producer > 0 and starts[producer] >= cut:
            producer -= 1
        chain_s = arrival[num_forward + 1 + index] - arrival[producer + 1]
        waits.append(producer if cut > 0 and chain_s < before_s[index] else -1)
    return waits


def step_seconds(
    times: StageTimes, num_devices: int, num_micro_batches: int, rounds: int, update: str
) -> float:
    """Compute the seconds per training step in the steady state.

    `"sync"`: from the start of one step's update, at its last gradient or direction, to that of the next. The update starts at the former, and each
    stage waits for the update of its layers. `"async"`: step t+2 waits for the update with step t's gradient,
    and steps follow each other without a flush.
    """
    sizes = [len(part) for part in split_evenly(num_micro_batches, rounds)]
    if update == "sync":
        return run_step(times, sizes, [0.0] * num_devices, 0.0)
    return _steady_state_seconds(times, sizes, num_devices)


def run_step(
    times: StageTimes, round_sizes: Sequence[int], free: list[float], update_start_s: float
) -> float:
    """Run one step's slots; `free[k]` is when the device of the k-th next slot becomes free.

    Stages start no earlier than `update_start_s + updated_after_s`. Updates `free` in place, in the order of the slots
    that follow the step. Returns when the step's own update can start: all gradients and directions are there.
    """
    ready_s = [update_start_s + updated_s for updated_s in times.updated_after_s]
    ends = run_slots(times, round_sizes, free, ready_s)
    last_s = max(free)
    if not times.jobs:
        return last_s
    in_last_round = ends[-len(times.total_s) :]
    return max(last_s, run_jobs(times.jobs, [in_last_round[stage] for stage in times.job_from], free))


def run_slots(
    times: StageTimes,
    round_sizes: Sequence[int],
    free: list[float],
    ready_s: Sequence[float],
    between: Callable[[int], None] | None = None,
    at: int = 0,
) -> list[float]:
    """Run one step's slots, whose stages start no earlier than `ready_s`; return when each slot ends.

    `free` is as in `run_step`. `between` is called after the first `at` slots, with the index in `free` of the device
    that takes the next one.
    """
    stages = list(zip(times.entry_s, times.total_s, ready_s, times.boundary_from, strict=True))
    ends: list[float] = []
    for size in round_sizes:
        _run_round(stages, size, free, times.hop_s, ends, between, at)
    slot = len(ends) % len(free)
    if between is not None and at == len(ends):
        between(slot)
    # Slots take devices in turn without a restart, so the
    # next step begins with the device after the last slot's.
    free[:] = free[slot:] + free[:slot]
    return ends


def _run_round(
    stages: Sequence[tuple[float, float, float, int]],
    size: int,
    free: list[float],
    hop_s: float,
    ends: list[float],
    between: Callable[[int], None] | None,
    at: int,
) -> None:
    """Run a round of `size` micro-batches; add the ends of its slots to `ends`, which holds the slots before them.

    Updates `free`. A stage is a tuple of its entry and total seconds, of the time at which its weights are
    ready, and of its boundary stage.
    """
    num_devices, last = len(free), size - 1
    slot = len(ends) % num_devices
    # The outputs of the stage before, as lines with falling slopes and rising bases: micro-batch m leaves at
    # `shift + max(base + slope x m)`.
    slopes: list[float] = []
    bases: list[float] = []
    shift = 0.0
    outputs: list[Lines] = []  # the same of each stage, for recomputations
    keeps_outputs = any(stage[3] >= 0 for stage in stages)
    for entry_s, total_s, ready_s, producer in stages:
        if between is not None and len(ends) == at:
            between(slot)
        # Each line gets later by the entry time. One shift for all of them keeps a slot at O(1).
        if slopes:
            shift += entry_s
        start = max(free[slot], ready_s)
        base = start + total_s - shift
        if producer >= 0:
            _wait_for_boundary(outputs[producer], hop_s + total_s - shift, slopes, bases)
        # Slopes below this stage's duration become that duration, so only the latest of their lines matters.
        while slopes and slopes[-1] <= total_s:
            slopes.pop()
            base = max(base, bases.pop())
        if not slopes or base > bases[-1]:
            slopes.append(total_s)
            bases.append(base)
        # The device is free once the last micro-batch has left: the largest line at m = size - 1.
        end = bases[0] + slopes[0] * last
        for other in range(1, len(slopes)):
            end = max(end, bases[other] + slopes[other] * last)
        free[slot] = end + shift
        ends.append(free[slot])
        slot = slot + 1 if slot + 1 < num_devices else 0
        if keeps_outputs:
            outputs.append((list(slopes), [base + shift for base in bases]))


def _wait_for_boundary(boundary: Lines, delay_s: float, slopes: list[float], bases: list[float]) -> None:
    """Add the lines of a recomputation's boundary to `slopes` and `bases`."""
    lines = list(zip(slopes, bases, strict=True))
    lines += [(slope, arrival + delay_s) for slope, arrival in zip(*boundary, strict=True)]
    slopes.clear()
    bases.clear()
    for slope, base in sorted(lines, reverse=True):
        if not slopes or base > bases[-1]:
            slopes.append(slope)
            bases.append(base)


def _steady_state_seconds(times: StageTimes, sizes: Sequence[int], num_devices: int) -> float:
    """Compute the seconds per step in the steady state of `async`.

    The state is the times at which each device becomes free and at which the last two updates started.
    """
    return steady_state_seconds(lambda state: _next_state(times, sizes, state), num_devices + 2, -2)


def steady_state_seconds(next_state: NextState, dimension: int, mark: int) -> float:
    """Compute the growth of a state per step once it repeats, or from the transition matrix if that takes long.

    `next_state` maps a state of `dimension` times to the one after a step, linearly in the (max, +) algebra.
    Entry `mark` of the state tells how far it has grown.
    """
    state = [0.0] * dimension
    seen: list[list[float]] = []
    # The matrix of a larger state takes longer, so more steps are worth a try first.
    for _ in range(MAX_WARM_UP_STEPS * max(1, dimension // 10)):
        state = next_state(state)
        for back, earlier in enumerate(reversed(seen), start=1):
            if _same_shape(earlier, state, mark):
                return (state[mark] - earlier[mark]) / back
        seen.append(list(state))
    return _largest_cycle_mean(_transition(next_state, dimension))


def _next_state(times: StageTimes, sizes: Sequence[int], state: Sequence[float]) -> list[float]:
    if times.jobs:
        return _next_state_with_jobs(times, sizes, state)
    *free, last_update, update_before = state
    complete_s = run_step(times, sizes, free, update_before)
    return [*free, max(complete_s, last_update + times.update_s), last_update]


def _next_state_with_jobs(times: StageTimes, sizes: Sequence[int], state: Sequence[float]) -> list[float]:
    """Run a step and the jobs of the step before. The state ends with that step's last gradient, and the last update."""
    *free, gradients_s, last_update = state
    at = slots_before_late_jobs(times.num_forward, len(sizes) * len(times.total_s), len(free))
    back_s: list[float] = []

    def run_last_jobs(first: int) -> None:
        back_s.append(run_jobs(times.jobs, [gradients_s] * len(times.jobs), free, first))

    ready_s = [last_update + updated_s for updated_s in times.updated_after_s]
    ends = run_slots(times, sizes, free, ready_s, run_last_jobs, at)
    # The host's update of the step before, which the step after next reads.
    return [*free, max(ends), max(*back_s, gradients_s, last_update + times.update_s)]


def _same_shape(one: Sequence[float], other: Sequence[float], mark: int) -> bool:
    """Check whether two states are equal up to a constant, to 1e-12 of the times themselves."""
    shift, tolerance = other[mark] - one[mark], 1e-12 * abs(other[mark])
    return all(abs(b - a - shift) <= tolerance for a, b in zip(one, other, strict=True))


def _transition(next_state: NextState, dimension: int) -> list[list[float]]:
    """Compute the step as a (max, +) matrix: row j is the state after a step that entry j alone delays."""
    units = ([NEVER] * j + [0.0] + [NEVER] * (dimension - j - 1) for j in range(dimension))
    return [next_state(unit) for unit in units]


def _largest_cycle_mean(weights: Sequence[Sequence[float]]) -> float:
    """Compute the rate at which a (max, +) linear system grows, by Karp's theorem.

    `weights[j][i]` is the weight of the edge from j to i. With F_k(i) the heaviest k-edge walk that ends in
    i, started anywhere: max over i of min over k < n of (F_n(i) - F_k(i)) / (n - k).
    """
    n = len(weights)
    heaviest = [[0.0] * n]
    for _ in range(n):
        before = heaviest[-1]
        heaviest.append([max(before[j] + weights[j][i] for j in range(n)) for i in range(n)])
    return max(
        min((heaviest[n][i] - heaviest[k][i]) / (n - k) for k in range(n) if heaviest[k][i] > NEVER)
        for i in range(n)
        if heaviest[n][i] > NEVER
    )
