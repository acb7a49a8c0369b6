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
        self._weights = upload.slot.memory
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
        self._reads: list[Tensor] = []  # device memory that computations of the present micro-batch read

    def run(self, micro_batch: int) -> None:
        """Enqueue everything for one micro-batch of the pass, given by its number there."""
        self._reads = [self._weights]
        _KINDS[self._job.task.stage.kind](self, micro_batch)
        # After everything is sent: a layer may hand a part of its input on as it came, and then the copy that
        # `send` makes of the result still reads the input's slot.
        self._activations.end_micro_batch()

    def _forward(self, m: int) -> None:
        """Run forward without gradients, and send what later stages read: the output, and what backward stages need."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden = self._bring_inputs(m)
        keeping = self._keeping if pass_.training else []
        calls = [
            self._activations.recorded(layer, call) if layer in keeping else call
            for layer, call in enumerate(self._layers, start=stage.start)
        ]
        forward = StageForward(calls, hidden, micro_batch)
        # Everything is sent where it is made: it leaves while the layers behind it compute, and the stage
        # need not hold all of it at once.
        layers = range(stage.start + 1, stage.stop + 1)
        sent = [layer for layer in layers if layer == stage.stop or layer in pass_.backward_inputs]
        stops = sorted({*sent, *(layer + 1 for layer in keeping)})
        first = stage.start
        for layer in layers if self._times_layers else stops:
            run = partial(forward.run_to, layer - stage.start)
            output = self._compute(TaskKind.FORWARD, m, range(first, layer), run)
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
        micro_batch, hidden = self._bring_inputs(m)
        fused = FusedStage(
            self._layers, hidden, micro_batch, self._layerwise, pass_.loss_factor, self._receives
        )
        if self._times_layers:
            self._run_to(TaskKind.FORWARD, m, fused, range(stage.start + 1, stage.stop))
        gradients = self._differentiate(TaskKind.FUSED, m, fused, ())
        # Two readers: the caller and the optimizer worker.
        self._activations.send(pass_.results[m], fused.loss, readers=2)
        self._send_gradients(m, gradients)

    def _backward(self, m: int) -> None:
        """Recompute the stage from its input, all but what its layers keep, then run its backward."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden = self._bring_inputs(m)
        restarts = {
            layer - stage.start: self._bring_hidden(layer, m, restarts=True)
            for layer in restarted_layers(stage, pass_.stale_layers)
        }
        own = range(stage.start, stage.stop)
        kept, staged_kept = self._activations.bring_kept(pass_, own, m, self._wait)
        self._reads += staged_kept
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
        self._run_to(TaskKind.RECOMPUTE, m, recomputed, stops)
        boundary = self._wait(pass_.boundary_gradients.at(stage.stop, m))
        incoming, staged = self._activations.bring_gradients(boundary)
        self._reads.append(staged.memory)
        # Behind the gradient, which would be late otherwise: a recomputation that takes what is kept is short.
        if m + 1 in self._job.task.micro_batches:
            self._activations.bring_kept_ahead(pass_, own, m + 1)
        self._send_gradients(m, self._differentiate(TaskKind.BACKWARD, m, recomputed, incoming))

    def _run_to(self, kind: TaskKind, m: int, graph: ForwardWithGraph, stops: Iterable[int]) -> None:
        """Run a forward with graph up to each of these layers in turn."""
        first = start = self._job.task.stage.start
        for stop in stops:
            self._compute(kind, m, range(first, stop), partial(graph.run_to, stop - start))
            first = stop

    def _differentiate(
        self, kind: TaskKind, m: int, graph: ForwardWithGraph, gradients: Gradients
    ) -> Gradients | None:
        """Run the stage's backward, or forward and backward, and return the gradients of the stage's input."""
        stage = self._job.task.stage
        assert self._gradients is not None, "a stage with a backward has a gradient slot"
        on_final = self._on_final if m == self._job.task.micro_batches[-1] else None
        one_by_one = on_final is not None or self._times_layers
        above: int = stage.stop
        found: Gradients | None = gradients
        for layer in range(stage.stop - 1, stage.start - 1, -1) if one_by_one else [stage.start]:
            assert found is not None, "only the layer that starts the model has no input"
            layers, run = range(layer, above), partial(graph.backward, found, layer - stage.start)
            added_to = self._gradients.memory[self._layout.gradients_of(layers)]
            found = self._compute(kind, m, layers, run, [added_to] if added_to.numel() else [])
            above = layer
            if self._times_layers:
                kind = TaskKind.BACKWARD  # below the head, whose span holds its forward too
            if on_final is not None:
                on_final(layer)
        return found

    def _compute(
        self,
        kind: TaskKind,
        m: int,
        layers: range,
        computation: Callable[[], T],
        writes: Sequence[Tensor] = (),
    ) -> T:
        """Run `computation` of these layers as one span.

        Give a `partial` rather than a function that takes tensors from the one around it. After a fault the
        traceback's frames are cleared (`lifecycle.py`), but tensors that are taken so would stay.
        """
        part_marks: list[tuple[str, Mark]] = []
        # Recomputations may take what is kept in place of their parts, so forwards alone tell how long these are.
        marks_parts = self._times_layers and kind is TaskKind.FORWARD
        marks = marking(partial(self._mark_part, part_marks)) if marks_parts else nullcontext()
        # By this thread, also for a backward that autograd's own thread runs: workers may share that one, and a compiler
        # needs it.
        with LAYER_GATE.entered(self._board):
            start = self._device.mark(Stream.COMPUTE)
            with marks:
                result = self._device.run(Stream.COMPUTE, computation, self._reads, writes)
            end = self._device.mark(Stream.COMPUTE)
        self.spans.append(
            DeviceSpan(kind, start, end, micro_batch=m, layers=layers, part_marks=tuple(part_marks))
        )
        return result

    def _mark_part(self, marks: list[tuple[str, Mark]], name: str) -> None:
        marks.append((name, self._device.mark(Stream.COMPUTE)))

    def _bring_inputs(self, m: int) -> tuple[Batch, Hidden | None]:
        """Upload what a stage reads: the micro-batch, and the stage's input.

        The input is None for the first layer, which reads the micro-batch alone.
        """
        task = self._job.task
        position = m - task.micro_batches.start
        packed = self._job.pass_.micro_batches[m]
        micro_batch, integers = self._activations.bring_micro_batch(packed, position)
        self._reads.append(integers.memory)
        return micro_batch, self._bring_hidden(task.stage.start, m) if task.stage.start else None

    def _bring_hidden(self, layer: int, m: int, restarts: bool = False) -> Hidden:
        """Upload the input of a layer: of the stage's first one, or of one inside it that begins anew."""
        boundary = self._wait(self._job.pass_.boundaries.at(layer, m))
        hidden, staged = self._activations.bring_hidden(boundary, restarts)
        self._reads.append(staged.memory)
        return hidden

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
    setup, layers, own_dtypes = worker.setup, upload.layout.layers, worker.setup.model.own_dtypes
    # Bound anew for each job: each has its own place in the buffer, and the next stage has other layers.
    binding = partial(bind, setup.store, worker.skeletons, upload.layout, upload.slot, gradients, own_dtypes)
    modules = (
        # It copies parameters with dtypes of their own.
        worker.device.run(Stream.COMPUTE, binding, reads=[upload.slot.memory]) if own_dtypes else binding()
    )
    compiler = setup.settings.compiler
    return [
        with_own_seed(index, module if compiler is None else compiler.compiled(index, module, setup.board))
        for index, module in zip(layers, modules, strict=True)
    ]
