"""The event simulator: it turns tasks with durations into a run, and measures the run.

One simulator serves all schedules. A task runs on one stream of one device, in the order of the list or, in
schedules that react to arrivals, by priority among the tasks that are ready.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import pairwise

from torchround.simulate.timeline import COMPUTE, HOST, Task, Timeline

Stream = tuple[int, str]  # a device and the name of one of its streams
# Events closer than this count as simultaneous: equal sums added in another order differ by rounding.
SAME_MOMENT_S = 1e-12
# A run in which no steps repeat is doubled up to this many.
MAX_STEPS = 128


class ScheduleDeadlockError(RuntimeError):
    """A schedule whose tasks wait for each other, or for a task that their own stream runs later."""


@dataclass(frozen=True)
class Run(Timeline):
    """A simulated timeline with its measures."""

    @property
    def makespan_s(self) -> float:
        """Seconds from 0 to the end of the last task on any stream; tasks without duration do not count."""
        ends = (end for task, end in zip(self.tasks, self.end_s, strict=True) if task.duration_s > 0)
        return max(ends, default=0.0)

    @property
    def work_s(self) -> float:
        """Busy seconds of all compute streams together."""
        return sum(task.duration_s for task in self.tasks if task.stream == COMPUTE and task.device != HOST)

    def step_ends_s(self) -> list[float]:
        """Return the time at which the last compute task of each training step ended."""
        ends = [0.0] * (1 + max(task.step for task in self.tasks))
        for task, end in zip(self.tasks, self.end_s, strict=True):
            if task.stream == COMPUTE and task.device != HOST:
                ends[task.step] = max(ends[task.step], end)
        return ends

    def peak_bytes(self) -> tuple[int, ...]:
        """Compute the highest sum of held and scratch bytes of each device."""
        changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for task, start, end in zip(self.tasks, self.start_s, self.end_s, strict=True):
            changes[task.device].append((start, task.holds_bytes + task.scratch_bytes))
            changes[task.device].append((end, -task.scratch_bytes - task.frees_bytes))
        peaks = [0] * self.num_devices
        for device in range(self.num_devices):
            current = 0
            # Sorting puts negative changes first: memory freed at a moment can be taken again at the same moment.
            for _, change in sorted(changes[device]):
                current += change
                peaks[device] = max(peaks[device], current)
        return tuple(peaks)


def simulate(tasks: Sequence[Task], num_devices: int, ready_first: bool = False) -> Run:
    """Run all tasks as early as their order and dependencies allow.

    Each stream runs its tasks in list order. With `ready_first` a free stream takes the ready task of lowest
    `priority` instead (list order among equals). Raises `ScheduleDeadlockError` if a task can never start.
    """
    waits = [list(task.after) for task in tasks]
    last: dict[Stream, int] = {}
    for index, task in enumerate(tasks):
        key = task.device, task.stream
        if key in last and not ready_first:
            waits[index].append((last[key], 0.0))
        last[key] = index
    followers: list[list[tuple[int, float]]] = [[] for _ in tasks]
    for index, befores in enumerate(waits):
        for before, lag_s in befores:
            followers[before].append((index, lag_s))
    missing = [len(befores) for befores in waits]
    start_s, end_s, ready_s = ([0.0] * len(tasks) for _ in range(3))
    ready: dict[Stream, list[tuple[float, int]]] = defaultdict(list)
    free_s: dict[Stream, float] = defaultdict(float)
    busy: set[Stream] = set()
    # An event: (time, task, whether it ends or becomes ready).
    events = [(0.0, index, False) for index, count in enumerate(missing) if count == 0]
    while events:  # in time order
        now = events[0][0]
        touched: dict[Stream, None] = {}
        # All events of a moment come first: which task a stream takes depends on everything that is ready then.
        while events and events[0][0] <= now + SAME_MOMENT_S:
            _, index, ends = heappop(events)
            stream = tasks[index].device, tasks[index].stream
            touched[stream] = None
            if not ends:
                heappush(ready[stream], (tasks[index].priority, index))
                continue
            busy.discard(stream)
            for follower, lag_s in followers[index]:
                ready_s[follower] = max(ready_s[follower], end_s[index] + lag_s)
                missing[follower] -= 1
                if missing[follower] == 0:
                    heappush(events, (ready_s[follower], follower, False))
        for stream in touched:
            if ready[stream] and stream not in busy:
                _, index = heappop(ready[stream])
                busy.add(stream)
                # A stream never lets a ready task wait while it is free, so this is the present moment.
                start_s[index] = max(ready_s[index], free_s[stream])
                end_s[index] = free_s[stream] = start_s[index] + tasks[index].duration_s
                heappush(events, (end_s[index], index, True))
    if stuck := [task for task, count in zip(tasks, missing, strict=True) if count]:
        first = stuck[0]
        raise ScheduleDeadlockError(
            f"{len(stuck)} of {len(tasks)} tasks can never start; the first is {first.kind.value} of layers "
            f"{first.layers.start}..{first.layers.stop - 1}, micro-batch {first.micro_batch}, on device {first.device}"
        )
    return Run(tuple(tasks), tuple(start_s), tuple(end_s), num_devices)


def steady_state(
    tasks_of: Callable[[int], list[Task]], num_devices: int, ready_first: bool = False, tail_steps: int = 0
) -> tuple[Run, float, int]:
    """Simulate consecutive steps until they repeat; return the run, the seconds per step and the number of steps.

    `tasks_of(steps)` builds a run, whose last `tail_steps` are unlike the others because nothing follows
    them. Steps may repeat with a period of several, because the dispatch sequence moves on by `R S mod N`
    devices each step. The run is doubled until steps repeat or it would be longer than `MAX_STEPS`. In the
    latter case the mean of the second half is returned, which is too short if a delay still builds up.
    """
    steps = 2 * num_devices + 2
    while True:
        run = simulate(tasks_of(steps + tail_steps), num_devices, ready_first)
        ends = run.step_ends_s()[:steps]
        # A step is its length and the starts of its tasks relative to its end. Lengths alone would look settled too
        # early: updates can fall behind the devices step by step until a step has to wait.
        shapes = [[end_s - before_s] for before_s, end_s in pairwise([0.0, *ends])]
        for task, start_s in zip(run.tasks, run.start_s, strict=True):
            if task.step < steps:
                shapes[task.step].append(start_s - ends[task.step])
        period = _period(shapes[steps // 2 :], tolerance_s=1e-10 * ends[-1])
        if period or 2 * steps > MAX_STEPS:
            settled = period or steps // 2
            return run, (ends[-1] - ends[-1 - settled]) / settled, steps + tail_steps
        steps *= 2


def _period(shapes: Sequence[Sequence[float]], tolerance_s: float) -> int:
    """Find the shortest period with which steps repeat at least twice; 0 if they do not."""
    for period in range(1, len(shapes) // 2 + 1):
        pairs = zip(shapes, shapes[period:], strict=False)
        if all(abs(a - b) <= tolerance_s for pair in pairs for a, b in zip(*pair, strict=True)):
            return period
    return 0
