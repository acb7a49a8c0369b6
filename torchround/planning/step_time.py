"""The exact time of one training step of a partition: a recurrence that takes O(1) per stage of a round.

Within a round, micro-batch `m` leaves a stage at `max over lines (base + slope x m)`. A stage of duration d
that a device may start at r adds the line (r + d, d). Stages in a row are as fast as the slowest of them, so every
slope below d becomes d. So a stage costs the same for 1 or 1000 micro-batches,
and the result equals that of the event simulator (a test compares the two).

One step maps a state of times to the next one, in every update mode. `StageTimes.waits` is what differs.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import NamedTuple

from torchround.planning.partition import slots_before_late_jobs, split_evenly
from torchround.planning.stage_times import StageTimes

NEVER = float("-inf")
# Most steps to run until one repeats; after that the steady state comes from the transition matrix.
MAX_WARM_UP_STEPS = 24


def step_seconds(times: StageTimes, num_devices: int, num_micro_batches: int, rounds: int = 1) -> float:
    """Compute the seconds per training step in the steady state.

    With a flush that is from the start of one step's update, at its last gradient or direction, to that of the next.
    Otherwise steps follow each other without a flush: the growth of the state per step once it repeats, or from the
    transition matrix if that takes long.
    """
    sizes, groups = [len(part) for part in split_evenly(num_micro_batches, rounds)], len(times.group_s)
    dimension, seen = num_devices + times.known_updates * groups, list[list[float]]()
    if times.mode.has_flush:
        # Devices are idle when an update starts, so every step is like the first one.
        first = _State([0.0] * num_devices, [0.0] * groups, [NEVER] * groups)
        return _next_state(times, sizes, first).complete[0]

    def after_step(state: list[float]) -> list[float]:
        free, rest = state[:num_devices], state[num_devices:]
        return list(chain(*_next_state(times, sizes, _State(free, rest[:groups], rest[groups:]))))

    state = [0.0] * dimension
    # The matrix of a larger state takes longer, so more steps are worth a try first.
    for _ in range(MAX_WARM_UP_STEPS * max(1, dimension // 10)):
        state = after_step(state)
        for back, earlier in enumerate(reversed(seen), start=1):
            if _same_shape(earlier, state):
                return (state[0] - earlier[0]) / back
        seen.append(state)
    # A step is linear in the (max, +) algebra: row j of its matrix is the state after a step that entry j alone delays.
    units = ([NEVER] * j + [0.0] + [NEVER] * (dimension - j - 1) for j in range(dimension))
    return _largest_cycle_mean(list(map(after_step, units)))


class _State(NamedTuple):
    """The times that one step leaves to the next one."""

    free: list[float]  # when each device becomes free
    complete: list[float]  # when the gradients of each group are complete
    started: list[float]  # when the updates before theirs started with each group, the oldest first


def _next_state(times: StageTimes, sizes: Sequence[int], state: _State) -> _State:
    groups, num_stages, jobs = len(times.group_s), len(times.total_s), times.jobs
    free, complete, before = state.free, state.complete, state.started[-groups:]
    updates = _update_starts(times.group_s, complete, before)
    started = [*state.started, *updates]
    ready_s = [started[source] + after_s for source, after_s in times.waits]

    def run_late_jobs(first: int) -> None:
        """Run the jobs for the update with the gradients of the step before, which this step does not read."""
        complete[0] = max(complete[0], run_jobs(jobs, complete * len(jobs), free, first))
        updates[:] = _update_starts(times.group_s, complete, before)

    late = run_late_jobs if jobs and times.mode.versions > 1 else None
    at = slots_before_late_jobs(len(times.partition.forward), len(sizes) * num_stages, len(free))
    ends = run_stages(times, sizes, free, ready_s, late, at)
    finished = ends[-groups:] if times.mode.updates_by_layer else [max(ends)]
    if jobs and times.mode.has_flush:
        last = ends[-num_stages:]
        finished.append(run_jobs(jobs, [last[stage] for stage, _, _ in jobs], free))
        finished = [max(finished)]
    return _State(free, finished, [*state.started[groups:], *updates])


def _update_starts(
    group_s: Sequence[float], complete: Sequence[float], before: Sequence[float]
) -> list[float]:
    """Compute when the host starts to update each group: one after the other, after those of the step before."""
    starts, done_s = [], before[-1] + group_s[-1]
    for complete_s, seconds in zip(complete, group_s, strict=True):
        starts.append(max(complete_s, done_s))
        done_s = starts[-1] + seconds
    return starts


def run_jobs(
    jobs: Sequence[tuple[int, float, float]], complete_s: Sequence[float], free: list[float], first: int = 0
) -> float:
    """Run what devices do for an update; return when the last direction is back on the host, or 0 if there are no jobs.

    The orthogonalisation of Muon is one job for each layer. Jobs are dealt to the devices in turn; the one at index
    `first` of `free` takes the first. A job begins once its layer's gradient is complete, at `complete_s`: the host's
    look-ahead goes up, the device computes, and the direction comes down. The copies of one job run beside the
    computation of others. Jobs follow the stages of their step, or with several versions come among those of the next.
    `free` is as in `run_stages`.
    """
    num_devices, back_s = len(free), 0.0
    # Between steps both directions of the link have time enough, so each device's link is free at its first job.
    up_s, down_s = [0.0] * num_devices, [0.0] * num_devices
    for index, ((_, seconds, link_s), ready_s) in enumerate(zip(jobs, complete_s, strict=True)):
        device = (first + index) % num_devices
        up_s[device] = max(up_s[device], ready_s) + link_s
        free[device] = max(free[device], up_s[device]) + seconds
        down_s[device] = max(down_s[device], free[device]) + link_s
        back_s = max(back_s, down_s[device])
    return back_s


def run_stages(
    times: StageTimes,
    round_sizes: Sequence[int],
    free: list[float],
    ready_s: Sequence[float],
    between: Callable[[int], None] | None = None,
    at: int = 0,
) -> list[float]:
    """Run the stages of one step, round by round, each no earlier than `ready_s`; return when each ends.

    Stages go to the devices in turn. `free[k]`, which is updated in place for the next step, is when the device of the k-th
    next one becomes free. `between` is called after the first `at` stages, with the index in `free` of the next one's device.
    """
    num_devices, device = len(free), 0
    stages = list(zip(times.entry_s, times.total_s, ready_s, times.boundary_from, strict=True))
    keeps_outputs = max(times.boundary_from) >= 0
    ends: list[float] = []
    for size in round_sizes:
        # The outputs of the stage before, as lines with falling slopes and rising bases: micro-batch m leaves at
        # `shift + max(base + slope x m)`.
        slopes: list[float] = []
        bases: list[float] = []
        shift = 0.0
        outputs: list[tuple[list[float], list[float]]] = []  # the same of each stage, for recomputations
        for entry_s, total_s, weights_s, producer in stages:
            if between is not None and len(ends) == at:
                between(device)
            # Each line gets later by the entry time. One shift for all of them keeps a stage at O(1).
            if slopes:
                shift += entry_s
            base = max(free[device], weights_s) + total_s - shift
            if producer >= 0:
                delay_s = times.hop_s + total_s - shift
                arrivals = [
                    (slope, arrival + delay_s) for slope, arrival in zip(*outputs[producer], strict=True)
                ]
                slopes, bases = _latest([*zip(slopes, bases, strict=True), *arrivals])
            # Slopes below this stage's duration become that duration, so only the latest of their lines matters.
            while slopes and slopes[-1] <= total_s:
                slopes.pop()
                if (earlier := bases.pop()) > base:
                    base = earlier
            if not slopes or base > bases[-1]:
                slopes.append(total_s)
                bases.append(base)
            # The device is free once the last micro-batch has left: the largest line at m = size - 1.
            end = bases[0] + slopes[0] * (size - 1)
            for other in range(1, len(slopes)):
                if (other_end := bases[other] + slopes[other] * (size - 1)) > end:
                    end = other_end
            free[device] = end + shift
            ends.append(free[device])
            device = device + 1 if device + 1 < num_devices else 0
            if keeps_outputs:
                outputs.append((list(slopes), [base + shift for base in bases]))
    if between is not None and at == len(ends):
        between(device)
    # Turns do not restart: the next step begins with the device after the last stage's.
    free[:] = free[device:] + free[:device]
    return ends


def _latest(lines: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the slopes and bases of the lines that are the largest one somewhere, or may be."""
    slopes: list[float] = []
    bases: list[float] = []
    for slope, base in sorted(lines, reverse=True):
        if not slopes or base > bases[-1]:
            slopes.append(slope)
            bases.append(base)
    return slopes, bases


def _same_shape(one: Sequence[float], other: Sequence[float]) -> bool:
    """Check whether two states are equal up to a constant, to 1e-12 of the times themselves."""
    shift, tolerance = other[0] - one[0], 1e-12 * abs(other[0])
    return all(abs(b - a - shift) <= tolerance for a, b in zip(one, other, strict=True))


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
