"""The optimizer's thread: what each of its tasks does to gradients and weights (`program.py` says when).

An update can be finished but not undone. One that failed in the middle is therefore completed before the fault is
reported, so that the host store holds a whole number of updates. In `bounded` no layer waits for another, so a fault in
the middle of a step leaves layers of two versions. So does a `HostOptimizer`, whose second try would apply a part twice.
"""

import itertools
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from torchround.compiled_loops import RangeThreads
from torchround.config import OptimizerTable
from torchround.engine.board import LAYER_GATE, Board, Value
from torchround.engine.device import Mark, Span, use_threads_here
from torchround.engine.errors import MIXED, EngineUsageError, FaultLocation, PipelineError, Stopped
from torchround.engine.exchange import StepExchange
from torchround.engine.passes import Pass
from torchround.engine.reports import UpdateReport
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import DECISION, Buffer, Worker
from torchround.optim import HostOptimizer, UpdateProgress, clip_scale, layer_max_norm, sum_of_squares
from torchround.optim.host_optimizer import Hyperparameters
from torchround.optim.kernel import KernelKind, get_kernels
from torchround.optim.update_pass import UpdateKernel, look_ahead_
from torchround.planning.partition import SpanKind


@dataclass
class Decision:
    """A step's learning rate or hyperparameters, and once its figures are known, whether its update applies.

    `norm_to_clip` is the norm, before clipping, of the gradients without a direction. `made` stands for the decision among
    the memory that tasks read and write.
    """

    step: int
    updated: Value[UpdateReport]
    lr: float
    hyperparameters: Hyperparameters | None = None
    norm_to_clip: float = math.nan
    made: Buffer = field(default_factory=partial(Buffer, DECISION))
    report: UpdateReport = field(default_factory=UpdateReport)

    @property
    def applies(self) -> bool:
        return not self.report.skipped


