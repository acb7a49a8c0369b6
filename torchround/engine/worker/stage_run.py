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
from torchround.engine.worker.compute import (
    LayerCall,
    StageComputation,
    bind,
    checked_loss,
    recorded,
    replayed,
    with_own_seed,
)
from torchround.engine.worker.transfers import GradientDownload, WeightUpload
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
    """A stage job under way: its layers, bound to the slots of its `upload` and, if it has a backward, its `download`.

    With `on_final`, the backward of the last micro-batch is done layer by layer, and `on_final(layer)` is called once all
    that adds to the gradients of a layer is enqueued. `spans` are the computations so far. With `settings.times_layers`, each layer's computations are spans of their own, of every
    micro-batch: only the head's forward and backward are one.
    """

    def __init__(
        self,
        worker: "DeviceWorker",
        job: StageJob,
        upload: WeightUpload,
        download: GradientDownload | None,
        on_final: Callable[[int], None] | None,
    ) -> None:
        setup, stage = worker.setup, job.task.stage
        self.spans: list[DeviceSpan] = []
        self._job = job
        self._own = own = range(stage.start, stage.stop)
        self._upload = upload
        self._gradients = None if download is None else download.slot
        self._board = setup.tasks.board
        self._layers = self._bind(worker)
        self._num_layers = len(setup.model.layers)
        receives = setup.model.receives_gradients
        self._receives = {layer - stage.start: receives[layer] for layer in own if layer in receives}
        # Of the stage's layers, the first one whose activations stay for its backward.
        self._graphs_from = len(own) - 1 if setup.settings.layerwise_recompute else 0
        self._times_layers = setup.settings.times_layers
        self._device = worker.device
        self._activations = worker.activations
        self._wait: WaitForValue = worker.wait
        self._names = {layer: setup.sizes.kept_names(layer) for layer in own if layer in setup.sizes.keeping}
        self._on_final = on_final

    def _bind(self, worker: "DeviceWorker") -> list[LayerCall]:
        """Return the stage's layers with their parameters in slots, compiled if the settings say so."""
        setup, weights, own_dtypes = worker.setup, self._upload.slot, worker.setup.model.own_dtypes
        # Bound anew for each job: each has its own place in the buffer, and the next stage has other layers.
        layout = self._upload.layout
        binding = partial(bind, setup.store, worker.skeletons, layout, weights, self._gradients, own_dtypes)
        # It copies parameters with dtypes of their own.
        modules = worker.device.run(Stream.COMPUTE, binding, [weights.memory]) if own_dtypes else binding()
        calls: Sequence[LayerCall] = modules
        if compiler := setup.settings.compiler:
            calls = [
                compiler.compiled(i, one, self._board) for i, one in zip(self._own, modules, strict=True)
            ]
        return [with_own_seed(index, call) for index, call in zip(self._own, calls, strict=True)]

    def run(self, micro_batch: int) -> None:
        """Enqueue everything for one micro-batch of the pass, given by its number there."""
        kind = self._job.task.stage.kind
        if kind is StageKind.FORWARD:
            self._forward(micro_batch)
        elif kind is StageKind.FUSED:
            self._fused(micro_batch)
        else:
            self._backward(micro_batch)
        # After everything is sent: a layer may hand a part of its input on as it came, and then the copy that
        # `send` makes of the result still reads the input's slot.
        self._activations.end_micro_batch()

    def _forward(self, m: int) -> None:
        """Run forward without gradients, and send what later stages read: the output, and what backward stages need."""
        stage, pass_ = self._job.task.stage, self._job.pass_
        micro_batch, hidden = self._bring_inputs(m)
        names = self._names if pass_.training else {}
        found: dict[int, list[Tensor]] = {}  # what layers keep
        calls = [
            partial(recorded, names[layer], call, found, layer) if layer in names else call
            for layer, call in zip(self._own, self._layers, strict=True)
        ]
        forward = StageComputation(calls, hidden, micro_batch, graphs_from=len(calls))
        # Everything is sent where it is made: it leaves while the layers behind it compute, and the stage
        # need not hold all of it at once.
        layers = range(stage.start + 1, stage.stop + 1)
        sent = [layer for layer in layers if layer == stage.stop or layer in pass_.backward_inputs]
        first = stage.start
        for layer in layers if self._times_layers else sorted({*sent, *(layer + 1 for layer in names)}):
            run = partial(forward.run_to, layer - stage.start)
            output = self._compute(TaskKind.FORWARD, m, range(first, layer), run)
            first = layer
            if layer in sent:
                self._send_output(m, layer, output)
            del output  # otherwise it would stay while the next layers run
            # After the boundary, for which another device may be waiting.
            if layer - 1 in names:
                kept = pass_.kept.at(layer - 1, m)
                self._activations.send_kept(kept, found.pop(layer - 1), layer - 1, micro_batch.shape)

    def _fused(self, m: int) -> None:
        """Run forward and backward of the last stage in one go: its backward needs no gradient from another stage."""
        pass_ = self._job.pass_
        micro_batch, hidden = self._bring_inputs(m)
        fused = StageComputation(
            self._layers,
            hidden,
            micro_batch,
            self._graphs_from,
            self._receives,
            loss_factor=pass_.loss_factor,
        )
        if self._times_layers:
            self._run_to(TaskKind.FORWARD, m, fused, self._own[1:])
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
        kept = self._activations.bring_kept(pass_, self._names, m, self._wait)
        layers = [
            partial(replayed, self._names[layer], call, kept[layer]) if layer in kept else call
            for layer, call in zip(self._own, self._layers, strict=True)
        ]
        # Recomputation needs no gradient, so it is enqueued before the thread waits for one. Otherwise the
        # device would be idle until another device has made it.
        recomputed = StageComputation(
            layers, hidden, micro_batch, self._graphs_from, self._receives, restarts, reads_output=False
        )
        stops = range(stage.start + 1, stage.stop + 1) if self._times_layers else [stage.stop]
        self._run_to(TaskKind.RECOMPUTE, m, recomputed, stops)
        incoming = self._activations.bring_gradients(self._wait(pass_.boundary_gradients.at(stage.stop, m)))
        # Behind the gradient, which would be late otherwise: a recomputation that takes what is kept is short.
        if m + 1 in self._job.task.micro_batches:
            self._activations.bring_kept_ahead(pass_, self._names, m + 1)
        self._send_gradients(m, self._differentiate(TaskKind.BACKWARD, m, recomputed, incoming))

    def _run_to(self, kind: TaskKind, m: int, graph: StageComputation, stops: Iterable[int]) -> None:
        """Run a forward with graph up to each of these layers in turn."""
        first = start = self._own.start
        for stop in stops:
            self._compute(kind, m, range(first, stop), partial(graph.run_to, stop - start))
            first = stop

    def _differentiate(
        self, kind: TaskKind, m: int, graph: StageComputation, gradients: Gradients
    ) -> Gradients | None:
        """Run the stage's backward, or forward and backward, and return the gradients of the stage's input."""
        stage = self._job.task.stage
        assert self._gradients is not None, "a stage with a backward has a gradient slot"
        on_final = self._on_final if m == self._job.task.micro_batches[-1] else None
        one_by_one = on_final is not None or self._times_layers
        above: int = stage.stop
        found: Gradients | None = gradients
        for layer in reversed(self._own) if one_by_one else [stage.start]:
            assert found is not None, "only the layer that starts the model has no input"
            layers, run = range(layer, above), partial(graph.backward, found, layer - stage.start)
            added_to = self._gradients.memory[self._upload.layout.gradients_of(layers)]
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
        reads = [self._upload.slot.memory, *(slot.memory for slot in self._activations.inputs)]
        # By this thread, also for a backward that autograd's own thread runs: workers may share that one, and a compiler
        # needs it.
        with LAYER_GATE.entered(self._board):
            start = self._device.mark(Stream.COMPUTE)
            with marks:
                result = self._device.run(Stream.COMPUTE, computation, reads, writes)
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
        packed = self._job.pass_.micro_batches[m]
        micro_batch = self._activations.bring_micro_batch(packed, m - task.micro_batches.start)
        return micro_batch, self._bring_hidden(task.stage.start, m) if task.stage.start else None

    def _bring_hidden(self, layer: int, m: int, restarts: bool = False) -> Hidden:
        """Upload the input of a layer: of the stage's first one, or of one inside it that begins anew."""
        boundary = self._wait(self._job.pass_.boundaries.at(layer, m))
        return self._activations.bring_hidden(boundary, restarts)

    def _send_output(self, m: int, layer: int, output: Hidden) -> None:
        """Send the input of a layer. After the last one comes a loss, or any value."""
        pass_ = self._job.pass_
        shape = pass_.shape.shapes[m]
        if layer < self._num_layers:
            readers = (layer in pass_.forward_inputs) + (layer in pass_.backward_inputs)
            self._activations.send(pass_.boundaries.at(layer, m), output, readers, layer, shape)
        elif pass_.gives_outputs:
            self._activations.send(pass_.results[m], output, 1, layer, shape)
        else:
            self._activations.send(pass_.results[m], checked_loss(output))

    def _send_gradients(self, m: int, gradients: Gradients | None) -> None:
        if gradients is not None:
            pass_, start = self._job.pass_, self._own.start
            # Reserved as the input's: a gradient may have fewer tensors, but no larger ones.
            value = pass_.boundary_gradients.at(start, m)
            self._activations.send(value, tuple(gradients), 1, start, pass_.shape.shapes[m])
