"""One thread per device: takes its stage slots in dispatch order and runs their micro-batches.

Everything is enqueued on the device's five streams; the thread itself waits only for facts that other threads
post. Before any such wait it sends off gradients it still holds, because the optimizer may be waiting for them.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchround.engine.board import Board, Fact
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import Device, Mark, Stream
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.passes import Pass, StageJob
from torchround.engine.results import DeviceSpan, SlotReport
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.compute import LayerCall, Recomputation, forward, with_own_seed
from torchround.engine.worker.link_turns import LinkTurns
from torchround.engine.worker.slots import (
    DeviceSlot,
    GradientDownload,
    SlotPair,
    StageLayout,
    WeightUpload,
    bind,
)
from torchround.engine.worker.transfers import ActivationTransfers, RingEntry, as_tuple
from torchround.layer import Hidden
from torchround.pipeline.memory import ROUNDING_ELEMENTS
from torchround.pipeline.partition import Stage, StageKind
from torchround.pipeline.timeline import TaskKind

T = TypeVar("T")
# Stage task and micro-batch; None between stage tasks, and between micro-batches.
WorkerState = tuple[StageJob | None, int | None]


@dataclass(frozen=True)
class WorkerSetup:
    """What all workers share."""

    store: HostStore
    board: Board
    ordering: Ordering
    pool: HostPool
    layer_names: tuple[str, ...]
    stages: tuple[Stage, ...]
    num_devices: int
    turns: LinkTurns
    layerwise_recompute: bool
    accumulate_dtype: torch.dtype
    compiler: LayerCompiler | None
    on_failure: Callable[[PipelineError], None]


class DeviceWorker:
    """Drives one device. `skeletons` are this worker's own copy of the layers, on `meta`."""

    def __init__(self, index: int, device: Device, skeletons: list[nn.Module], setup: WorkerSetup) -> None:
        self._device = device
        self._skeletons = skeletons
        self._setup = setup
        self._store = setup.store
        self._index = self._next_slot = index
        self._micro_batch: int | None = None
        self._job: StageJob | None = None
        self._layouts: dict[range, StageLayout] = {}
        self._allocate()
        self._upload: WeightUpload | None = None
        self._download: GradientDownload | None = None
        self._activations = ActivationTransfers(device, setup.board, setup.pool)
        self._spans: list[DeviceSpan] = []
        self._idle_since: Mark | None = None
        self._reported_bytes = (device.uploaded_bytes, device.downloaded_bytes)
        self.thread = threading.Thread(target=self._main, name=f"torchround {device.name}", daemon=True)

    def _allocate(self) -> None:
        layouts = [self._layout(range(stage.start, stage.stop)) for stage in self._setup.stages]
        self._weights = SlotPair(
            self._device, max(layout.weight_numel for layout in layouts), self._store.dtype
        )
        gradient_numel = max(
            layout.gradient_numel
            for layout, stage in zip(layouts, self._setup.stages, strict=True)
            if stage.kind is not StageKind.FORWARD
        )
        self._gradients = SlotPair(self._device, gradient_numel, self._setup.accumulate_dtype)
        self._rounding: Tensor | None = None
        if self._setup.accumulate_dtype != self._store.gradient_dtype:
            numel = min(gradient_numel, ROUNDING_ELEMENTS)
            self._rounding = self._device.allocate(numel * self._store.gradient_dtype.itemsize).view(
                self._store.gradient_dtype
            )

    def _main(self) -> None:
        try:
            self._device.enter_thread()
            self._activations.prepare(self._await(Fact("sizes", 0)))
            while True:
                job: StageJob = self._await(Fact("task", self._next_slot))
                self._run(job)
                self._next_slot += self._setup.num_devices
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever a layer raises must reach the caller)
            failure = PipelineError(self.place(self.position()), f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._setup.on_failure(failure)

    def _run(self, job: StageJob) -> None:
        """One stage slot: weights in, every micro-batch, gradients out."""
        self._job = job
        self._device.begin_step(
            job.work.step, Stream.COMPUTE, Stream.ACTIVATION_UPLOAD, Stream.ACTIVATION_DOWNLOAD
        )
        self._activations.prepare(job.work.sizes)
        upload = self._upload or self._start_upload(job)
        self._upload = None
        if upload.blocked:
            self._flush()
        with self._turn(job.window, upload.complete):
            filled = upload.finish()
        self._device.wait(Stream.COMPUTE, filled)
        weights_ready = self._device.mark(Stream.WEIGHT_UPLOAD)
        gradients = None if job.task.stage.kind is StageKind.FORWARD else self._clear_gradients()
        modules = bind(self._store, self._skeletons, upload.layout, upload.slot, gradients)
        layers = self._layer_calls(upload.layout.layers, modules)
        shared = [upload.slot.memory] if gradients is None else [upload.slot.memory, gradients.memory]
        for position, micro_batch in enumerate(job.task.micro_batches):
            self._micro_batch = micro_batch
            self._setup.board.raise_if_stopped()
            self._windows(len(job.task.micro_batches) - position, job.window + position)
            _STAGES[job.task.stage.kind](self, job, layers, micro_batch, shared)
        self._finish(job, upload, gradients)
        self._report(job, upload, weights_ready)
        self._job = None

    def _finish(self, job: StageJob, upload: WeightUpload, gradients: DeviceSlot | None) -> None:
        self._micro_batch = None
        upload.slot.released = self._device.record(Stream.COMPUTE)
        self._activations.end_stage()
        self._flush()
        if gradients is not None:
            self._device.begin_step(job.work.step, Stream.GRADIENT_DOWNLOAD)
            self._download = GradientDownload(
                self._device,
                self._store,
                self._setup.ordering,
                self._setup.pool,
                self._rounding,
                gradients,
                upload.layout,
                job.work.step,
                job.contribution,
            )

    def _report(self, job: StageJob, upload: WeightUpload, weights_ready: Mark) -> None:
        moved = (self._device.uploaded_bytes, self._device.downloaded_bytes)
        report = SlotReport(
            task=job.task,
            step=job.work.step,
            idle_since=self._idle_since,
            weights_ready=weights_ready,
            update_wait_s=upload.waited_s,
            spans=tuple(self._spans),
            uploaded_bytes=moved[0] - self._reported_bytes[0],
            downloaded_bytes=moved[1] - self._reported_bytes[1],
        )
        self._reported_bytes, self._idle_since, self._spans = moved, self._spans[-1].end, []
        self._setup.board.post(Fact("done", job.task.slot), report)

    # Stages, one micro-batch each.

    def _forward_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        stage, work = job.task.stage, job.work
        micro_batch, integers = self._activations.bring_micro_batch(
            work.micro_batches[m], m - job.task.micro_batches.start
        )
        hidden, staged = self._bring_hidden(work, stage, m)
        outputs = self._compute(
            TaskKind.FORWARD,
            lambda: forward(layers, stage.start, hidden, micro_batch, work.backward_inputs),
            reads=[*shared, integers.memory, *_memory(staged)],
        )
        self._activations.release(staged)
        for layer, output in outputs:
            if layer == len(self._skeletons):
                self._activations.send(Fact("loss", work.index, (m,)), output, readers=1)
            else:
                readers = (layer in work.forward_inputs) + (layer in work.backward_inputs)
                self._activations.send(Fact("boundary", work.index, (layer, m)), output, readers)

    def _fused_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        stage, work = job.task.stage, job.work
        micro_batch, integers = self._activations.bring_micro_batch(
            work.micro_batches[m], m - job.task.micro_batches.start
        )
        hidden, staged = self._bring_hidden(work, stage, m)

        def forward_and_backward() -> tuple[Tensor, tuple[Tensor, ...] | None]:
            part = Recomputation(layers, hidden, micro_batch, self._setup.layerwise_recompute)
            [loss] = as_tuple(part.output)
            return loss.detach(), part.backward([torch.full_like(loss, work.loss_scale)])

        loss, gradients = self._compute(
            TaskKind.FUSED,
            forward_and_backward,
            reads=[shared[0], integers.memory, *_memory(staged)],
            writes=shared[1:],
        )
        self._activations.release(staged)
        self._activations.send(
            Fact("loss", work.index, (m,)), loss, readers=2
        )  # the caller, the optimizer worker
        self._send_gradients(work, stage, m, gradients)

    def _backward_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        """The recompute is enqueued before the incoming gradient is waited for."""
        stage, work = job.task.stage, job.work
        micro_batch, integers = self._activations.bring_micro_batch(
            work.micro_batches[m], m - job.task.micro_batches.start
        )
        hidden, staged = self._bring_hidden(work, stage, m)
        reads = [shared[0], integers.memory, *_memory(staged)]
        part = self._compute(
            TaskKind.RECOMPUTE,
            lambda: Recomputation(layers, hidden, micro_batch, self._setup.layerwise_recompute),
            reads,
        )
        fact = Fact("boundary gradient", work.index, (stage.stop, m))
        incoming, staged_gradient = self._activations.bring_gradients(self._await(fact))
        gradients = self._compute(
            TaskKind.BACKWARD,
            lambda: part.backward(incoming),
            reads=[*reads, staged_gradient.memory],
            writes=shared[1:],
        )
        self._activations.release(staged)
        self._activations.release(staged_gradient)
        self._send_gradients(work, stage, m, gradients)

    # Computing and moving.

    def _compute(
        self, kind: TaskKind, work: Callable[[], T], reads: Sequence[Tensor], writes: Sequence[Tensor] = ()
    ) -> T:
        assert self._micro_batch is not None, "computation outside a stage"
        start = self._device.mark(Stream.COMPUTE)
        result = self._device.run(Stream.COMPUTE, work, reads, writes)
        end = self._device.mark(Stream.COMPUTE)
        self._spans.append(DeviceSpan(kind, start, end, micro_batch=self._micro_batch))
        return result

    def _bring_hidden(self, work: Pass, stage: Stage, m: int) -> tuple[Hidden | None, RingEntry | None]:
        """The stage's input on the device; none for the first layer."""
        if stage.start == 0:
            return None, None
        return self._activations.bring_hidden(self._await(Fact("boundary", work.index, (stage.start, m))))

    def _send_gradients(self, work: Pass, stage: Stage, m: int, gradients: tuple[Tensor, ...] | None) -> None:
        if gradients is not None:
            self._activations.send(
                Fact("boundary gradient", work.index, (stage.start, m)), gradients, readers=1
            )

    # Weights in, gradients out.

    def _start_upload(self, job: StageJob) -> WeightUpload:
        layout = self._layout(range(job.task.stage.start, job.task.stage.stop))
        version, use = job.work.version, job.task.slot
        self._device.begin_step(job.work.step, Stream.WEIGHT_UPLOAD)
        return WeightUpload(
            self._device, self._store, self._setup.ordering, self._weights.next(), layout, version, use
        )

    def _windows(self, remaining: int, window: int) -> None:
        """One transfer window: an equal chunk of the next stage's weights and of the last one's gradients.

        Each chunk queues behind the activations already on their way, so that those never wait for a whole
        layer's weights, and the chunks keep pace with the micro-batches.
        """
        following = Fact("task", self._next_slot + self._setup.num_devices)
        if self._upload is None and self._setup.board.ready(following):
            self._upload = self._start_upload(self._setup.board.wait(following))
        if self._upload is not None:
            self._device.wait(Stream.WEIGHT_UPLOAD, self._device.record(Stream.ACTIVATION_UPLOAD))
            with self._turn(window, not self._upload.may_advance):
                self._upload.advance(-(-self._upload.remaining // remaining))
        if self._download is not None:
            self._device.wait(Stream.GRADIENT_DOWNLOAD, self._device.record(Stream.ACTIVATION_DOWNLOAD))
            self._download.advance(-(-self._download.remaining // remaining))

    def _turn(self, window: int, nothing_to_do: bool) -> AbstractContextManager[None]:
        """For weights that go up within the block."""
        return nullcontext() if nothing_to_do else self._setup.turns.turn(self._index, self._device, window)

    def _clear_gradients(self) -> DeviceSlot:
        slot = self._gradients.next()
        if slot.released is not None:
            self._device.wait(Stream.COMPUTE, slot.released)
        self._device.run(Stream.COMPUTE, slot.memory.zero_, writes=[slot.memory])
        return slot

    def _flush(self) -> None:
        """Send off the gradients still held."""
        if self._download is not None:
            self._download.finish()
            self._download = None

    def _await(self, fact: Fact) -> Any:
        if not self._setup.board.ready(fact):
            self._flush()
        return self._setup.board.wait(fact)

    def _layer_calls(self, indices: range, layers: list[nn.Module]) -> list[LayerCall]:
        compiler, board = self._setup.compiler, self._setup.board
        calls: list[LayerCall] = list(layers)
        if compiler is not None:
            calls = [
                compiler.compiled(index, layer, board) for index, layer in zip(indices, layers, strict=True)
            ]
        return [with_own_seed(index, call) for index, call in zip(indices, calls, strict=True)]

    def _layout(self, layers: range) -> StageLayout:
        if layers not in self._layouts:
            self._layouts[layers] = StageLayout(self._store, layers)
        return self._layouts[layers]

    def position(self) -> WorkerState:
        """Where this worker is now; `place` says it in words."""
        return self._job, self._micro_batch

    def place(self, position: WorkerState) -> FaultLocation:
        job, micro_batch = position
        if job is None:
            return FaultLocation(f"device {self._device.name}")
        stage = job.task.stage
        names = self._setup.layer_names[stage.start : stage.stop]
        return FaultLocation(f"device {self._device.name}", stage.kind.value, names, micro_batch)


_STAGES = {
    StageKind.FORWARD: DeviceWorker._forward_stage,
    StageKind.FUSED: DeviceWorker._fused_stage,
    StageKind.BACKWARD: DeviceWorker._backward_stage,
}


def _memory(entry: RingEntry | None) -> list[Tensor]:
    return [] if entry is None else [entry.memory]