class Updater(Worker):
    """The optimizer's thread. Each public method runs inside one of its tasks, if nothing else is said."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        pool: HostPool,
        optimizer: OptimizerTable | HostOptimizer,
        settings: EngineSettings,
        num_devices: int,
        exchange: StepExchange,
    ) -> None:
        super().__init__("torchround optimizer", "optimizer worker", board, self.fault)
        self._store = store
        self._pool = pool
        self._host_optimizer = optimizer if isinstance(optimizer, HostOptimizer) else None
        if self._host_optimizer is not None:
            self._host_optimizer.bind(trained_weights(store))
        self._exchange = exchange
        self._max_norm, self._clips_by_layer = settings.max_norm, settings.clip == "layer"
        clipped = {b.index: [s for s in b.segments if not s.rule.uses_direction] for b in store.trained}
        self._sizes = {
            i: sum(p.shape.numel() for s in each for p in s.parameters) for i, each in clipped.items()
        }
        self._num_threads = update_threads(num_devices)
        self._threads = RangeThreads(self._num_threads)
        self._compiles = settings.compile_update and self._host_optimizer is None
        self._kernels: Mapping[KernelKind, UpdateKernel] = {}
        self._begun: int | None = None  # the step whose update is under way
        self._overcome: PipelineError | None = None
        # Of the step under way, by bundle: squared norms of what is clipped, and of what has a direction.
        self._squares: dict[int, float] = {}
        self._direction_squares: dict[int, float] = {}
        self._losses: list[float] = []
        self._loss = 0.0

    # The thread.

    def enter(self) -> None:
        use_threads_here(self._num_threads)
        if self._compiles:
            store = self._store
            each = (
                KernelKind.of(buffers, store.mode.predicts)
                for bundle in store.owned
                for buffers in store.update_buffers(bundle, store.step)
            )
            kinds = {kind for kind in each if kind is not None}
            self._kernels = get_kernels(kinds, self._board.note_progress, self._threads)

    def leave(self) -> None:
        self._threads.close()

    def is_begun(self, step: int) -> bool:
        return self._begun == step

    def fault(self, error: BaseException, location: FaultLocation) -> None:
        failure = self._exchange.located(error)
        if failure is None:
            failure = PipelineError.of(error, location)
            if not self._store.is_consistent:
                why = "a second try failed too" if self._overcome else "some layers are updated"
                if self._host_optimizer is not None:
                    why = "a part of the weights may be updated"
                failure.store_is_consistent = False
                failure.add(f"{why}: {MIXED}")
        self._board.fail(failure)

    def overcome(self, error: BaseException) -> None:
        """Keep an error of which the update is independent, to report it once the store is whole."""
        assert self.task is not None, "only a task of an update has such an error"
        self._overcome = self._overcome or PipelineError.of(error, self.task.location)

    def hyperparameters_of(self, lr: float | None) -> tuple[float, Hyperparameters | None]:
        """Tell the controller a step's learning rate, and the hyperparameters of a `HostOptimizer` as they are now."""
        if self._host_optimizer is not None:
            return 0.0, self._host_optimizer.hyperparameters(lr)
        if lr is None:
            raise EngineUsageError("step() needs a learning rate; only a HostOptimizer has one of its own")
        return lr, None

    # The tasks of a step, in their order. In `bounded`, `end_pass` and `decide` come first, then `measure_gradient` and `update`
    # for each bundle, and only `finish` joins the norms.

    def measure_gradient(self, bundle: Bundle, step: int) -> None:
        """Keep the squared norms of a bundle's whole gradient, and write its look-aheads."""
        gradient = bundle.whole_gradient
        self._board.observer.touched(reads=[gradient], writes=())
        clipped, directed = list[float](), list[float]()
        for index, segment in enumerate(bundle.segments):
            squares = directed if segment.rule.uses_direction else clipped
            # Parameter by parameter, so that the sums do not depend on the layout.
            squares += [float(sum_of_squares(gradient[p.start : p.stop])) for p in segment.parameters]
            if segment.direction is not None:
                self._board.observer.touched([gradient, *segment.parts.values()], [segment.direction])
                # The momentum stays as it is, so a skipped step changes nothing.
                look_ahead_(
                    self._store.update_buffers(bundle, step)[index], self._store.direction_scale(step)
                )
        self._squares[bundle.index] = math.fsum(clipped)
        self._direction_squares[bundle.index] = math.fsum(directed)

    def end_pass(self, pass_: Pass) -> None:
        start_s = time.perf_counter()
        losses = [float(self._board.wait(loss).read(self._pool)[0]) for loss in pass_.results]
        self.busy_s -= time.perf_counter() - start_s  # a wait for the devices
        sums = self._exchange.all_losses(pass_, losses)
        # The gradient is that of the sum of all calls' losses.
        self._losses += sums
        self._loss += sum(sums) / max(pass_.num_labels, 1)

    def decide(self, decision: Decision, directions: Sequence[Buffer]) -> None:
        """Decide whether a step applies. In `bounded` no gradient is whole yet: the losses alone decide."""
        report = decision.report
        report.directions = tuple(buffer.content for buffer in directions)
        report.loss_scale = self._store.loss_scaling.scale_of(decision.step)
        norm = 0.0 if self._store.mode.updates_by_layer else self._join_norms(decision)
        report.fault = ""  # also of an overflow that a lower loss scale can cure
        if not math.isfinite(self._loss):
            report.fault = "the loss is not finite"
        elif math.isfinite(norm):
            report.fault = str(self._store.spikes.spike(self._loss, norm) or "")
        elif not self._store.loss_scaling.can_fall(report.loss_scale):
            report.fault = "the gradient is not finite"
        report.skipped = bool(report.fault) or not math.isfinite(norm)
        if report.skipped or self._host_optimizer is None:  # whose own step begins the update
            self._begin_update(decision)

    def _join_norms(self, decision: Decision) -> float:
        """Compute the norm of the whole gradient of all machines, and of what is clipped of it."""
        report, own = decision.report, (self._squares, self._direction_squares)
        self._squares, directed = self._exchange.gather(own, f"the norms of step {decision.step}")
        squares = [*self._squares.values(), *directed.values()]
        report.grad_norm = math.sqrt(math.fsum(squares)) / report.loss_scale
        decision.norm_to_clip = math.sqrt(math.fsum(self._squares.values())) / report.loss_scale
        return report.grad_norm

    def _mark(self) -> None:
        """Mark the store as inconsistent, if it is not yet. Raises `Stopped` after a stop: no update begins then.

        Marks first and looks second: a thread that finds a consistent store after a stop may read it.
        """
        if not self._store.is_consistent:
            return
        self._store.is_consistent = False
        try:
            self._board.raise_if_stopped()
        except Stopped:
            self._store.is_consistent = True
            raise

    def _begin_update(self, decision: Decision) -> None:
        updates_by_layer = self._store.mode.updates_by_layer
        if decision.applies or not updates_by_layer:
            self._mark()
        if not updates_by_layer:  # After a stop it could not be completed: gradients would be missing.
            self._begun = decision.step
        if decision.applies:
            # Before the bundles: the bias correction of this update counts it, whatever layers `bounded` leaves out.
            self._store.applied_updates += 1
            if self._store.mode.predicts:
                self._store.prediction = float(decision.lr)

    def step_host_optimizer(self, decision: Decision) -> None:
        """Let a `HostOptimizer` update all fp32 weights by clipped gradients without loss scale, if the step applies."""
        if not decision.applies:
            return
        optimizer, hyperparameters = self._host_optimizer, decision.hyperparameters
        assert optimizer is not None and hyperparameters is not None, "only a HostOptimizer has such a step"
        gradients: dict[str, Tensor] = {}
        for bundle in self._store.owned:
            gradient, factor = bundle.whole_gradient, self._factor(bundle, decision)
            self._board.observer.touched(reads=(), writes=[gradient, bundle.fp32_weight])
            if factor != 1.0:
                gradient.mul_(factor)
            gradients |= {parameter.name: parameter.view(gradient) for parameter in bundle.parameters}
        # PyTorch's optimizers compute in another way while a compiler is at work in the process.
        with LAYER_GATE.entered(self._board):
            self._begin_update(decision)
            self._store.step_host_optimizer(optimizer, hyperparameters, gradients)

    def _factor(self, bundle: Bundle, decision: Decision) -> float:
        """Return the factor that clips a bundle's gradient, by the whole norm or its own, and undoes the loss scale."""
        scale, norm, max_norm = decision.report.loss_scale, decision.norm_to_clip, self._max_norm
        if self._clips_by_layer and (size := self._sizes[bundle.index]):  # otherwise nothing of it is clipped
            norm = math.sqrt(self._squares[bundle.index]) / scale
            max_norm = layer_max_norm(max_norm, size, sum(self._sizes.values()))
        return clip_scale(norm, max_norm) / scale

    def update(self, decision: Decision, bundle: Bundle) -> None:
        """Update a bundle, or skip it: make version `step + 1` equal to version `step`. If an update fails, try once more."""
        # In `bounded` a gradient that is not finite is known only here.
        if not (decision.applies and math.isfinite(self._squares[bundle.index])):
            self._store.copy_version(bundle, decision.step)
            return
        step, start = decision.step, Mark()
        progress = [UpdateProgress() for _ in bundle.segments]

        def write(kernels: Mapping[KernelKind, UpdateKernel]) -> None:
            if self._host_optimizer is not None:  # which has updated the fp32 weights
                self._store.derive_device_weights(bundle, step + 1)
                return
            self._store.update(bundle, step, decision.lr, self._factor(bundle, decision), progress, kernels)

        try:
            write(self._kernels)
        except BaseException as error:  # noqa: BLE001  (reported once the update is whole again)
            self.overcome(error)
            write({})  # without compiled kernels, which may be what failed
        first = bundle.layers[0]
        decision.report.bundles += (Span(SpanKind.UPDATE, start, Mark(), layers=range(first, first + 1)),)

    def write_stale(self, bundle: Bundle, step: int) -> None:
        # From here on a checkpoint would lack the older device weights, or mix them with newer ones.
        self._mark()
        self._store.derive_device_weights(bundle, step)

    def finish(self, decision: Decision) -> None:
        """Declare the store whole after a step, and report."""
        store, step, report = self._store, decision.step, decision.report
        if store.mode.updates_by_layer:
            self._join_norms(decision)
            if decision.applies:
                squares = ((bundle.name, self._squares[bundle.index]) for bundle in reversed(store.trained))
                report.left_out = tuple(name for name, square in squares if not math.isfinite(square))
            report.fault = "the gradient is not finite" if report.left_out else report.fault
        if not report.skipped and not report.left_out:
            store.spikes.record(self._loss, report.grad_norm)
        overflows = not (store.mode.updates_by_layer or math.isfinite(report.grad_norm))
        store.loss_scaling.record(step, overflows)
        # Before the report is posted: a call that waits for it must see the fault, not end as if all went well.
        if self._overcome is not None:
            self._board.fail(self._overcome)
        # The step first: a thread that finds the store consistent after a stop saves it under this step.
        store.step = step + 1
        store.is_consistent = True
        self._begun = None
        report.not_finite = tuple(i for i, loss in enumerate(self._losses) if not math.isfinite(loss))
        report.loss = self._loss
        report.peers_wait_s, self._exchange.waited_s = self._exchange.waited_s, 0.0
        report.seconds = self.busy_s - report.peers_wait_s  # it was inside its tasks
        self.busy_s = 0.0
        self._squares, self._direction_squares, self._losses, self._loss = {}, {}, [], 0.0
        self._board.post(decision.updated, report)


def trained_weights(store: HostStore) -> list[tuple[str, Tensor]]:
    """List names and fp32 views of the trained weights, as a `HostOptimizer` is bound to them."""
    # In the order of the model's own parameters, by which PyTorch numbers them in a saved state.
    weights: dict[str, Tensor] = {}
    for location in itertools.chain.from_iterable(store.locations):
        bundle, parameter = store.bundles[location.bundle], location.parameter
        if bundle.trainable:
            weights.setdefault(parameter.name, parameter.view(bundle.fp32_weight))
    return list(weights.items())


def update_threads(num_devices: int) -> int:
    """Choose the number of threads for the optimizer's operations, at most PyTorch's (`engine.cpu_threads`).

    Leaves a core for each device's thread, but keeps at least half of the cores. Kernel launches that wait for a core cost a
    device far more than the update loses by one core, because memory bandwidth bounds the update.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))
