"""Traces of chosen steps in the Trace Event Format, and PyTorch's profile on request.

Tracing never waits for a device, so the trace of asynchronous steps in a row shows how they overlap.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.config import TraceTable
from torchround.engine.board import Observer
from torchround.engine.device import NO_STEP, Device, Mark, Stream
from torchround.engine.passes import StepResult
from torchround.engine.reports import Span
from torchround.planning.partition import SpanKind
from torchround.untrusted.regular_file import write_whole

logger = logging.getLogger(__name__)

COPIES = {
    Stream.WEIGHT_UPLOAD: SpanKind.WEIGHTS,
    Stream.ACTIVATION_UPLOAD: SpanKind.RELOAD,
    Stream.ACTIVATION_DOWNLOAD: SpanKind.OFFLOAD,
    Stream.GRADIENT_DOWNLOAD: SpanKind.GRADIENTS,
}


class StepTraces(Observer):
    """The traces that `[trace]` asks for, in `folder`. Steps count from 1 in files, from 0 in results.

    Traced steps in a row share a file, which is named for the last of them and written once that step is done.
    """

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._steps = frozenset(step - 1 for step in table.steps)
        self._folder, self._devices, self._profiles = folder, devices, table.profiler
        self._profile: Any = None  # of `torch.profiler`, while it records
        self._last = NO_STEP  # the last traced step that was dispatched
        self._begun: dict[tuple[str, Stream], Mark] = {}
        self._copies: dict[int, list[tuple[int, Span]]] = defaultdict(list)  # each with its device
        self._finished: list[StepResult] = []
        # For each device, and the host last, a moment by its own clock, and the same moment by the host's.
        self._anchors: list[tuple[Mark, float]] = []
        if beyond := sorted(step for step in table.steps if step > total_steps):
            logger.warning("trace.steps: the run ends after step %d: %s have no trace", total_steps, beyond)

    def start(self) -> None:
        """Watch the devices, on which a new engine has no work yet. Does nothing if no step is traced."""
        if self._steps:
            for device in self._devices:
                device.watchers.append(self)
                device.finish()
            # All devices are idle, so these marks and the host's time are the same moment.
            marks = [*(device.mark(Stream.COMPUTE) for device in self._devices), Mark()]
            self._anchors = [(mark, time.perf_counter()) for mark in marks]

    def before_dispatch(self, step: int) -> None:
        """Get ready for `step`, counted from 1, which is dispatched next."""
        if step - 1 not in self._steps:
            return
        self._last = step - 1
        if self._profiles and self._profile is None:
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
        """Take a finished step; steps come in order. Writes the trace if it is the last one in a row."""
        if result.step in self._steps:
            self._finished.append(result)
            if result.step + 1 not in self._steps:
                self.finish()

    def finish(self) -> None:
        """Write what has been traced, and stop the profiler: the row of steps or the engine has ended, or it failed."""
        profile, finished, path = self._profile, self._finished, self._folder / f"step-{self._last + 1}"
        self._profile, self._finished = None, []
        try:
            if profile is not None or finished:
                self._folder.mkdir(parents=True, exist_ok=True)
            if profile is not None:
                profile.stop()
                profile.export_chrome_trace(f"{path}-profiler.json")
            if finished:
                write_whole(path.with_suffix(".json"), json.dumps(self._content(finished)))
        except (OSError, RuntimeError) as error:  # of a disk or a device: it costs the trace, not the run
            logger.warning("the trace of step %d could not be written: %s", self._last + 1, error)
        self._copies.clear()

    def _content(self, results: Sequence[StepResult]) -> dict[str, Any]:
        """Describe the spans of steps by the host's clock, from the first one on. Each device is a process, the host the last."""
        host, events, streams = len(self._devices), list[dict[str, Any]](), list(Stream)
        for result in results:
            update = result.update()
            spans = [(report.task.device, span) for report in result.reports() for span in report.spans]
            # Devices count milliseconds from mark to mark in float32, too coarse for the hours since the engine's start.
            for device, start in {device: span.start for device, span in reversed(spans)}.items():
                self._anchors[device] = start, self._host_time_s(device, start)
            spans += [*update.directions, *((host, span) for span in update.bundles)]
            for process, span in spans + self._copies[result.step]:
                ends = dict.fromkeys((span.layers[0], span.layers[-1])) if span.layers else ()
                event: dict[str, Any] = {
                    "ph": "X",
                    "name": f"{span.kind.value} {'-'.join(map(str, ends))}",
                    "cat": span.kind.value,
                    "pid": process,
                    "tid": streams.index(span.stream),
                    "ts": self._host_time_s(process, span.start) * 1e6,
                    "dur": span.seconds * 1e6,
                }
                moved = {"micro_batch": span.micro_batch, "moved_bytes": span.copied_bytes}
                events += [{**event, "args": {"step": result.step + 1, **moved}}] if event["dur"] > 0 else []
        first_us = min((event["ts"] for event in events), default=0.0)
        for event in events:
            event["ts"] -= first_us
        for process, thread in sorted({(event["pid"], event["tid"]) for event in events}):
            name = f"device {process}" if process < host else "optimizer"
            meta = {"ph": "M", "pid": process, "tid": thread}
            events += [
                {**meta, "name": "process_name", "args": {"name": name}},
                {**meta, "name": "process_sort_index", "args": {"sort_index": process}},
                {**meta, "name": "thread_name", "args": {"name": streams[thread].value}},
            ]
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        if copied_bytes and device.step_of[stream] in self._steps:
            self._begun[device.name, stream] = device.mark(stream)

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        if (start := self._begun.pop((device.name, stream), None)) is not None:
            end = device.mark(stream)
            span = Span(COPIES[stream], start, end, stream=stream, copied_bytes=copied_bytes)
            self._copies[device.step_of[stream]].append((self._devices.index(device), span))

    def _host_time_s(self, device: int, mark: Mark) -> float:
        anchor, anchor_s = self._anchors[device]
        return anchor_s + mark.seconds_since(anchor)
