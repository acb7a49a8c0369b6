"""Schedules as the simulator takes them, and the report on their runs.

A schedule that flushes is measured over one step from idle devices. A continuous one, whose steps flow into
each other, runs for many steps and is measured once the time from step to step has settled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torchround.pipeline.simulation.simulator import simulate, steady_state
from torchround.pipeline.timeline import Task, TaskKind, Timeline

GAPS = ("fill", "drain", "switch", "imbalance")


@dataclass(frozen=True)
class Schedule:
    """The tasks of any number of steps, and how to read their run.

    - `tasks(steps)` builds the tasks.
    - `partition`: layers per virtual stage, or RoundPipe's ranges; goes to JSON as it is.
    - `ready_first`: devices take what is ready instead of following their order.
    - `tail_steps`: steps at the end of a continuous run that end sooner because nothing follows them.
    - `warm_up[i]`: the forward of device i after which waiting for the first backward counts as `switch`;
      None: the last one before that backward.
    - `backwards_per_update`: after how many of its backwards a stage updates its weights.
    - `update_s`: seconds per step that all devices wait for the optimizer.
    """

    name: str
    num_devices: int
    partition: Any
    tasks: Callable[[int], list[Task]]
    continuous: bool = False
    ready_first: bool = False
    tail_steps: int = 0
    warm_up: tuple[int, ...] | None = None
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
    timeline: Timeline

    def to_json(self) -> dict[str, Any]:
        return {
            "makespan_s": self.makespan_s,
            "bubble": self.bubble,
            "bubble_by_kind": self.bubble_by_kind,
            "peak_activation_bytes": list(self.peak_activation_bytes),
            "drift": self.drift,
            "partition": self.partition,
        }


def measure_schedule(schedule: Schedule) -> ScheduleReport:
    """Simulate a schedule and read everything off its timeline."""
    devices = schedule.num_devices
    ready_first = range(devices) if schedule.ready_first else ()
    if schedule.continuous:
        line, makespan_s, steps = steady_state(schedule.tasks, devices, ready_first, schedule.tail_steps)
    else:
        line, steps = simulate(schedule.tasks(1), devices, ready_first), 1
        makespan_s = line.makespan_s + schedule.update_s
    total_s = devices * makespan_s
    # Rounding may leave a bubble just below 0.
    bubble = max(0.0, 1 - line.work_s / steps / total_s) if total_s > 0 else 0.0
    return ScheduleReport(
        name=schedule.name,
        makespan_s=makespan_s,
        bubble=bubble,
        bubble_by_kind=_shares(schedule, line, total_s, bubble),
        peak_activation_bytes=line.peak_bytes(),
        drift=measured_drift(line, schedule.backwards_per_update),
        moved_bytes=line.moved_bytes / steps,
        partition=schedule.partition,
        timeline=line,
    )


def _shares(schedule: Schedule, line: Timeline, total_s: float, bubble: float) -> dict[str, float]:
    # Steps that flow into each other have no fill or drain to tell apart.
    if schedule.continuous or total_s == 0:
        return {"fill": 0.0, "drain": 0.0, "switch": 0.0, "imbalance": bubble}
    idle_s = idle_seconds(line, schedule.warm_up)
    # All devices wait for the update after their last task, as they wait for each other while they drain.
    idle_s["drain"] += schedule.num_devices * schedule.update_s
    return {gap: idle_s[gap] / total_s for gap in GAPS}


def idle_seconds(line: Timeline, warm_up: tuple[int, ...] | None = None) -> dict[str, float]:
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
        gaps = _gaps_before(line, order)
        begin, end = _switch_window(line, order, warm_up[device] if warm_up else None)
        switch_s = sum(gaps[begin:end])
        idle_s["fill"] += gaps[0]
        idle_s["drain"] += line.makespan_s - line.end_s[order[-1]]
        idle_s["switch"] += switch_s
        idle_s["imbalance"] += sum(gaps[1:]) - switch_s
    return idle_s


def _gaps_before(line: Timeline, order: list[int]) -> list[float]:
    """Return the idle seconds before each task of a device; those after a recomputation count before it."""
    gaps = [line.start_s[order[0]]]
    for before, index in pairwise(order):
        gaps.append(line.start_s[index] - line.end_s[before])
        # A recomputation may run early, in time that would be idle
        # anyway; counting it late keeps the kinds comparable.
        if line.tasks[before].kind is TaskKind.RECOMPUTE:
            gaps[-2] += gaps[-1]
            gaps[-1] = 0.0
    return gaps


def _switch_window(line: Timeline, order: list[int], warm_up: int | None) -> tuple[int, int]:
    """Return the tasks `begin <= i < end` of a device's order before which it waits for the first backward."""
    kinds = [line.tasks[index].kind for index in order]
    first_backward = next((i for i, kind in enumerate(kinds) if kind is not TaskKind.FORWARD), 0)
    if first_backward == 0:
        return 0, 0
    warm_up = first_backward if warm_up is None else min(warm_up, first_backward)
    return warm_up, first_backward + 1


def measured_drift(line: Timeline, backwards_per_update: int | None) -> int:
    """Count the most updates of a stage's weights from a micro-batch's forward to its backward (PACI section 3.1).

    The count follows the order in which each device ran its tasks; it is 0 if no update falls inside a step.
    """
    if backwards_per_update is None:
        return 0
    drift = 0
    for device in range(line.num_devices):
        backwards: dict[range, int] = {}
        version_read: dict[tuple[range, int], int] = {}
        for index in line.of_device(device):
            task = line.tasks[index]
            version = backwards.get(task.layers, 0) // backwards_per_update
            if task.kind is TaskKind.FORWARD:
                version_read[task.layers, task.micro_batch] = version
            elif task.kind is TaskKind.BACKWARD:
                drift = max(drift, version - version_read[task.layers, task.micro_batch])
                backwards[task.layers] = backwards.get(task.layers, 0) + 1
    return drift
