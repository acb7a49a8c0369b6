"""Traces of chosen steps in the Trace Event Format, and PyTorch's profile on request. Tracing never waits for a device."""

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from torchround.config import TraceTable
from torchround.engine.device import Device, Stream
from torchround.engine.passes import StepResult
from torchround.untrusted.regular_file import write_whole

logger = logging.getLogger(__name__)


class StepTraces:
    """The traces that `[trace]` asks for. Steps in a row share a file, which `finish` names for the last of them."""

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._folder, self._devices, self._profiles = folder, devices, table.profiler
        self._steps, self._last = frozenset(table.steps), 0  # from 1; the last to be dispatched
        self._profile: Any = None  # of `torch.profiler`, while it records
        self._events: list[dict[str, Any]] = []
        if beyond := sorted(step for step in table.steps if step > total_steps):
            logger.warning("trace.steps: the run ends after step %d: %s have no trace", total_steps, beyond)

    def before_dispatch(self, step: int) -> None:
        if step in self._steps:
            self._last = step
            for device in self._devices:
                device.copies[step - 1] = []
        if step in self._steps and self._profiles and self._profile is None:
            every_thread: Any = None
            try:
                every_thread = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
            except TypeError:
                logger.warning("trace.profiler: this PyTorch records no operators of the devices' threads")
            self._profile = torch.profiler.profile(profile_memory=True, experimental_config=every_thread)
            self._profile.start()

    def add(self, result: StepResult) -> None:
        """Take a finished step; steps come in order. Writes the trace if it is the last one in a row."""
        if (step := result.step + 1) in self._steps:
            self._events += self._events_of(result)
            if step + 1 not in self._steps:
                self.finish()

    def finish(self) -> None:
        """Write what has been traced, and stop the profiler: the row of steps or the engine has ended, or it failed."""
        profile, events, path = self._profile, self._events, self._folder / f"step-{self._last}"
        self._profile, self._events = None, []
        try:
            if profile is not None or events:
                self._folder.mkdir(parents=True, exist_ok=True)
            if profile is not None:
                profile.stop()
                profile.export_chrome_trace(f"{path}-profiler.json")
            if events:
                write_whole(path.with_suffix(".json"), json.dumps({"traceEvents": events}))
        except (OSError, RuntimeError) as error:  # of a disk or a device: it costs the trace, not the run
            logger.warning("the trace of step %d could not be written: %s", self._last, error)

    def _events_of(self, result: StepResult) -> Iterator[dict[str, Any]]:
        """Describe the spans of a step. Each device is a process, the host the last; each stream is a thread."""
        host, update = len(self._devices), result.update()
        spans = [(report.task.device, span) for report in result.reports() for span in report.spans]
        spans += [*update.directions, *((host, span) for span in update.bundles)]
        spans += [(i, span) for i, d in enumerate(self._devices) for span in d.copies.pop(result.step)]
        for place, span in spans:
            start_s = span.start.host_s if place == host else self._devices[place].host_s(span.start)
            yield span.trace_event(place, result.step, start_s)
        for place, stream in dict.fromkeys((place, span.stream) for place, span in spans):
            args = {"name": f"device {place}" if place < host else "optimizer", "sort_index": place}
            event = {"ph": "M", "pid": place, "tid": list(Stream).index(stream)}
            yield {**event, "name": "process_name", "args": args}
            yield {**event, "name": "process_sort_index", "args": args}
            yield {**event, "name": "thread_name", "args": {"name": stream.value}}
