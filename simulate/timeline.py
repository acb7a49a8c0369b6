"""Tasks of a schedule, the timeline of its run, and the timeline as a trace file's content.

The simulator's own; traces of runs have the same form (`engine/tracing.py`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torchround.planning.partition import SpanKind

Dependency = tuple[int, float]  # (index of a task, seconds that must pass after its end)

COMPUTE = "compute"
HOST = -1  # the "device" of work that no device does, such as the optimizer's


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
    kind: SpanKind
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

    def of_device(self, device: int, stream: str = COMPUTE) -> list[int]:
        """List the indices of one stream's tasks in the order they ran, without tasks that take no time."""
        mine = [
            i
            for i, task in enumerate(self.tasks)
            if task.device == device and task.stream == stream and task.duration_s > 0
        ]
        return sorted(mine, key=lambda i: self.start_s[i])


# Letters of kinds in labels, as in RoundPipe's figure 1. Other kinds have their names.
LETTERS = {
    SpanKind.FORWARD: "F",
    SpanKind.BACKWARD: "B",
    SpanKind.WEIGHT_GRADIENT: "W",
    SpanKind.FUSED: "FB",
    SpanKind.RECOMPUTE: "R",
    SpanKind.OFFLOAD: "out",
    SpanKind.RELOAD: "in",
    SpanKind.ORTHOGONALISE: "O",
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
        streams = [COMPUTE, *sorted({task.stream for task in line.tasks} - {COMPUTE})]
        ran = [
            (task, start_s)
            for task, start_s in zip(line.tasks, line.start_s, strict=True)
            if task.duration_s > 0
        ]
        for device, stream in sorted({(task.device, task.stream) for task, _ in ran}):
            process = {"ph": "M", "pid": processes[device]}
            shown = f"{name}: {'optimizer' if device == HOST else f'device {device}'}"
            events += [
                {**process, "name": "process_name", "args": {"name": shown}},
                {**process, "name": "process_sort_index", "args": {"sort_index": processes[device]}},
                {**process, "name": "thread_name", "tid": streams.index(stream), "args": {"name": stream}},
            ]
        events += [
            {
                "ph": "X",
                "name": label(task),
                "cat": task.kind.value,
                "pid": processes[task.device],
                "tid": streams.index(task.stream),
                "ts": start_s * 1e6,
                "dur": task.duration_s * 1e6,
                "args": {
                    "step": task.step + 1,
                    "micro_batch": task.micro_batch,
                    "moved_bytes": task.moves_bytes,
                },
            }
            for task, start_s in ran
        ]
        first_process += line.num_devices + 1
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def label(task: Task) -> str:
    """Name a task by its letter and layers, as in RoundPipe's figure 1: `F 3-5`."""
    first, last = task.layers.start, task.layers.stop - 1
    layers = f" {first}" if first == last else f" {first}-{last}"
    return LETTERS.get(task.kind, task.kind.value) + (layers if task.layers else "")
