"""One thread per device: takes the device's stage jobs in dispatch order and runs their micro-batches.

The thread enqueues everything on the device's five streams and waits only for hand-overs of other threads.
Before any such wait it sends off the gradients that it still holds, because the optimizer may be waiting for
them.
"""

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchround.engine.board import Board, HandOverKey
from torchround.engine.compiled import LayerCompiler
from torchround.engine.device import NO_STEP, Device, Mark, Stream
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.passes import FIRST_SIZES, STAGE_JOB, Pass, StageJob
from torchround.engine.results import STAGE_ENQUEUED, DeviceSpan, StageReport
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.activation_transfers import (
    BOUNDARY,
    BOUNDARY_GRADIENT,
    LOSS,
    ActivationTransfers,
)
from torchround.engine.worker.bundle_transfers import GradientDownload, WeightUpload
from torchround.engine.worker.compute import ForwardWithGraph, LayerCall, bind, forward, with_own_seed
from torchround.engine.worker.link_turns import LinkTurns
from torchround.engine.worker.slots import DeviceSlot, SlotRing, StageLayout, as_tuple
from torchround.layer import Hidden, MicroBatch
from torchround.pipeline.memory import ROUNDING_ELEMENTS
from torchround.pipeline.partition import Stage, StageKind
from torchround.pipeline.timeline import TaskKind

