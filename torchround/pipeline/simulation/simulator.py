"""The event simulator: it turns tasks with durations into a timeline.

One simulator serves all schedules. A task runs on one stream of one device, in the order of the list or, in
schedules that react to arrivals, by priority among the tasks that are ready.
"""

import heapq
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import pairwise

from torchround.pipeline.timeline import HOST, Task, Timeline

# Events closer than this count as simultaneous: equal sums added in another order differ by rounding.
SAME_MOMENT_S = 1e-12
# A run in which no steps repeat is doubled up to this many.
MAX_STEPS = 128


class ScheduleDeadlockError(RuntimeError):
    """A schedule whose tasks wait for each other, or for a task that their own stream runs later."""


def simulate(tasks: Sequence[Task], num_devices: int, ready_first: Collection[int] = ()) -> Timeline:
    """Run all tasks as early as their order and dependencies allow.

    Each stream runs its tasks in list order, except on the devices in `ready_first`: when one of their
    streams is free, it takes the ready task of lowest `priority` (list order among equals). Raises
    `ScheduleDeadlockError` if a task can never start.
    """
    return _Simulation(tasks, ready_first).run(num_devices)


def at_speeds(tasks: Sequence[Task], speeds: Sequence[float]) -> list[Task]:
    """Return the same tasks on devices of unequal speed: device d takes 1 / `speeds[d]` of each duration."""
    return [
        task if task.device == HOST else replace(task, duration_s=task.duration_s / speeds[task.device])
        for task in tasks
    ]


