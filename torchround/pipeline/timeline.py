"""Tasks of a schedule, the timeline of its run with its measures, and the timeline as a trace file's content.

The dispatch schedule, the baselines, the engine's traces and the pictures all use these types.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

Dependency = tuple[int, float]  # (index of a task, seconds that must pass after its end)

COMPUTE = "compute"
HOST = -1  # the "device" of work that no device does, such as the optimizer's


class TaskKind(str, Enum):
    """The kind of a task.

    BACKWARD is the whole backward, or the input's gradient alone in schedules with WEIGHT_GRADIENT tasks.
    FUSED is forward and backward in one. WEIGHTS and GRADIENTS are transfers of a stage up to a device and
    down. ORTHOGONALISE is work of a device for the update.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"
    FUSED = "fused"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    UPDATE = "update"
    ORTHOGONALISE = "orthogonalise"


@dataclass(frozen=True)
class Task:
    """A piece of work for one stream of one device.

    It starts no sooner than the end of each task in `after` plus that dependency's seconds.

    - `holds_bytes`: device memory taken at the start and kept.
    - `scratch_bytes`: device memory taken for the duration only.
    - `frees_bytes`: device memory given back at the end.
    - `moves_bytes`: bytes that leave or reach the device for it.
    """

    device: int
    kind: TaskKind
    duration_s: float
    layers: range
    micro_batch: int
    after: tuple[Dependency, ...] = ()
    stream: str = COMPUTE
    priority: float = 0.0
    step: int = 0
    holds_bytes: int = 0
    scratch_bytes: int = 0
    frees_bytes: int = 0
    moves_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """The run of a schedule: task `i` ran from `start_s[i]` to `end_s[i]`; time 0 is the start of the first task."""

    tasks: tuple[Task, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    num_devices: int

    @property
    def makespan_s(self) -> float:
        """Seconds from 0 to the end of the last task on any stream; tasks without duration do not count."""
        ends = (end for task, end in zip(self.tasks, self.end_s, strict=True) if task.duration_s > 0)
        return max(ends, default=0.0)

    @property
    def work_s(self) -> float:
        """Busy seconds of all compute streams together."""
        return sum(task.duration_s for task in self.tasks if task.stream == COMPUTE and task.device != HOST)

    @property
    def bubble(self) -> float:
        """Idle share of the devices: `1 - work / (N x makespan)`; 0 for an empty timeline."""
        total = self.num_devices * self.makespan_s
        return 1.0 - self.work_s / total if total > 0 else 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that crossed a link between a device and the host or another device."""
        return sum(task.moves_bytes for task in self.tasks)

    def of_device(self, device: int, stream: str = COMPUTE) -> list[int]:
        """List the indices of one stream's tasks in the order they ran, without tasks that take no time."""
        mine = [
            i
            for i, task in enumerate(self.tasks)
            if task.device == device and task.stream == stream and task.duration_s > 0
        ]
        return sorted(mine, key=lambda i: self.start_s[i])

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
        return tuple(_highest_sum(changes[device]) for device in range(self.num_devices))


def _highest_sum(changes: list[tuple[float, int]]) -> int:
    """Compute the peak of a running sum over time; at one moment, releases count before acquisitions."""
    highest = current = 0
    # Sorting puts negative changes first: memory freed at a moment can be taken again at the same moment.
    for _, change in sorted(changes):
        current += change
        highest = max(highest, current)
    return highest


# Letters of the kinds in labels, as in RoundPipe's figure 1.
LETTERS = {
    TaskKind.FORWARD: "F",
    TaskKind.BACKWARD: "B",
    TaskKind.WEIGHT_GRADIENT: "W",
    TaskKind.FUSED: "FB",
    TaskKind.RECOMPUTE: "R",
    TaskKind.OFFLOAD: "out",
    TaskKind.RELOAD: "in",
    TaskKind.WEIGHTS: "weights",
    TaskKind.GRADIENTS: "gradients",
    TaskKind.UPDATE: "update",
    TaskKind.ORTHOGONALISE: "O",
}


def trace_events(timelines: Iterable[tuple[str, Timeline]]) -> dict[str, Any]:
    """Build one JSON-able trace of several named timelines, in the Trace Event Format.

    Perfetto (ui.perfetto.dev) and chrome://tracing open it. Each device is a process and each stream a
    thread; the optimizer's updates are a process of their own. Times are microseconds; steps count from 1.
    """
    events: list[dict[str, Any]] = []
    first_process = 0
    for name, line in timelines:
        # Viewers sort by process number: devices first, the optimizer after them, then the next timeline.
        processes = {HOST: first_process + line.num_devices}
        processes.update((device, first_process + device) for device in range(line.num_devices))
        streams = _streams(line.tasks)
        events += _names(name, line, processes, streams)
        events += [
            _event(task, start_s, processes[task.device], streams.index(task.stream))
            for task, start_s in zip(line.tasks, line.start_s, strict=True)
            if task.duration_s > 0
        ]
        first_process += line.num_devices + 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def label(task: Task) -> str:
    """Name a task by its letter and layers, as in RoundPipe's figure 1: `F 3-5`."""
    first, last = task.layers.start, task.layers.stop - 1
    layers = f"{first}" if first == last else f"{first}-{last}"
    return f"{LETTERS[task.kind]} {layers}" if task.layers else LETTERS[task.kind]


def _streams(tasks: Sequence[Task]) -> list[str]:
    others = sorted({task.stream for task in tasks} - {COMPUTE})
    return [COMPUTE, *others]


def _names(
    name: str, line: Timeline, processes: dict[int, int], streams: Sequence[str]
) -> list[dict[str, Any]]:
    used = {(task.device, task.stream) for task in line.tasks if task.duration_s > 0}
    events = []
    for device, stream in sorted(used):
        process = processes[device]
        shown = f"{name}: {'optimizer' if device == HOST else f'device {device}'}"
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": shown}})
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        )
        thread = {"ph": "M", "pid": process, "tid": streams.index(stream)}
        events.append({**thread, "name": "thread_name", "args": {"name": stream}})
    return events


def _event(task: Task, start_s: float, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": label(task),
        "cat": task.kind.value,
        "pid": process,
        "tid": thread,
        "ts": start_s * 1e6,
        "dur": task.duration_s * 1e6,
        "args": {"step": task.step + 1, "micro_batch": task.micro_batch, "moved_bytes": task.moves_bytes},
    }
