"""One thread per device: takes the device's stage jobs in dispatch order and runs their micro-batches.

The thread enqueues everything on the device's five streams and waits only for values and jobs of other threads, and for
experts by need for the device's own routing. Before a wait for other threads it sends off the gradients that it still holds, because the optimizer may be waiting for them.
"""

import copy
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn

from torchround.engine.board import LAYER_GATE, Board, Queue, Value
from torchround.engine.buffer_reservation import PassShape, ValueSizes
from torchround.engine.device import Device, Mark, Span, Stream
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.passes import DeviceJob, StageJob
from torchround.engine.reports import StageReport
from torchround.engine.settings import EngineSettings
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.compute import LayerCall, StageComputation, bind, checked_loss, unbind
from torchround.engine.worker.orthogonalise import (
    DirectionJob,
    directed_bundles,
    directed_parameters,
    orthogonalise,
)
from torchround.engine.worker.slots import SlotRing, StageSlots, place_constants
from torchround.engine.worker.transfers import ActivationTransfers, FileReader, GradientDownload, WeightUpload
from torchround.keeping import recording, replaying
from torchround.layer import Batch, Hidden, LayeredModel
from torchround.planning.host_buffers import restarted_layers
from torchround.planning.partition import Partition, SpanKind, StageKind
from torchround.planning.update_costs import piece_elements

T = TypeVar("T")
# The kind of the jobs that a device's thread gets.
STAGE_JOB = "stage slot {0} to be handed out"


@dataclass(frozen=True)
class WorkerSetup:
    store: HostStore
    board: Board
    pool: HostPool
    model: LayeredModel
    sizes: ValueSizes
    partition: Partition
    queues: Sequence[Queue[DeviceJob]]
    settings: EngineSettings