def steady_state(
    tasks_of: Callable[[int], list[Task]],
    num_devices: int,
    ready_first: Collection[int] = (),
    tail_steps: int = 0,
) -> tuple[Timeline, float, int]:
    """Simulate consecutive steps until they repeat; return the run, the seconds per step and the number of steps.

    `tasks_of(steps)` builds a run, whose last `tail_steps` are unlike the others because nothing follows
    them. Steps may repeat with a period of several, because the dispatch sequence moves on by `R S mod N`
    devices each step. The run is doubled until steps repeat or it would be longer than `MAX_STEPS`. In the
    latter case the mean of the second half is returned, which is too short if a delay still builds up.
    """
    steps = 2 * num_devices + 2
    while True:
        line = simulate(tasks_of(steps + tail_steps), num_devices, ready_first)
        ends = line.step_ends_s()[:steps]
        period = _period(_shapes(line, ends)[steps // 2 :], tolerance_s=1e-10 * ends[-1])
        if period or 2 * steps > MAX_STEPS:
            settled = period or steps // 2
            return line, (ends[-1] - ends[-1 - settled]) / settled, steps + tail_steps
        steps *= 2


def _shapes(line: Timeline, ends_s: Sequence[float]) -> list[list[float]]:
    """Describe each step by its length and by the starts of its tasks relative to the step's end.

    Lengths alone would look settled too early: updates can fall behind the devices step by step until a step
    has to wait.
    """
    shapes = [[end_s - before_s] for before_s, end_s in pairwise([0.0, *ends_s])]
    for task, start_s in zip(line.tasks, line.start_s, strict=True):
        if task.step < len(ends_s):
            shapes[task.step].append(start_s - ends_s[task.step])
    return shapes


def _period(shapes: Sequence[Sequence[float]], tolerance_s: float) -> int:
    """Find the shortest period with which steps repeat at least twice; 0 if they do not."""
    for period in range(1, len(shapes) // 2 + 1):
        if all(_alike(one, other, tolerance_s) for one, other in zip(shapes, shapes[period:], strict=False)):
            return period
    return 0


def _alike(one: Sequence[float], other: Sequence[float], tolerance_s: float) -> bool:
    return len(one) == len(other) and all(
        abs(then_s - now_s) <= tolerance_s for then_s, now_s in zip(one, other, strict=True)
    )


class _Stream:
    """The tasks of one stream that have not started yet."""

    def __init__(self, in_order: bool) -> None:
        self.in_order = in_order
        self.busy = False
        self.free_s = 0.0
        self.indices: list[int] = []
        self.next = 0
        self.ready: list[tuple[float, int]] = []

    def add_ready(self, index: int, priority: float) -> None:
        heapq.heappush(self.ready, (0.0 if self.in_order else priority, index))

    def take(self) -> int | None:
        """Take the task to start now, if there is one."""
        if self.busy or not self.ready:
            return None
        if self.in_order and self.ready[0][1] != self.indices[self.next]:
            return None
        self.busy = True
        self.next += 1
        return heapq.heappop(self.ready)[1]


class _Simulation:
    """The state of a simulation: it handles events in time order, and a free stream starts its next ready task."""

    def __init__(self, tasks: Sequence[Task], ready_first: Collection[int]) -> None:
        self.tasks = tasks
        self.start_s = [0.0] * len(tasks)
        self.end_s = [0.0] * len(tasks)
        self.ready_s = [0.0] * len(tasks)
        self.missing = [len(task.after) for task in tasks]
        self.followers: list[list[tuple[int, float]]] = [[] for _ in tasks]
        self.streams: dict[tuple[int, str], _Stream] = {}
        self.stream_of: list[_Stream] = []
        for index, task in enumerate(tasks):
            for before, lag_s in task.after:
                self.followers[before].append((index, lag_s))
            stream = self.streams.setdefault(
                (task.device, task.stream), _Stream(in_order=task.device not in ready_first)
            )
            stream.indices.append(index)
            self.stream_of.append(stream)

    def run(self, num_devices: int) -> Timeline:
        # An event: (time, task, whether it ends or becomes ready).
        events = [(0.0, index, False) for index, missing in enumerate(self.missing) if missing == 0]
        ended = 0
        while events:
            now = events[0][0]
            touched: dict[int, _Stream] = {}
            # All events of a moment come first: which task a stream
            # takes depends on everything that is ready then.
            while events and events[0][0] <= now + SAME_MOMENT_S:
                _, index, ends = heapq.heappop(events)
                stream = self.stream_of[index]
                touched[id(stream)] = stream
                if ends:
                    ended += 1
                    stream.busy = False
                    self._tell_followers(index, events)
                else:
                    stream.add_ready(index, self.tasks[index].priority)
            for stream in touched.values():
                index_or_none = stream.take()
                if index_or_none is not None:
                    self._start(index_or_none, events)
        if ended < len(self.tasks):
            raise ScheduleDeadlockError(self._deadlock_message(ended))
        return Timeline(tuple(self.tasks), tuple(self.start_s), tuple(self.end_s), num_devices)

    def _start(self, index: int, events: list[tuple[float, int, bool]]) -> None:
        # A stream never lets a ready task wait while it is free, so this is the present moment.
        self.start_s[index] = max(self.ready_s[index], self.stream_of[index].free_s)
        self.end_s[index] = self.start_s[index] + self.tasks[index].duration_s
        self.stream_of[index].free_s = self.end_s[index]
        heapq.heappush(events, (self.end_s[index], index, True))

    def _tell_followers(self, index: int, events: list[tuple[float, int, bool]]) -> None:
        for follower, lag_s in self.followers[index]:
            self.ready_s[follower] = max(self.ready_s[follower], self.end_s[index] + lag_s)
            self.missing[follower] -= 1
            if self.missing[follower] == 0:
                heapq.heappush(events, (self.ready_s[follower], follower, False))

    def _deadlock_message(self, ended: int) -> str:
        blocked = [
            stream.indices[stream.next]
            for stream in self.streams.values()
            if stream.next < len(stream.indices)
        ]
        first = self.tasks[min(blocked)]
        return (
            f"{len(self.tasks) - ended} of {len(self.tasks)} tasks can never start; the first is "
            f"{first.kind.value} of layers {first.layers.start}..{first.layers.stop - 1}, "
            f"micro-batch {first.micro_batch}, on device {first.device}"
        )
