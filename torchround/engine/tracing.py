"""Traces of chosen steps: every stage slot, transfer and update, as the simulator's own kind of timeline.

A `CopyWatch` marks the start and end of each copy; computation is in the devices'
reports anyway, updates in the optimizer's.
"""

import json
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchround.config import TraceTable
from torchround.engine.device import Device, DeviceWatcher, Mark, Stream
from torchround.engine.results import StepResult
from torchround.pipeline.timeline import HOST, Task, TaskKind, Timeline, trace_events

TRANSFERS = {
    Stream.WEIGHT_UPLOAD: TaskKind.WEIGHTS,
    Stream.ACTIVATION_UPLOAD: TaskKind.RELOAD,
    Stream.ACTIVATION_DOWNLOAD: TaskKind.OFFLOAD,
    Stream.GRADIENT_DOWNLOAD: TaskKind.GRADIENTS,
}


@dataclass(frozen=True)
class Transfer:
    """One copy over the link."""

    stream: Stream
    nbytes: int
    start: Mark
    end: Mark


class CopyWatch(DeviceWatcher):
    """The copies of one device, between two marks each."""

    def __init__(self) -> None:
        self.transfers: list[Transfer] = []
        self._start: Mark | None = None

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        if copied_bytes:
            self._start = device.mark(stream)

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        if copied_bytes and self._start is not None:
            self.transfers.append(Transfer(stream, copied_bytes, self._start, device.mark(stream)))


class Tracer:
    """Traces one step at a time of an engine that runs on `devices`."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self.devices = devices
        self._watches: list[CopyWatch] = []
        self._bases: list[Mark] = []
        self._base_s = 0.0

    def start(self) -> None:
        """Note what the devices do from now on; time 0 of the trace is now. No pass may be under way."""
        for device in self.devices:
            device.finish()
        self._watches = [CopyWatch() for _ in self.devices]
        for device, watch in zip(self.devices, self._watches, strict=True):
            device.watchers.append(watch)
        self._bases = [device.mark(Stream.COMPUTE) for device in self.devices]
        self._base_s = time.perf_counter()

    def stop(self, result: StepResult) -> Timeline:
        """Wait for the step, and return what happened in it, as the simulator would."""
        result.collect()
        for device, watch in zip(self.devices, self._watches, strict=True):
            device.finish()
            device.watchers.remove(watch)
        spans = [*self._computation(result), *self._transfers(result.pass_.step), *self._updates(result)]
        tasks, starts = zip(*spans, strict=True)
        ends = tuple(start + task.duration_s for task, start in spans)
        return Timeline(tasks, starts, ends, len(self.devices))

    def _computation(self, result: StepResult) -> Iterable[tuple[Task, float]]:
        for report in result.reports():
            base, stage = self._bases[report.task.device], report.task.stage
            for piece in report.pieces:
                yield (
                    Task(
                        device=report.task.device,
                        kind=piece.kind,
                        duration_s=piece.end.seconds_since(piece.start),
                        layers=range(stage.start, stage.stop),
                        micro_batch=piece.micro_batch,
                        step=report.step,
                    ),
                    piece.start.seconds_since(base),
                )

    def _transfers(self, step: int) -> Iterable[tuple[Task, float]]:
        for index, watch in enumerate(self._watches):
            for transfer in watch.transfers:
                yield (
                    Task(
                        device=index,
                        kind=TRANSFERS[transfer.stream],
                        duration_s=transfer.end.seconds_since(transfer.start),
                        layers=range(0),
                        micro_batch=0,
                        stream=transfer.stream.value,
                        step=step,
                        moves_bytes=transfer.nbytes,
                    ),
                    transfer.start.seconds_since(self._bases[index]),
                )

    def _updates(self, result: StepResult) -> Iterable[tuple[Task, float]]:
        for update in result.update().bundles:
            task = Task(
                device=HOST,
                kind=TaskKind.UPDATE,
                duration_s=update.end_s - update.start_s,
                layers=range(update.layer, update.layer + 1),
                micro_batch=0,
                stream="update",
                step=result.pass_.step,
            )
            yield task, update.start_s - self._base_s


def write_trace(timeline: Timeline, name: str, path: Path) -> None:
    """The timeline as a file that ui.perfetto.dev opens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(trace_events([(name, timeline)])))


# `[trace]`: timelines of chosen steps in the run's folder, and snapshots of device memory beside them.


logger = logging.getLogger(__name__)


class StepTraces:
    """Writes `step-N.json` (for ui.perfetto.dev) and, with `memory`, `step-N-memory.pickle` (pytorch.org/memory_viz).

    `devices` are what the engine must run on. Without any step to trace they are the given ones, and nothing is
    recorded at any time.
    """

    def __init__(self, table: TraceTable, folder: Path, devices: Sequence[Device], total_steps: int) -> None:
        self._steps = frozenset(table.steps)
        self._folder = folder
        self._tracer = Tracer(devices) if self._steps else None
        self.devices: Sequence[Device] = devices if self._tracer is None else self._tracer.devices
        self._memory = table.memory and any(device.torch_device.type == "cuda" for device in devices)
        if table.memory and not self._memory:
            logger.warning("trace.memory: cpu devices have no memory snapshots; only timelines are written")
        if beyond := sorted(step for step in self._steps if step > total_steps):
            logger.warning(
                "trace.steps: %s will not be traced; the run ends after training.steps = %d",
                ", ".join(map(str, beyond)),
                total_steps,
            )

    def wants(self, step: int) -> bool:
        """Whether `step`, counted from 1, is to be traced."""
        return step in self._steps

    def start(self) -> None:
        """Just before a traced step is dispatched; nothing may be under way."""
        assert self._tracer is not None, "no step is to be traced"
        if self._memory:
            torch.cuda.memory._record_memory_history(stacks="python")
        self._tracer.start()

    def finish(self, step: int, result: StepResult) -> None:
        """Wait for the step and write its files. A disk that fails costs the trace, not the step."""
        assert self._tracer is not None, "no step is to be traced"
        timeline = self._tracer.stop(result)
        try:
            write_trace(timeline, f"step {step}", self._folder / f"step-{step}.json")
            if self._memory:
                torch.cuda.memory._dump_snapshot(str(self._folder / f"step-{step}-memory.pickle"))
        except OSError as error:
            logger.warning("the trace of step %d could not be written: %s", step, error)
        finally:
            if self._memory:
                torch.cuda.memory._record_memory_history(enabled=None)
