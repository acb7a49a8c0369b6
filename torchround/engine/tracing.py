"""Traces of chosen steps: every computation, copy and update around a step, as the simulator's own kind of timeline.

Tracing never waits for a device, so the trace of an asynchronous step shows how it overlaps the steps before
and after it. Devices report computations and the optimizer reports updates anyway; copies are noted only near
a traced step.
"""

import json
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from torch import Tensor

from torchround.accelerators import kind_of
from torchround.config import TraceTable
from torchround.engine.device import Device, DeviceWatcher, Mark, Stream
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


class StepTraces(DeviceWatcher):
    """The traces that `[trace]` asks for: `step-N.json` for ui.perfetto.dev in `folder`.

    With `trace.memory` there is also `step-N-memory.pickle` for pytorch.org/memory_viz. Steps count from 1 in
    the config and in file names, from 0 in results and tasks.

    Call `start` for each new engine. For each step call `before_dispatch`, and `add` once the step is done.
    The trace of step N is written once step N + 1 is done, or at `finish`: the engine collects a step before
    it dispatches the next but one, so only N - 1 and N + 1 can overlap step N.
    """

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._steps = frozenset(step - 1 for step in table.steps)
        self._folder = folder
        self._devices = devices
        kinds = [kind_of(device.torch_device.type) for device in devices if table.memory]
        self._memory = next((kind for kind in kinds if kind.has_memory_history()), None)
        self._notes_copies = False
        self._begun: dict[tuple[str, Stream], Mark] = {}
        self._copies: dict[int, list[tuple[int, DeviceSpan]]] = defaultdict(list)  # each with its device
        self._finished: dict[int, StepResult] = {}
        self._unwritten: list[int] = []
        # For each device a moment by its own clock, and the same moment by the host's.
        self._anchors: list[tuple[Mark, float]] = []
        if table.memory and self._memory is None:
            logger.warning(
                "trace.memory: %s devices have no memory snapshots; only timelines are written",
                devices[0].torch_device.type,
            )
        if beyond := sorted(step for step in table.steps if step > total_steps):
            logger.warning(
                "trace.steps: %s will not be traced; the run ends after training.steps = %d",
                ", ".join(map(str, beyond)),
                total_steps,
            )

    def start(self) -> None:
        """Watch the devices, on which a new engine has no work yet. Does nothing if no step is traced."""
        if not self._steps:
            return
        for device in self._devices:
            device.watchers.append(self)
            device.finish()
        # All devices are idle, so these marks and the host's time are the same moment.
        self._anchors = [(device.mark(Stream.COMPUTE), time.perf_counter()) for device in self._devices]

    def before_dispatch(self, step: int) -> None:
        """Get ready for `step`, counted from 1, which is dispatched next. Waits for nothing."""
        self._notes_copies = self._is_near(step - 1)
        if step - 1 in self._steps:
            self._record_memory(True)

    def add(self, result: StepResult) -> None:
        """Take a finished step; steps come in order. Writes the trace of the step before it, if that is traced."""
        newest = result.step
        if not self._is_near(newest):
            return
        self._finished[newest] = result
        self._move_anchors(result)
        if newest in self._steps:
            self._unwritten.append(newest)
            if self._memory is not None:
                self._write(newest, "-memory.pickle", self._memory.dump_memory_history)
            # The next step runs already. If it is traced too, its own snapshot needs
            # what is recorded from here on.
            if newest + 1 not in self._steps:
                self._record_memory(False)
        self._write_up_to(newest - 1)
        # The newest step may be traced too and then needs the one before it, but none before that.
        for kept in (self._finished, self._copies):
            # From a list, which is made at once: device threads add copies of newer steps meanwhile.
            for old in [step for step in list(kept) if step < newest - 1]:
                del kept[old]

    def finish(self) -> None:
        """Write the traces that were waiting for the next step. The engine ends, so there is no next step."""
        self._write_up_to(max(self._unwritten, default=-1))
        self._record_memory(False)

    def timeline(self, step: int) -> Timeline:
        """Return what ran while finished step `step`, counted from 0, was under way, neighbouring steps included.

        Its time runs from its first task to its last, its update included.
        """
        ran = [found for result in self._finished.values() for found in self._ran(result)]
        first_s = min(start_s for task, start_s in ran if task.step == step)
        last_s = max(start_s + task.duration_s for task, start_s in ran if task.step == step)
        shown = [
            (task, start_s)
            for task, start_s in ran
            if task.step == step or (start_s < last_s and start_s + task.duration_s > first_s)
        ]
        zero_s = min(start_s for _, start_s in shown)
        return Timeline(
            tasks=tuple(task for task, _ in shown),
            start_s=tuple(start_s - zero_s for _, start_s in shown),
            end_s=tuple(start_s - zero_s + task.duration_s for task, start_s in shown),
            num_devices=len(self._devices),
        )

    def _ran(self, result: StepResult) -> Iterator[tuple[Task, float]]:
        """Yield what ran for a finished step: tasks, and when they started by the host's clock."""
        step = result.step
        spans = [(report.task.device, span) for report in result.reports() for span in report.spans]
        for landed in result.update().directions:
            layers = range(landed.layer, landed.layer + 1)
            span = DeviceSpan(TaskKind.ORTHOGONALISE, landed.start, landed.end, layers=layers)
            spans.append((landed.device, span))
        for device, span in spans + self._copies.get(step, []):
            task = Task(
                device=device,
                kind=span.kind,
                duration_s=span.seconds,
                layers=span.layers,
                micro_batch=span.micro_batch,
                stream=span.stream.value,
                step=step,
                moves_bytes=span.copied_bytes,
            )
            yield task, self._host_time_s(device, span.start)
        for update in result.update().bundles:
            layers = range(update.layer, update.layer + 1)
            duration_s = update.end_s - update.start_s
            yield (
                Task(HOST, TaskKind.UPDATE, duration_s, layers, 0, stream="update", step=step),
                update.start_s,
            )

    # The copies, seen by the threads that enqueue them.

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        if copied_bytes and self._notes_copies:
            self._begun[device.name, stream] = device.mark(stream)

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        start = self._begun.pop((device.name, stream), None)
        if start is not None:
            end = device.mark(stream)
            span = DeviceSpan(COPIES[stream], start, end, stream=stream, copied_bytes=copied_bytes)
            self._copies[device.step_of[stream]].append((self._devices.index(device), span))

    # Device clocks and the host's.

    def _host_time_s(self, device: int, mark: Mark) -> float:
        anchor, anchor_s = self._anchors[device]
        return anchor_s + mark.seconds_since(anchor)

    def _move_anchors(self, result: StepResult) -> None:
        """Anchor each device at its first computation of a finished step.

        Devices give the time between two marks as float32 milliseconds: hours after an engine's start, that
        would place the tasks of a trace only to a millisecond.
        """
        first = {report.task.device: report.spans[0].start for report in reversed(result.reports())}
        for device, mark in first.items():
            self._anchors[device] = mark, self._host_time_s(device, mark)

    # Files.

    def _is_near(self, step: int) -> bool:
        """Whether `step` or a step next to it is traced."""
        return any(near in self._steps for near in (step - 1, step, step + 1))

    def _write_up_to(self, last: int) -> None:
        """Write the traces of finished steps up to `last`."""
        for step in [step for step in self._unwritten if step <= last]:
            self._unwritten.remove(step)
            text = json.dumps(trace_events([(f"step {step + 1}", self.timeline(step))]))
            self._write(step, ".json", partial(write_whole, content=text))

    def _write(self, step: int, ending: str, write: Callable[[Path], object]) -> None:
        """Write a file of a step. A disk that fails costs the trace, not the run."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(self._folder / f"step-{step + 1}{ending}")
        except OSError as error:
            logger.warning("the trace of step %d could not be written: %s", step + 1, error)

    def _record_memory(self, wanted: bool) -> None:
        if self._memory is not None:
            self._memory.record_memory_history(wanted)