T = TypeVar("T")
# Stage job and micro-batch under way: None between stage jobs, and between micro-batches.
WorkerState = tuple[StageJob | None, int | None]


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that the workers of an engine share."""

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
    """The thread that drives one device. `skeletons` are this worker's own copy of the layers, on `meta`."""

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
        self._upload: WeightUpload | None = None  # of the next stage job
        self._download: GradientDownload | None = None  # of the previous stage job
        self._activations = ActivationTransfers(device, setup.board, setup.pool)
        self._spans: list[DeviceSpan] = []
        self._idle_since: Mark | None = None
        self._reported_bytes = (device.uploaded_bytes, device.downloaded_bytes)
        self.thread = threading.Thread(target=self._main, name=f"torchround {device.name}", daemon=True)

    def _allocate(self) -> None:
        """Allocate slots for the largest stage, so that no step allocates and a plan that does not fit fails here."""
        layouts = [self._layout(range(stage.start, stage.stop)) for stage in self._setup.stages]
        self._weight_numel = max(layout.weight_numel for layout in layouts)
        self._gradient_numel = max(
            layout.gradient_numel
            for layout, stage in zip(layouts, self._setup.stages, strict=True)
            if stage.kind is not StageKind.FORWARD
        )
        self._weights = SlotRing(self._device, self._store.dtype)
        self._weights.reserve(self._weight_numel)
        self._gradients = SlotRing(self._device, self._setup.accumulate_dtype)
        self._gradients.reserve(self._gradient_numel)
        self._rounding: Tensor | None = None
        if self._setup.accumulate_dtype != self._store.gradient_dtype:
            numel = min(self._gradient_numel, ROUNDING_ELEMENTS)
            self._rounding = self._device.allocate(numel * self._store.gradient_dtype.itemsize).view(
                self._store.gradient_dtype
            )

    def _main(self) -> None:
        try:
            self._device.enter_thread()
            self._activations.prepare(self._await(FIRST_SIZES(0)))
            while True:
                self._run(self._await(STAGE_JOB(self._next_slot)))
                self._next_slot += self._setup.num_devices  # slots are dealt to devices in turn
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever a layer raises must reach the caller)
            failure = PipelineError(self.location(self.state()), f"{type(error).__name__}: {error}")
            failure.__cause__ = error
            self._setup.on_failure(failure)

    def _run(self, job: StageJob) -> None:
        """Run one stage job: weights in, every micro-batch, gradients out."""
        self._job = job
        self._begin_step(job, Stream.COMPUTE, Stream.ACTIVATION_UPLOAD, Stream.ACTIVATION_DOWNLOAD)
        self._activations.prepare(job.pass_.sizes)
        upload = self._upload or self._start_upload(job)
        self._upload = None
        # The optimizer may need this device's last gradients before it can complete
        # the weights that are missing.
        if upload.blocked:
            self._flush()
        with self._turn(job.window, upload.complete):
            filled = upload.finish()
        self._device.wait(Stream.COMPUTE, filled)
        weights_ready = self._device.mark(Stream.WEIGHT_UPLOAD)
        gradients = None if job.task.stage.kind is StageKind.FORWARD else self._clear_gradients()
        # Bound anew for each job: the two slots alternate, and the next stage has other layers.
        modules = bind(self._store, self._skeletons, upload.layout, upload.slot, gradients)
        layers = self._layer_calls(upload.layout.layers, modules)
        shared = [upload.slot.memory] if gradients is None else [upload.slot.memory, gradients.memory]
        for position, micro_batch in enumerate(job.task.micro_batches):
            self._micro_batch = micro_batch
            self._setup.board.raise_if_stopped()
            # Chunks first: their copies then run beside this micro-batch's computation, not after it.
            self._advance_transfers(len(job.task.micro_batches) - position, job.window + position)
            _STAGES[job.task.stage.kind](self, job, layers, micro_batch, shared)
        self._finish(job, upload, gradients)
        self._report(job, upload, weights_ready)
        self._job = None

    def _begin_step(self, job: StageJob, *streams: Stream) -> None:
        # An evaluation has the number of the next training step, whose trace must not show its copies.
        self._device.begin_step(job.pass_.step if job.pass_.training else NO_STEP, *streams)

    def _finish(self, job: StageJob, upload: WeightUpload, gradients: DeviceSlot | None) -> None:
        self._micro_batch = None
        upload.slot.released = self._device.record(Stream.COMPUTE)
        self._activations.end_stage()
        # The previous stage's download must be complete before this stage's takes its place.
        self._flush()
        if gradients is not None:
            self._begin_step(job, Stream.GRADIENT_DOWNLOAD)
            # Started here, but its chunks go down in the next job's windows, or in `_flush` if none comes.
            self._download = GradientDownload(
                self._device,
                self._store,
                self._setup.ordering,
                self._setup.pool,
                self._rounding,
                gradients,
                upload.layout,
                job.pass_.step,
                job.part_numbers,
            )

    def _report(self, job: StageJob, upload: WeightUpload, weights_ready: Mark) -> None:
        moved = (self._device.uploaded_bytes, self._device.downloaded_bytes)
        report = StageReport(
            task=job.task,
            step=job.pass_.step,
            idle_since=self._idle_since,
            weights_ready=weights_ready,
            update_wait_s=upload.waited_s,
            spans=tuple(self._spans),
            uploaded_bytes=moved[0] - self._reported_bytes[0],
            downloaded_bytes=moved[1] - self._reported_bytes[1],
        )
        self._reported_bytes, self._idle_since, self._spans = moved, self._spans[-1].end, []
        self._setup.board.post(STAGE_ENQUEUED(job.task.slot), report)

    # Stages, for one micro-batch, number `m` of its pass. `shared` is the weight slot's memory and, if there
    # is one, the gradient slot's.

    def _forward_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        """Run forward without gradients, and send what later stages read: the output, and inputs of backward stages."""
        stage, pass_ = job.task.stage, job.pass_
        micro_batch, hidden, staged, inputs = self._bring_inputs(job, m)
        outputs = self._compute(
            TaskKind.FORWARD,
            lambda: forward(layers, stage.start, hidden, micro_batch, pass_.backward_inputs),
            reads=[*shared, *inputs],
        )
        self._activations.release(staged)
        for layer, output in outputs:
            if layer == len(self._skeletons):  # an evaluation's last stage gives the loss
                self._activations.send(LOSS(pass_.index, m), output, readers=1)
            else:
                readers = (layer in pass_.forward_inputs) + (layer in pass_.backward_inputs)
                self._activations.send(BOUNDARY(pass_.index, layer, m), output, readers)

    def _fused_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        """Run forward and backward of the last stage in one go: its backward needs no gradient from another stage."""
        stage, pass_ = job.task.stage, job.pass_
        micro_batch, hidden, staged, inputs = self._bring_inputs(job, m)
        # The backward follows at once, so the loss may make its gradients in the forward.
        micro_batch = replace(micro_batch, loss_factor=pass_.loss_factor)

        def forward_and_backward() -> tuple[Tensor, tuple[Tensor, ...] | None]:
            stage_forward = ForwardWithGraph(layers, hidden, micro_batch, self._setup.layerwise_recompute)
            [loss] = as_tuple(stage_forward.output)
            return loss.detach(), stage_forward.backward([torch.full_like(loss, pass_.loss_factor)])

        loss, gradients = self._compute(
            TaskKind.FUSED,
            forward_and_backward,
            reads=[shared[0], *inputs],
            writes=shared[1:],
        )
        self._activations.release(staged)
        self._activations.send(LOSS(pass_.index, m), loss, readers=2)  # the caller, the optimizer worker
        self._send_gradients(pass_, stage, m, gradients)

    def _backward_stage(self, job: StageJob, layers: list[LayerCall], m: int, shared: list[Tensor]) -> None:
        """Recompute the stage from its kept input, then run its backward with the next stage's gradient."""
        stage, pass_ = job.task.stage, job.pass_
        micro_batch, hidden, staged, inputs = self._bring_inputs(job, m)
        reads = [shared[0], *inputs]
        # Recomputation needs no gradient, so it is enqueued before the thread waits for one. Otherwise the
        # device would be idle until another device has made it.
        recomputed = self._compute(
            TaskKind.RECOMPUTE,
            lambda: ForwardWithGraph(layers, hidden, micro_batch, self._setup.layerwise_recompute),
            reads,
        )
        boundary = self._await(BOUNDARY_GRADIENT(pass_.index, stage.stop, m))
        incoming, staged_gradient = self._activations.bring_gradients(boundary)
        gradients = self._compute(
            TaskKind.BACKWARD,
            lambda: recomputed.backward(incoming),
            reads=[*reads, staged_gradient.memory],
            writes=shared[1:],
        )
        # Both only now: the backward reads the stage's input too.
        self._activations.release(staged)
        self._activations.release(staged_gradient)
        self._send_gradients(pass_, stage, m, gradients)

    # Computing and moving.

    def _compute(
        self,
        kind: TaskKind,
        computation: Callable[[], T],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor] = (),
    ) -> T:
        assert self._micro_batch is not None, "computation outside a stage"
        start = self._device.mark(Stream.COMPUTE)
        result = self._device.run(Stream.COMPUTE, computation, reads, writes)
        end = self._device.mark(Stream.COMPUTE)
        self._spans.append(DeviceSpan(kind, start, end, micro_batch=self._micro_batch))
        return result

    def _bring_inputs(
        self, job: StageJob, m: int
    ) -> tuple[MicroBatch, Hidden | None, DeviceSlot | None, list[Tensor]]:
        """Upload what a stage reads: the micro-batch, and the stage's input with its slot.

        Input and slot are None for the first layer, which reads the micro-batch alone. The last value is the
        device memory that holds all of it.
        """
        pass_, start = job.pass_, job.task.stage.start
        position = m - job.task.micro_batches.start
        micro_batch, integers = self._activations.bring_micro_batch(pass_.micro_batches[m], position)
        if start == 0:
            return micro_batch, None, None, [integers.memory]
        hidden, staged = self._activations.bring_hidden(self._await(BOUNDARY(pass_.index, start, m)))
        return micro_batch, hidden, staged, [integers.memory, staged.memory]

    def _send_gradients(
        self, pass_: Pass, stage: Stage, m: int, gradients: tuple[Tensor, ...] | None
    ) -> None:
        if gradients is not None:
            self._activations.send(BOUNDARY_GRADIENT(pass_.index, stage.start, m), gradients, readers=1)

    # Weights in, gradients out.

    def _start_upload(self, job: StageJob) -> WeightUpload:
        layout = self._layout(range(job.task.stage.start, job.task.stage.stop))
        slot = self._weights.next(self._weight_numel)
        self._begin_step(job, Stream.WEIGHT_UPLOAD)
        return WeightUpload(
            self._device, self._store, self._setup.ordering, slot, layout, job.pass_.version, job.task.slot
        )

    def _advance_transfers(self, remaining: int, window: int) -> None:
        """Enqueue one transfer window: an equal chunk of the next stage's weights and of the last one's gradients.

        `remaining` counts the windows left in this stage, this one included.
        """
        # The next job is looked for in every window: it may be handed out while this stage is under way.
        following = STAGE_JOB(self._next_slot + self._setup.num_devices)
        if self._upload is None and self._setup.board.ready(following):
            self._upload = self._start_upload(self._setup.board.wait(following))
        # Each chunk queues behind the activations already on their way. A chunk has until the end of the
        # stage, but a computation waits for each activation. Chunks of one window's size keep an activation
        # from waiting for a whole stage's weights.
        if self._upload is not None:
            self._device.wait(Stream.WEIGHT_UPLOAD, self._device.record(Stream.ACTIVATION_UPLOAD))
            with self._turn(window, not self._upload.may_advance):
                self._upload.advance(-(-self._upload.remaining // remaining))
        if self._download is not None:
            self._device.wait(Stream.GRADIENT_DOWNLOAD, self._device.record(Stream.ACTIVATION_DOWNLOAD))
            self._download.advance(-(-self._download.remaining // remaining))

    def _turn(self, window: int, nothing_to_do: bool) -> AbstractContextManager[None]:
        """Return the context in which this device's weights go up, in its turn on a shared link."""
        return nullcontext() if nothing_to_do else self._setup.turns.turn(self._index, self._device, window)

    def _clear_gradients(self) -> DeviceSlot:
        slot = self._gradients.next(self._gradient_numel)
        if slot.released is not None:
            self._device.wait(Stream.COMPUTE, slot.released)  # its last gradients have left
        self._device.run(Stream.COMPUTE, slot.memory.zero_, writes=[slot.memory])
        return slot

    def _flush(self) -> None:
        """Send off the gradients that this thread still holds."""
        if self._download is not None:
            self._download.finish()
            self._download = None

    def _await(self, key: HandOverKey[T]) -> T:
        # Held gradients go first: what is awaited may depend on an update that needs
        # them, and then both would hang.
        if not self._setup.board.ready(key):
            self._flush()
        return self._setup.board.wait(key)

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

    # What the watchdog and error messages ask for, from any thread.

    def state(self) -> WorkerState:
        """Return the stage job and micro-batch under way; `location` describes them."""
        return self._job, self._micro_batch

    def location(self, state: WorkerState) -> FaultLocation:
        """Describe a state that `state` returned."""
        job, micro_batch = state
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
