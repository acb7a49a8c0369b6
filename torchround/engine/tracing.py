"""Traces of chosen steps: computations, copies and updates as the simulator's timeline, and PyTorch's profile on request.

Tracing never waits for a device, so the trace of an asynchronous step shows how it overlaps the steps before and after.
"""

import json
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.config import TraceTable
from torchround.engine.board import Observer
from torchround.engine.device import NO_STEP, Device, Mark, Stream
from torchround.engine.passes import StepResult
from torchround.engine.reports import DeviceSpan
from torchround.engine.timeline import HOST, Task, TaskKind, Timeline, trace_events
from torchround.untrusted.regular_file import write_whole

logger = logging.getLogger(__name__)

COPIES = {
    Stream.WEIGHT_UPLOAD: TaskKind.WEIGHTS,
    Stream.ACTIVATION_UPLOAD: TaskKind.RELOAD,
    Stream.ACTIVATION_DOWNLOAD: TaskKind.OFFLOAD,
    Stream.GRADIENT_DOWNLOAD: TaskKind.GRADIENTS,
}


class StepTraces(Observer):
    """The traces that `[trace]` asks for, in `folder`. Steps count from 1 in files, from 0 in results and tasks.

    The trace of step N is written once step N + 1 is done: the engine collects a step before it dispatches the next but
    one, so only N - 1 and N + 1 can overlap step N. The file has all three.
    """

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._steps = frozenset(step - 1 for step in table.steps)
        self._near = frozenset(step + other for step in self._steps for other in (-1, 0, 1))
        self._folder, self._devices = folder, devices
        self._profiles = table.profiler
        self._profile: Any = None  # of `torch.profiler`, while it records
        self._profiled = NO_STEP  # the last step dispatched while it records
        self._notes_copies = False
        self._begun: dict[tuple[str, Stream], Mark] = {}
        self._copies: dict[int, list[tuple[int, DeviceSpan]]] = defaultdict(list)  # each with its device
        self._finished: deque[StepResult] = deque(maxlen=3)
        # For each device a moment by its own clock, and the same moment by the host's.
        self._anchors: list[tuple[Mark, float]] = []
        if beyond := sorted(step for step in table.steps if step > total_steps):
            logger.warning(
                "trace.steps: the run ends after step %d, so %s have no trace", total_steps, beyond
            )

    def start(self) -> None:
        """Watch the devices, on which a new engine has no work yet. Does nothing if no step is traced."""
        if self._steps:
            for device in self._devices:
                device.watchers.append(self)
                device.finish()
            # All devices are idle, so these marks and the host's time are the same moment.
            self._anchors = [(device.mark(Stream.COMPUTE), time.perf_counter()) for device in self._devices]

    def before_dispatch(self, step: int) -> None:
        """Get ready for `step`, counted from 1, which is dispatched next."""
        self._notes_copies = step - 1 in self._near
        if not (self._profiles and step - 1 in self._steps):
            return
        self._profiled = step - 1
        if self._profile is None:
            from torch._C._profiler import _ExperimentalConfig
            from torch.profiler import profile

            every_thread: Any = None
            try:
                every_thread = _ExperimentalConfig(profile_all_threads=True)
            except TypeError:
                logger.warning("trace.profiler: this PyTorch records no operators of the devices' threads")
            self._profile = profile(profile_memory=True, experimental_config=every_thread)
            self._profile.start()

    def add(self, result: StepResult) -> None:
        """Take a finished step; steps come in order. Writes the trace of the step before it, if that is traced."""
        newest = result.step
        for step in list(self._copies):  # devices add steps meanwhile
            if step < newest - 2:  # those of the step before a traced one are still to be written
                del self._copies[step]
        if newest not in self._near:
            return
        self._finished.append(result)
        # Devices count milliseconds from mark to mark in float32, too coarse for the hours since the engine's start.
        first = {report.task.device: report.spans[0].start for report in reversed(result.reports())}
        for device, mark in first.items():
            self._anchors[device] = mark, self._host_time_s(device, mark)
        if newest in self._steps and newest + 1 not in self._steps:
            self._end_profile(newest)
        if newest - 1 in self._steps and len(self._finished) > 1:  # otherwise `finish` has written it
            self._write_timeline(newest - 1)

    def finish(self) -> None:
        """Write what waits for the next step, and stop the profiler: the engine has ended, or failed."""
        self._end_profile(self._profiled)
        if self._finished and (last := self._finished[-1].step) in self._steps:
            self._write_timeline(last)
        self._finished.clear()
        self._copies.clear()

    def timeline(self, step: int) -> Timeline:
        """Return what ran for finished step `step`, counted from 0, and for the finished steps before and after it."""
        near = [result for result in self._finished if abs(result.step - step) < 2]
        ran = [found for result in near for found in self._ran(result)]
        zero_s = min(start_s for _, start_s in ran)
        return Timeline(
            tasks=tuple(task for task, _ in ran),
            start_s=tuple(start_s - zero_s for _, start_s in ran),
            end_s=tuple(start_s - zero_s + task.duration_s for task, start_s in ran),
            num_devices=len(self._devices),
        )

    def _ran(self, result: StepResult) -> Iterator[tuple[Task, float]]:
        """Yield the tasks of a finished step, each with its start by the host's clock."""
        step, update = result.step, result.update()
        spans = [(report.task.device, span) for report in result.reports() for span in report.spans]
        for one in update.directions:
            layers = range(one.layer, one.layer + 1)
            spans.append((one.device, DeviceSpan(TaskKind.ORTHOGONALISE, one.start, one.end, layers=layers)))
        for device, span in spans + self._copies.get(step, []):
            task = Task(
                *(device, span.kind, span.seconds, span.layers, span.micro_batch),
                stream=span.stream.value,
                step=step,
                moves_bytes=span.copied_bytes,
            )
            yield task, self._host_time_s(device, span.start)
        for bundle in update.bundles:
            layers, seconds = range(bundle.layer, bundle.layer + 1), bundle.end_s - bundle.start_s
            yield Task(HOST, TaskKind.UPDATE, seconds, layers, 0, stream="update", step=step), bundle.start_s

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        if copied_bytes and self._notes_copies and device.step_of[stream] != NO_STEP:
            self._begun[device.name, stream] = device.mark(stream)

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        if (start := self._begun.pop((device.name, stream), None)) is not None:
            end = device.mark(stream)
            span = DeviceSpan(COPIES[stream], start, end, stream=stream, copied_bytes=copied_bytes)
            self._copies[device.step_of[stream]].append((self._devices.index(device), span))

    def _host_time_s(self, device: int, mark: Mark) -> float:
        anchor, anchor_s = self._anchors[device]
        return anchor_s + mark.seconds_since(anchor)

    def _end_profile(self, step: int) -> None:
        if (profile := self._profile) is not None:
            self._profile = None
            profile.stop()
            self._write(step, "-profiler", lambda path: profile.export_chrome_trace(str(path)))

    def _write_timeline(self, step: int) -> None:
        def write(path: Path) -> None:
            write_whole(path, json.dumps(trace_events([(f"step {step + 1}", self.timeline(step))])))

        self._write(step, "", write)

    def _write(self, step: int, ending: str, write: Callable[[Path], object]) -> None:
        """Write a file of a step. A disk or device that fails costs the trace, not the run."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / f"step-{step + 1}{ending}.json")
        except (OSError, RuntimeError) as error:
            logger.warning("the trace of step %d could not be written: %s", step + 1, error)
