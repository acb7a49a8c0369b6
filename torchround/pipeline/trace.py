"""A timeline in the Trace Event Format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per device, one thread per stream; the optimizer's updates are a process of their own.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torchround.pipeline.timeline import COMPUTE, HOST, Task, TaskKind, Timeline

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
}


def trace_events(timelines: Iterable[tuple[str, Timeline]]) -> dict[str, Any]:
    """One JSON-able trace of several named timelines. Times in it are microseconds; steps count from 1."""
    events: list[dict[str, Any]] = []
    first_process = 0
    for name, line in timelines:
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
    """The task's letter and layers, as in RoundPipe's Figure 1: `F 3-5`."""
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
