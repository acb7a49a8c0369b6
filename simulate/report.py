"""Schedules as the simulator takes them, and the report on their runs.

A schedule that flushes is measured over one step from idle devices. A continuous one, whose steps flow into
each other, runs for many steps and is measured once the time from step to step has settled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torchround.engine.timeline import COMPUTE, Task, TaskKind
from torchround.simulate.events import Run, simulate, steady_state

GAPS = ("fill", "drain", "switch", "imbalance")


@dataclass(frozen=True)
class Schedule:
    """The tasks of any number of steps, and how to read their run.

    - `tasks(steps)` builds the tasks.
    - `partition`: layers per virtual stage, or RoundPipe's ranges; goes to JSON as it is.
    - `is_bound`: a wait for the first backward counts as `switch` after the first N - i forwards of device i;
      if False, after all forwards before that backward.
    - `ready_first`: devices take what is ready instead of following their order.
    - `tail_steps`: steps at the end of a continuous run that end sooner because nothing follows them; None: steps flush.
    - `backwards_per_update`: after how many of its backwards a stage updates its weights.
    - `update_s`: seconds per step that all devices wait for the optimizer.
    """

    name: str
    num_devices: int
    partition: Any
    tasks: Callable[[int], list[Task]]
    is_bound: bool = False
    ready_first: bool = False
    tail_steps: int | None = None
    backwards_per_update: int | None = None
    update_s: float = 0.0


@dataclass(frozen=True)
class ScheduleReport:
    """The figures of one schedule.

    - `bubble_by_kind`: shares of all device time, which add up to `bubble`.
    - `peak_activation_bytes`: one figure per device.
    - `drift`: most updates of a stage between a micro-batch's forward and its backward there.
    - `moved_bytes`: per step, over all links.
    - `timeline`: one step, or several steps of a continuous schedule.
    """

    name: str
    makespan_s: float
    bubble: float
    bubble_by_kind: dict[str, float]
    peak_activation_bytes: tuple[int, ...]
    drift: int
    moved_bytes: float
    partition: Any
    timeline: Run

    def to_json(self) -> dict[str, Any]:
        """Return the figures that `--json` writes."""
        names = ("makespan_s", "bubble", "bubble_by_kind", "peak_activation_bytes", "drift", "partition")
        return {name: getattr(self, name) for name in names}


def measure_schedule(schedule: Schedule) -> ScheduleReport:
    """Simulate a schedule and read everything off its timeline."""
    devices, ready_first, tail_steps = schedule.num_devices, schedule.ready_first, schedule.tail_steps
    if tail_steps is not None:
        line, makespan_s, steps = steady_state(schedule.tasks, devices, ready_first, tail_steps)
    else:
        line, steps = simulate(schedule.tasks(1), devices, ready_first), 1
        makespan_s = line.makespan_s + schedule.update_s
    total_s = devices * makespan_s
    # Rounding may leave a bubble just below 0.
    bubble = max(0.0, 1 - line.work_s / steps / total_s) if total_s > 0 else 0.0
    # Steps that flow into each other have no fill or drain to tell apart.
    shares = {**dict.fromkeys(GAPS, 0.0), "imbalance": bubble}
    if tail_steps is None and total_s > 0:
        idle_s = _idle_seconds(line, schedule.is_bound)
        # All devices wait for the update after their last task, as they wait for each other while they drain.
        idle_s["drain"] += devices * schedule.update_s
        shares = {gap: idle_s[gap] / total_s for gap in GAPS}
    return ScheduleReport(
        name=schedule.name,
        makespan_s=makespan_s,
        bubble=bubble,
        bubble_by_kind=shares,
        peak_activation_bytes=line.peak_bytes(),
        drift=_drift(line, schedule.backwards_per_update),
        moved_bytes=sum(task.moves_bytes for task in line.tasks) / steps,
        partition=schedule.partition,
        timeline=line,
    )


def _idle_seconds(line: Run, is_bound: bool) -> dict[str, float]:
    """Split the idle device seconds of one flushed step by kind, as RoundPipe's artifact does.

    For each device: `fill` is before its first task, `drain` after its last, `switch` between a warm-up
    forward (see `Schedule`) and its first backward. `imbalance` is the rest: waits between stages of unequal
    length. A recomputation counts as if it had started just in time for its backward.
    """
    idle_s = dict.fromkeys(GAPS, 0.0)
    for device in range(line.num_devices):
        order = line.of_device(device)
        if not order:
            idle_s["fill"] += line.makespan_s
            continue
        gaps = [line.start_s[order[0]]]
        for before, index in pairwise(order):
            gaps.append(line.start_s[index] - line.end_s[before])
            # A recomputation may run early, in time that would be idle anyway; counted late, the kinds are comparable.
            if line.tasks[before].kind is TaskKind.RECOMPUTE:
                gaps[-2] += gaps[-1]
                gaps[-1] = 0.0
        forwards = [line.tasks[index].kind is TaskKind.FORWARD for index in order]
        first_backward = forwards.index(False) if False in forwards else 0
        warm_up = min(line.num_devices - device, first_backward) if is_bound else first_backward
        switch_s = sum(gaps[warm_up : first_backward + 1]) if first_backward else 0
        idle_s["fill"] += gaps[0]
        idle_s["drain"] += line.makespan_s - line.end_s[order[-1]]
        idle_s["switch"] += switch_s
        idle_s["imbalance"] += sum(gaps[1:]) - switch_s
    return idle_s


def _drift(line: Run, backwards_per_update: int | None) -> int:
    """Count the most updates of a device's stage from a micro-batch's forward to its backward (PACI section 3.1).

    The count follows the order in which each device ran its tasks; it is 0 if no update falls inside a step.
    """
    if backwards_per_update is None:
        return 0
    drift = 0
    backwards = [0] * line.num_devices
    version_read: dict[tuple[int, int], int] = {}
    # An empty stage has no weights.
    computed = [index for index, task in enumerate(line.tasks) if task.stream == COMPUTE and task.layers]
    # A task that takes no time comes before one that starts at the same moment.
    for index in sorted(computed, key=lambda i: (line.start_s[i], line.end_s[i], i)):
        task = line.tasks[index]
        version = backwards[task.device] // backwards_per_update
        if task.kind is TaskKind.FORWARD:
            version_read[task.device, task.micro_batch] = version
        elif task.kind is TaskKind.BACKWARD:
            drift = max(drift, version - version_read[task.device, task.micro_batch])
            backwards[task.device] += 1
    return drift