class DeviceWorker:
    """The thread that drives one device. `skeletons` are this worker's own copy of the layers, on `meta`."""

    def __init__(self, index: int, device: Device, setup: WorkerSetup) -> None:
        self.device = device
        self.setup = setup
        self.skeletons = list(copy.deepcopy(nn.ModuleList(setup.model.layers)))
        self._store = setup.store
        self.board = setup.board
        self._queue = setup.queues[index]
        self._index = self._next_stage_slot = index
        self._idle = device.location = FaultLocation(f"device {device.name}")  # between jobs
        self._upload: WeightUpload | None = None  # of the next stage job
        self._download: GradientDownload | None = None  # of the previous stage job
        self.activations = ActivationTransfers(self)
        self._look_aheads = SlotRing(device, torch.bfloat16)
        self.reader: FileReader | None = None
        # Without page-locking a copy is the thread's own work anyway, and a ring would only add a second one.
        if device.pins_host_memory and any(bundle.mapped for bundle in self._store.bundles):
            self.reader = FileReader(self)
        self._idle_since: Mark | None = None
        self._reported_bytes = (device.uploaded_bytes, device.downloaded_bytes)
        self.thread = threading.Thread(target=self._main, name=f"torchround {device.name}", daemon=True)

    def allocate(self) -> None:
        """Allocate the slots of all stages, so that no step allocates and a plan that does not fit fails here."""
        setup = self.setup
        place_constants(self.device, self.skeletons)
        self.slots = StageSlots(
            self.device, setup.store, setup.settings.accumulate_dtype, setup.partition, len(setup.queues)
        )
        unpacked, memory = self.slots.unpacked, self.slots.weights.memory
        if (compiler := setup.settings.compiler) is not None:
            compiling = partial(unpacked.compile, compiler.backend, setup.store.bundles, memory)
            self.device.run(Stream.COMPUTE, compiling, [memory], [unpacked.memory])
        directed = [parameter for b in directed_bundles(self._store) for parameter in directed_parameters(b)]
        self._look_aheads.reserve(max((piece_elements(parameter.shape) for parameter in directed), default=0))

    def release(self) -> None:
        """Wait until the device is idle, and give it back. A fault that it raises may be the first that is known of it."""
        try:
            try:
                self.device.finish()
            finally:  # also if the device has failed: it computes no more
                self.device.free()
                unbind(self.skeletons)
                self._upload = self._download = None  # and views of host buffers
                del self.activations  # and the activations that they hold
            # After the buffers are dropped, because a device may hand free memory back to its driver here.
            self.device.release()
        except Exception as error:  # noqa: BLE001  (CUDA's errors share no narrower class)
            self.board.fail(PipelineError.of(error, self._idle))

    def _main(self) -> None:
        try:
            self.device.enter_thread()
            while True:
                if self._queue.peek() is None:
                    self.flush()  # as in `wait`
                job = self._queue.take(STAGE_JOB.format(self._next_stage_slot))
                if isinstance(job, PassShape):
                    self.activations.prepare(job)
                    continue
                if isinstance(job, StageJob):
                    self._run(job)
                else:
                    self._orthogonalise(job)
                self.device.location = self._idle
                self._next_stage_slot += len(self.setup.queues)  # slots are dealt to devices in turn
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever a layer raises must reach the caller)
            # Without a variable for the failure, which would make a reference cycle through the error's traceback. Its
            # frames hold activations, and the failure may be a second one, which nothing else refers to.
            self.board.fail(PipelineError.of(error, self.device.location))
        finally:
            self.release()

    def _run(self, job: StageJob) -> None:
        stage, micro_batches = job.task.stage, job.task.micro_batches
        layers = tuple(self.setup.model.names[stage.start : stage.stop])
        actor, kind = self._idle.actor, stage.kind.value
        between = self.device.location = FaultLocation(actor, kind, layers)
        self.device.step_of = dict.fromkeys(self.device.step_of, job.traced_step)
        upload, self._upload = self._upload or WeightUpload(self, job), None
        self.device.wait(Stream.COMPUTE, upload.finish(), "uploaded weights")
        weights_ready = self.device.mark(Stream.WEIGHT_UPLOAD)
        download = None if stage.kind is StageKind.FORWARD else GradientDownload(self, job, upload.layout)
        on_final = partial(self._send_early, download) if download and self._is_waited_for(job) else None
        stage_run = StageRun(self, job, upload, download, on_final)
        for position, micro_batch in enumerate(micro_batches):
            self.device.location = FaultLocation(actor, kind, layers, micro_batch)
            self.board.raise_if_stopped()
            self._begin_next_upload()
            # A transfer window: an equal chunk of the next stage's weights and of the last one's gradients. Chunks first:
            # their copies then run beside this micro-batch's computation, not after it.
            for transfer in (self._upload, self._download):
                if transfer is not None:
                    transfer.advance(len(micro_batches) - position)
            stage_run.run(micro_batch)
        self.device.location = between
        upload.slot.released = self.device.record(Stream.COMPUTE, "weights that are read")
        if self.setup.model.own_dtypes:
            unbind(self.skeletons[stage.start : stage.stop])  # copies take memory beside the slot
        if download is None:
            self.flush()
        else:
            self._begin_download(download)
            download.layers_final(stage.start)
        moved = (self.device.uploaded_bytes, self.device.downloaded_bytes)
        report = StageReport(
            task=job.task,
            idle_since=self._idle_since,
            weights_ready=weights_ready,
            update_wait_s=upload.waited_s,
            spans=tuple(stage_run.spans),
            uploaded_bytes=moved[0] - self._reported_bytes[0],
            downloaded_bytes=moved[1] - self._reported_bytes[1],
        )
        self._reported_bytes, self._idle_since = moved, report.spans[-1].end
        self.board.post(job.pass_.reports[job.slot], report)

    def _orthogonalise(self, job: DirectionJob) -> None:
        """Run a direction job, while the weights of the next stage come up as far as they are complete."""
        # Look-aheads need them, maybe on other devices. Gradients of the next step land only after this job's update.
        if self._download is not None and self._download.job.pass_.step <= job.step:
            self.flush()
        self.device.step_of = dict.fromkeys(self.device.step_of, job.step)
        for position, bundle in enumerate(job.bundles):
            layers = tuple(self.setup.model.names[layer] for layer in bundle.layers)
            self.device.location = FaultLocation(self._idle.actor, "orthogonalisation", layers)
            access, ring = job.accesses[position], self._look_aheads
            self._idle_since = orthogonalise(self.device, self._index, ring, bundle, access, self.board)
            self._begin_next_upload()
            if self._upload is not None:
                self._upload.advance(len(job.bundles) - position)

    def _begin_next_upload(self) -> None:
        # Looked for in every window, because it may be handed out while this job is under way.
        if self._upload is None and isinstance(job := self._queue.peek(), StageJob):
            self._upload = WeightUpload(self, job)

    def _is_waited_for(self, job: StageJob) -> bool:
        """Tell whether a stage job sends off each layer's gradients as soon as they are final.

        Other jobs' gradients have the next job's windows to go down. But after a device's last stage job of a step in
        `sync` the next job waits for the update. In `bounded` a layer's update waits for its own gradient alone.
        """
        is_last = job.slots_left < len(self.setup.queues)
        is_waited_for = self._store.mode.updates_by_layer or (is_last and self._store.mode.has_flush)
        # Otherwise copies and the norm would take processor time from this very backward: 8 % of a step on two cores.
        return is_waited_for and self.device.has_link

    def _send_early(self, gradients: GradientDownload, layer: int) -> None:
        """Send off the gradients of a layer, to which the computation enqueued so far is the last that adds."""
        # An earlier download that waits for the optimizer comes first. A wait here would leave the device without work.
        if self._download in (None, gradients) or not self._download.remaining:
            self._begin_download(gradients)
            gradients.layers_final(layer)
            gradients.advance()

    def _begin_download(self, gradients: GradientDownload) -> None:
        """Begin to send a stage's gradients: in the next job's windows, or in `flush` if none comes."""
        if self._download is not gradients:
            # The previous stage's download must be complete before this stage's takes its place.
            self.flush()
            self._download = gradients

    def flush(self) -> None:
        """Send off the gradients that this thread still holds."""
        if self._download is not None:
            self._download.finish()
            self._download = None

    def wait(self, value: Value[T]) -> T:
        # Held gradients go first: what is awaited may depend on an update that needs them, and then both would hang.
        if not value.happened:
            self.flush()
        return self.board.wait(value)


