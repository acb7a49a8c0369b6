"""One stage job on its device: what the three kinds of stage compute, bring and send for each micro-batch."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from torch import Tensor

from torchround.engine.board import LAYER_GATE, WaitForValue
from torchround.engine.device import Mark, Stream
from torchround.engine.passes import StageJob
from torchround.engine.reports import DeviceSpan
from torchround.engine.timeline import TaskKind
from torchround.engine.worker.bundle_transfers import WeightUpload
from torchround.engine.worker.compute import (
    ForwardWithGraph,
    FusedStage,
    LayerCall,
    StageForward,
    bind,
    checked_loss,
    with_own_seed,
)
from torchround.engine.worker.slots import DeviceSlot
from torchround.keeping import marking
from torchround.layer import Batch, Hidden
from torchround.planning.host_buffers import restarted_layers
from torchround.planning.partition import StageKind

if TYPE_CHECKING:
    from torchround.engine.worker.device_worker import DeviceWorker

T = TypeVar("T")
# Gradients of a layer's input or output. None stands for a tensor that the loss does not depend on.
Gradients = Sequence[Tensor | None]
BackwardCall = Callable[[Gradients, int], Gradients | None]


class StageRun:
    """A stage job under way: its layers, bound to the slots of its weights and, if it has a backward, its gradients.

    `wait` waits for a value of another device. With `on_final`, the backward of the last micro-batch is done layer by
    layer, and `on_final(layer)` is called once all that adds to the gradients of a layer is enqueued. `spans` are the
    computations so far. With `settings.times_layers`, each layer's computations are spans of their own, of every
    micro-batch: only the head's forward and backward are one.
    """

    def __init__(
        self,
        worker: "DeviceWorker",
        job: StageJob,
        upload: WeightUpload,
        gradients: DeviceSlot | None,
        wait: WaitForValue,
        on_final: Callable[[int], None] | None,
    ) -> None:
        setup, stage = worker.setup, job.task.stage
        self.spans: list[DeviceSpan] = []
        self._job = job
        self._layers = bound_layers(worker, upload, gradients)
        self._weights = upload.slot
        self._layout = upload.layout
        self._gradients = gradients
        self._num_layers = len(setup.model.layers)
        self._receives = {
            layer - stage.start: setup.model.receives_gradients[layer]
            for layer in range(stage.start, stage.stop)
            if layer in setup.model.receives_gradients
        }
        self._layerwise = setup.settings.layerwise_recompute
        self._times_layers = setup.settings.times_layers
        self._board = setup.board
        self._device = worker.device
        self._activations = worker.activations
        self._wait = wait
        self._keeping = worker.activations.keeping(range(stage.start, stage.stop))
        self._on_final = on_final

    def run(self, micro_batch: int) -> None:
        """Enqueue everything for one micro-batch of the pass, given by its number there."""
        _KINDS[self._job.task.stage.kind](self, micro_batch)
        # After everything is sent: a layer may hand a part of its input on as it came, and then the copy that
        # `send` makes of the result still reads the input's slot.
        self._activations.end_micro_batch()

    def _forward(self, m: int) -> None:
        """Run forward without gradients, and send what later stages read: the output, and what backward stages need."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden, inputs = self._bring_inputs(m)
        keeping = self._keeping if pass_.training else []
        forward = StageForward(self._recording(keeping), hidden, micro_batch)
        # Everything is sent where it is made: it leaves while the layers behind it compute, and the stage
        # need not hold all of it at once.
        layers = range(stage.start + 1, stage.stop + 1)
        sent = [layer for layer in layers if layer == stage.stop or layer in pass_.backward_inputs]
        stops = sorted({*sent, *(layer + 1 for layer in keeping)})
        first = stage.start
        for layer in layers if self._times_layers else stops:
            run = partial(forward.run_to, layer - stage.start)
            output = self._compute(TaskKind.FORWARD, m, run, inputs, layers=range(first, layer))
            first = layer
            if layer not in sent:
                pass
            elif layer == self._num_layers:
                self._send_result(m, output)
            else:
                readers = (layer in pass_.forward_inputs) + (layer in pass_.backward_inputs)
                boundary, shape = pass_.boundaries.at(layer, m), pass_.shape.shapes[m]
                self._activations.send(boundary, output, readers, layer, shape)
            del output  # otherwise it would stay while the next layers run
            # After the boundary, for which another device may be waiting.
            if layer - 1 in keeping:
                kept = pass_.kept.at(layer - 1, m)
                self._activations.send_kept(kept, layer - 1, micro_batch.shape)

    def _fused(self, m: int) -> None:
        """Run forward and backward of the last stage in one go: its backward needs no gradient from another stage."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden, inputs = self._bring_inputs(m)
        fused = FusedStage(
            self._layers, hidden, micro_batch, self._layerwise, pass_.loss_factor, self._receives
        )
        if self._times_layers:
            self._run_to(TaskKind.FORWARD, m, fused, range(stage.start + 1, stage.stop), inputs)
        gradients = self._differentiate(TaskKind.FUSED, m, fused.backward, (), inputs)
        # Two readers: the caller and the optimizer worker.
        self._activations.send(pass_.results[m], fused.loss, readers=2)
        self._send_gradients(m, gradients)

    def _backward(self, m: int) -> None:
        """Recompute the stage from its input, all but what its layers keep, then run its backward."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden, inputs = self._bring_inputs(m)
        restarts, staged_restarts = self._bring_restarts(m)
        inputs += staged_restarts
        own = range(stage.start, stage.stop)
        kept, staged_kept = self._activations.bring_kept(pass_, own, m, self._wait)
        inputs += staged_kept
        layers = [
            self._activations.replayed(layer, call, kept)
            for layer, call in zip(own, self._layers, strict=True)
        ]
        # Recomputation needs no gradient, so it is enqueued before the thread waits for one. Otherwise the
        # device would be idle until another device has made it.
        recomputed = ForwardWithGraph(
            layers, hidden, micro_batch, self._layerwise, restarts, self._receives, reads_output=False
        )
        stops = range(stage.start + 1, stage.stop + 1) if self._times_layers else [stage.stop]
        self._run_to(TaskKind.RECOMPUTE, m, recomputed, stops, inputs)
        boundary = self._wait(pass_.boundary_gradients.at(stage.stop, m))
        incoming, staged = self._activations.bring_gradients(boundary)
        # Behind the gradient, which would be late otherwise: a recomputation that takes what is kept is short.
        if m + 1 in self._job.task.micro_batches:
            self._activations.bring_kept_ahead(pass_, own, m + 1)
        # The backward reads the stage's input and what is kept too.
        reads = [*inputs, staged.memory]
        gradients = self._differentiate(TaskKind.BACKWARD, m, recomputed.backward, incoming, reads)
        self._send_gradients(m, gradients)

    def _recording(self, keeping: Sequence[int]) -> list[LayerCall]:
        """Return the stage's layers; those of `keeping` record what they keep."""
        return [
            self._activations.recorded(layer, call) if layer in keeping else call
            for layer, call in enumerate(self._layers, start=self._job.task.stage.start)
        ]

    def _run_to(
        self, kind: TaskKind, m: int, graph: ForwardWithGraph, stops: Iterable[int], reads: Sequence[Tensor]
    ) -> None:
        """Run a forward with graph up to each of these layers in turn."""
        first = start = self._job.task.stage.start
        for stop in stops:
            self._compute(kind, m, partial(graph.run_to, stop - start), reads, layers=range(first, stop))
            first = stop

    def _differentiate(
        self, kind: TaskKind, m: int, backward: BackwardCall, gradients: Gradients, reads: Sequence[Tensor]
    ) -> Gradients | None:
        """Run the stage's backward, or forward and backward, and return the gradients of the stage's input."""
        stage, tells = self._job.task.stage, self._on_final
        tells_now = tells if m == self._job.task.micro_batches[-1] else None
        one_by_one = tells_now is not None or self._times_layers
        stops = range(stage.stop - 1, stage.start - 1, -1) if one_by_one else [stage.start]
        above: int = stage.stop
        found: Gradients | None = gradients
        for layer in stops:
            assert found is not None, "only the layer that starts the model has no input"
            layers = range(layer, above)
            run = partial(backward, found, layer - stage.start)
            found = self._compute(kind, m, run, reads, self._gradients_of(layers), layers)
            above = layer
            if self._times_layers:
                kind = TaskKind.BACKWARD  # below the head, whose span holds its forward too
            if tells_now is not None:
                tells_now(layer)
        return found

    def _gradients_of(self, layers: range) -> list[Tensor]:
        """Return the device memory that the backward of these layers adds to."""
        assert self._gradients is not None, "a stage with a backward has a gradient slot"
        part = self._gradients.memory[self._layout.gradients_of(layers)]
        return [part] if part.numel() else []

    def _compute(
        self,
        kind: TaskKind,
        m: int,
        computation: Callable[[], T],
        reads: Sequence[Tensor],
        writes: Sequence[Tensor] = (),
        layers: range | None = None,
    ) -> T:
        """Run `computation` of these layers, all layers of the stage if none are given, as one span.

        Give a `partial` rather than a function that takes tensors from the one around it. After a fault the
        traceback's frames are cleared (`lifecycle.py`), but tensors that are taken so would stay.
        """
        stage = self._job.task.stage
        part_marks: list[tuple[str, Mark]] = []
        # Recomputations may take what is kept in place of their parts, so forwards alone tell how long these are.
        marks_parts = self._times_layers and kind is TaskKind.FORWARD
        marks = marking(partial(self._mark_part, part_marks)) if marks_parts else nullcontext()
        # By this thread, also for a backward that autograd's own thread runs: workers may share that one, and a compiler
        # needs it.
        with LAYER_GATE.entered(self._board):
            start = self._device.mark(Stream.COMPUTE)
            with marks:
                result = self._device.run(Stream.COMPUTE, computation, [self._weights.memory, *reads], writes)
            end = self._device.mark(Stream.COMPUTE)
        own = layers or range(stage.start, stage.stop)
        self.spans.append(
            DeviceSpan(kind, start, end, micro_batch=m, layers=own, part_marks=tuple(part_marks))
        )
        return result

    def _mark_part(self, marks: list[tuple[str, Mark]], name: str) -> None:
        marks.append((name, self._device.mark(Stream.COMPUTE)))

    def _bring_inputs(self, m: int) -> tuple[Batch, Hidden | None, list[Tensor]]:
        """Upload what a stage reads: the micro-batch, and the stage's input.

        The input is None for the first layer, which reads the micro-batch alone. The last value is the device
        memory that holds both.
        """
        pass_, task = self._job.pass_, self._job.task
        position = m - task.micro_batches.start
        micro_batch, integers = self._activations.bring_micro_batch(pass_.micro_batches[m], position)
        if task.stage.start == 0:
            return micro_batch, None, [integers.memory]
        boundary = self._wait(pass_.boundaries.at(task.stage.start, m))
        hidden, staged = self._activations.bring_hidden(boundary)
        return micro_batch, hidden, [integers.memory, staged.memory]

    def _bring_restarts(self, m: int) -> tuple[dict[int, Hidden], list[Tensor]]:
        """Upload the inputs of layers that begin anew, by their number in the stage; also return the memory that holds them."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        brought: dict[int, Hidden] = {}
        memory: list[Tensor] = []
        for layer in restarted_layers(stage, pass_.stale_layers):
            boundary = self._wait(pass_.boundaries.at(layer, m))
            brought[layer - stage.start], slot = self._activations.bring_hidden(boundary, restarts=True)
            memory.append(slot.memory)
        return brought, memory

    def _send_result(self, m: int, output: Hidden) -> None:
        """Send what the last layer returned in a pass without gradients: a loss, or anything."""
        pass_ = self._job.pass_
        if pass_.gives_outputs:
            self._activations.send(pass_.results[m], output, 1, self._num_layers, pass_.shape.shapes[m])
        else:
            self._activations.send(pass_.results[m], checked_loss(output), 1)

    def _send_gradients(self, m: int, gradients: Gradients | None) -> None:
        if gradients is not None:
            pass_, start = self._job.pass_, self._job.task.stage.start
            # Reserved as the input's: a gradient may have fewer tensors, but no larger ones.
            value = pass_.boundary_gradients.at(start, m)
            self._activations.send(value, tuple(gradients), 1, start, pass_.shape.shapes[m])


_KINDS = {
    StageKind.FORWARD: StageRun._forward,
    StageKind.FUSED: StageRun._fused,
    StageKind.BACKWARD: StageRun._backward,
}


def bound_layers(
    worker: "DeviceWorker", upload: WeightUpload, gradients: DeviceSlot | None
) -> list[LayerCall]:
    """Return a stage's layers with their parameters in slots, compiled if the settings say so."""
    setup, layers = worker.setup, upload.layout.layers
    own_dtypes = setup.model.own_dtypes
    # Bound anew for each job: each has its own place in the buffer, and the next stage has other layers.
    binding = partial(bind, setup.store, worker.skeletons, upload.layout, upload.slot, gradients, own_dtypes)
    # Parameters with dtypes of their own are copied.
    modules = (
        worker.device.run(Stream.COMPUTE, binding, reads=[upload.slot.memory]) if own_dtypes else binding()
    )
    calls: list[LayerCall] = list(modules)
    if (compiler := setup.settings.compiler) is not None:
        calls = [
            compiler.compiled(index, module, setup.board)
            for index, module in zip(layers, modules, strict=True)
        ]
    return [with_own_seed(index, call) for index, call in zip(layers, calls, strict=True)]
