"""Schedules as the simulator takes them, and the report on their runs.

A schedule that flushes is measured over one step from idle devices. A continuous one, whose steps flow into
each other, runs for many steps and is measured once the time from step to step has settled.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchround.engine.timeline import COMPUTE, Task, TaskKind
from torchround.simulate.events import Run, simulate, steady_state


@dataclass(frozen=True)
class Schedule:
    """The tasks of any number of steps, and how to read their run.

    - `tasks(steps)` builds the tasks.
    - `partition`: layers per virtual stage, or RoundPipe's ranges; goes to JSON as it is.
    - `ready_first`: devices take what is ready instead of following their order.
    - `tail_steps`: steps at the end of a continuous run that end sooner because nothing follows them; None: steps flush.
    - `backwards_per_update`: after how many of its backwards a stage updates its weights.
    - `update_s`: seconds per step that all devices wait for the optimizer.
    """

    name: str
    num_devices: int
    partition: Any
    tasks: Callable[[int], list[Task]]
    ready_first: bool = False
    tail_steps: int | None = None
    backwards_per_update: int | None = None
    update_s: float = 0.0


@dataclass(frozen=True)
class ScheduleReport:
    """The figures of one schedule.

    - `bubble`: share of all device time in which no task runs.
    - `peak_activation_bytes`: one figure per device.
    - `drift`: most updates of a stage between a micro-batch's forward and its backward there.
    - `moved_bytes`: per step, over all links.
    - `timeline`: one step, or several steps of a continuous schedule.
    """

    name: str
    makespan_s: float
    bubble: float
    peak_activation_bytes: tuple[int, ...]
    drift: int
    moved_bytes: float
    partition: Any
    timeline: Run


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
    return ScheduleReport(
        name=schedule.name,
        makespan_s=makespan_s,
        bubble=bubble,
        peak_activation_bytes=line.peak_bytes(),
        drift=_drift(line, schedule.backwards_per_update),
        moved_bytes=sum(task.moves_bytes for task in line.tasks) / steps,
        partition=schedule.partition,
        timeline=line,
    )


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