# Gradients of a layer's input or output. None is for a tensor that the loss does not depend on.
Gradients = Sequence[Tensor | None]


class StageRun:
    """A stage job under way, whose layers are bound to the slots of its `upload` and, for a backward, its `download`.

    With `on_final`, the backward of the last micro-batch is done layer by layer, and `on_final(layer)` is called once all
    that adds to the gradients of a layer is enqueued. `spans` are the computations so far. With `settings.times_layers`,
    each layer's computations are spans of their own: only the head's forward and backward are one.
    """

    def __init__(
        self,
        worker: DeviceWorker,
        job: StageJob,
        upload: WeightUpload,
        download: GradientDownload | None,
        on_final: Callable[[int], None] | None,
    ) -> None:
        setup, self._stage = worker.setup, job.task.stage
        self.spans: list[Span] = []
        self._worker, self._pass, self._micro_batches = worker, job.pass_, job.task.micro_batches
        self._device, self._activations = worker.device, worker.activations
        self._weights, self._layout = upload.slot, upload.layout
        self._gradients = None if download is None else download.slot
        self._on_final = on_final
        self._layers = self._bind()
        # The first layer whose activations stay for its backward.
        by_layer = setup.settings.layerwise_recompute
        self._graphs_from = self._stage.stop - 1 if by_layer else self._stage.start
        self._times_layers = setup.settings.times_layers
        kept_names = setup.sizes.kept_names
        self._names = {layer: kept_names[layer] for layer in self._layout.layers if layer in kept_names}

    def _bind(self) -> Mapping[int, LayerCall]:
        """Put the parameters of the stage's layers in slots, and compile the layers if the settings ask for it."""
        worker, setup = self._worker, self._worker.setup
        # Bound anew for each job: each has its own place in the buffer, and the next stage has other layers.
        own_dtypes, unpacked = setup.model.own_dtypes, worker.slots.unpacked
        slots = self._layout, self._weights, self._gradients
        binding = partial(bind, setup.store, worker.skeletons, *slots, own_dtypes, unpacked)
        # With dtypes of their own it copies parameters.
        copying = partial(self._device.run, Stream.COMPUTE, binding, [self._weights.memory])
        layers = copying() if own_dtypes else binding()
        if (compiler := setup.settings.compiler) is None:
            return layers
        return {index: compiler.compiled(index, layer, worker.board) for index, layer in layers.items()}

    def _unpack(self, layer: int) -> None:
        """Have the packed weights of a layer unpacked before it runs, in its own computation."""
        content = layer, self._worker.setup.store.refreshes
        self._worker.slots.unpacked.hold(content, self._layout.packed[layer], self._weights.memory)

    def run(self, micro_batch: int) -> None:
        """Enqueue everything for one micro-batch of the pass, given by its number there."""
        kind = self._stage.kind
        if kind is StageKind.FORWARD:
            self._forward(micro_batch)
        elif kind is StageKind.FUSED:
            self._fused(micro_batch)
        else:
            self._backward(micro_batch)
        # After everything is sent: a layer may pass a part of its input on unchanged, and then the copy that `send` makes of
        # the result still reads the input's slot.
        self._activations.end_micro_batch()

    def _forward(self, m: int) -> None:
        """Run forward without gradients, and send what later stages read: the output, and what backward stages need."""
        stage, pass_ = self._stage, self._pass
        micro_batch, inputs = self._bring_inputs(m)
        names = self._names if pass_.training else {}
        records = {layer: partial(recording, kept) for layer, kept in names.items()}
        forward = StageComputation(
            self._layers, inputs, micro_batch, stage.stop, self._unpack, around=records
        )
        # Sent where it is made: it leaves while the layers behind it compute, and the stage need not hold all at once.
        layers = range(stage.start + 1, stage.stop + 1)
        sent = [layer for layer in layers if layer == stage.stop or layer in pass_.backward_inputs]
        first = stage.start
        for layer in layers if self._times_layers else sorted({*sent, *(layer + 1 for layer in names)}):
            output = self._compute(SpanKind.FORWARD, m, range(first, layer), partial(forward.run_to, layer))
            first = layer
            if layer in sent:
                self._send_output(m, layer, output)
            del output  # otherwise it would stay while the next layers run
            # After the boundary, for which another device may be waiting.
            if layer - 1 in names:
                kept, tensors = pass_.kept[layer - 1, m], forward.kept.pop(layer - 1)
                self._activations.send_kept(kept, tensors, layer - 1, micro_batch.shape)

    def _fused(self, m: int) -> None:
        """Run forward and backward of the last stage in one go: its backward needs no gradient from another stage."""
        pass_ = self._pass
        micro_batch, inputs = self._bring_inputs(m)
        fused = StageComputation(
            self._layers, inputs, micro_batch, self._graphs_from, self._unpack, loss_factor=pass_.loss_factor
        )
        if self._times_layers:
            self._run_to(SpanKind.FORWARD, m, fused, self._layout.layers[1:])
        gradients = self._differentiate(SpanKind.FUSED, m, fused, ())
        # Two readers: the caller and the optimizer worker.
        self._activations.send(pass_.results[m], fused.loss, readers=2)
        self._send_gradients(m, gradients)

    def _backward(self, m: int) -> None:
        """Recompute the stage, all but what its layers keep, then run its backward."""
        stage, pass_ = self._stage, self._pass
        micro_batch, inputs = self._bring_inputs(m)
        for layer in restarted_layers(stage, pass_.stale_layers):
            inputs[layer] = self._bring(layer, m, self._activations.restarts_in)
        kept = self._activations.bring_kept(pass_, self._names, m)
        replays = {layer: partial(replaying, self._names[layer], kept[layer]) for layer in kept}
        # Recomputation needs no gradient, so it is enqueued before the thread waits for one. Otherwise the
        # device would be idle until another device has made it.
        recomputed = StageComputation(
            self._layers, inputs, micro_batch, self._graphs_from, self._unpack, replays, reads_output=False
        )
        stops = range(stage.start + 1, stage.stop + 1) if self._times_layers else [stage.stop]
        self._run_to(SpanKind.RECOMPUTE, m, recomputed, stops)
        boundary = self._worker.wait(pass_.boundary_gradients[stage.stop, m])
        incoming: Gradients = self._activations.bring(boundary, self._activations.gradients_in)
        # Behind the gradient, which would be late otherwise: a recomputation that takes what is kept is short.
        if m + 1 in self._micro_batches:
            self._activations.bring_kept_ahead(pass_, self._names, m + 1)
        self._send_gradients(m, self._differentiate(SpanKind.BACKWARD, m, recomputed, incoming))

    def _run_to(self, kind: SpanKind, m: int, graph: StageComputation, stops: Iterable[int]) -> None:
        """Run a forward with graph up to each of these layers in turn."""
        first = self._stage.start
        for stop in stops:
            self._compute(kind, m, range(first, stop), partial(graph.run_to, stop))
            first = stop

    def _differentiate(
        self, kind: SpanKind, m: int, graph: StageComputation, gradients: Gradients
    ) -> Gradients | None:
        """Run the stage's backward, or forward and backward, and return the gradients of the stage's input."""
        stage = self._stage
        assert self._gradients is not None, "a stage with a backward has a gradient slot"
        on_final = self._on_final if m == self._micro_batches[-1] else None
        one_by_one = on_final is not None or self._times_layers
        above: int = stage.stop
        found: Gradients | None = gradients
        for layer in reversed(self._layout.layers) if one_by_one else [stage.start]:
            assert found is not None, "only the layer that starts the model has no input"
            layers, run = range(layer, above), partial(graph.backward, found, layer)
            added_to = self._gradients.memory[self._layout.gradients_of(layers)]
            found = self._compute(kind, m, layers, run, [added_to] if added_to.numel() else [])
            above = layer
            if self._times_layers:
                kind = SpanKind.BACKWARD  # below the head, whose span holds its forward too
            if on_final is not None:
                on_final(layer)
        return found

    def _compute(
        self,
        kind: SpanKind,
        m: int,
        layers: range,
        computation: Callable[[], T],
        writes: Sequence[Tensor] = (),
    ) -> T:
        """Run `computation` of these layers as one span: a `partial`, because tensors in a closure would outlive a fault."""
        reads = [self._weights.memory, *(slot.memory for slot in self._activations.inputs)]
        # By this thread, also for a backward on autograd's own thread, which workers may share and a compiler needs.
        with LAYER_GATE.entered(self._worker.board):
            start = self._device.mark(Stream.COMPUTE)
            result = self._device.run(Stream.COMPUTE, computation, reads, writes)
            end = self._device.mark(Stream.COMPUTE)
        self.spans.append(Span(kind, start, end, micro_batch=m, layers=layers))
        return result

    def _bring_inputs(self, m: int) -> tuple[Batch, dict[int, Hidden]]:
        """Upload the micro-batch and the stage's input, which is None for the first layer."""
        first, packed = self._micro_batches.start, self._pass.micro_batches[m]
        micro_batch = self._activations.bring_micro_batch(packed, m - first)
        start = self._stage.start
        return micro_batch, {start: self._bring(start, m, self._activations.hidden_in) if start else None}

    def _bring(self, layer: int, m: int, ring: SlotRing) -> Hidden:
        """Upload the input of a layer, once another device has made it."""
        return self._activations.bring(self._worker.wait(self._pass.boundaries[layer, m]), ring)

    def _send_output(self, m: int, layer: int, output: Hidden) -> None:
        """Send the input of a layer. After the last one comes a loss, or any value."""
        pass_ = self._pass
        shape = pass_.shape.shapes[m]
        if layer < len(self._worker.skeletons):
            readers = (layer in pass_.forward_inputs) + (layer in pass_.backward_inputs)
            self._activations.send(pass_.boundaries[layer, m], output, readers, layer, shape)
        elif pass_.gives_outputs:
            self._activations.send(pass_.results[m], output, 1, layer, shape)
        else:
            self._activations.send(pass_.results[m], checked_loss(output))

    def _send_gradients(self, m: int, gradients: Gradients | None) -> None:
        if gradients is not None:
            pass_, start = self._pass, self._stage.start
            # Reserved as the input's: a gradient may have fewer tensors, but no larger ones.
            value = pass_.boundary_gradients[start, m]
            self._activations.send(value, tuple(gradients), 1, start, pass_.shape.shapes[m])
