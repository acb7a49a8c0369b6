"""The optimizer's thread: what each of its tasks does to gradients and weights (`program.py` says when).

Gradients are added up and measured as they land. `decide` then knows whether the step applies, and each bundle is updated
in forward order, so that the next step's forward starts on the layers that are done. In `bounded` the losses alone decide,
and a bundle is updated as soon as its own gradient is whole.

An update can be finished but not undone. One that failed in the middle is therefore completed before the fault is
reported, so that the host store holds a whole number of updates. In `bounded` no layer waits for another, so a fault in
the middle of a step leaves a store whose layers are of two versions. The step of a `HostOptimizer` cannot be taken back
either, and a second try would apply a part of it twice.
"""

import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from torchround.config import OptimizerTable
from torchround.engine.board import LAYER_GATE, Board
from torchround.engine.device import use_threads_here
from torchround.engine.direction_jobs import LandedDirection, directed_bundles, directed_parameters
from torchround.engine.errors import MIXED, FaultLocation, PipelineError, Stopped
from torchround.engine.exchange.step_exchange import StepExchange
from torchround.engine.pass_data import read_losses
from torchround.engine.passes import Pass
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED, Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.prediction import Prediction
from torchround.engine.tasks import Buffer, Task, Worker
from torchround.engine.update_report import UPDATED, BundleUpdate, UpdateReport
from torchround.optim import HostOptimizer, UpdateProgress, clip_scale, layer_max_norm, sum_of_squares
from torchround.optim.host_optimizer import Hyperparameters
from torchround.optim.kernel import get_kernels
from torchround.optim.kernel_kind import KernelKind
from torchround.optim.range_threads import RangeThreads
from torchround.optim.update_pass import UpdateKernel, look_ahead_, update_

T = TypeVar("T")


@dataclass
class Decision:
    """A step's learning rate or hyperparameters, and once its figures are known, whether its update applies."""

    step: int
    lr: float
    hyperparameters: Hyperparameters | None = None
    fault: str = "not decided"
    applies: bool = False
    norm: float = math.nan
    clipped_norm: float = math.nan
    loss_scale: float = 1.0


class Updater:
    """What the optimizer's thread does. Each public method runs inside a task of its `worker`, if nothing else is said."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        pool: HostPool,
        optimizer: OptimizerTable | HostOptimizer,
        settings: EngineSettings,
        num_devices: int,
        exchange: StepExchange,
        on_failure: Callable[[PipelineError], None],
    ) -> None:
        self.worker: Worker
        self._store = store
        self._board = board
        self._pool = pool
        self._host_optimizer = optimizer if isinstance(optimizer, HostOptimizer) else None
        self.is_foreign = self._host_optimizer is not None
        self._exchange = exchange
        self._on_failure = on_failure
        self._clipping = Clipping(store, settings.max_norm, settings.clip)
        self._directed = directed_bundles(store)
        self._num_threads = update_threads(num_devices)
        self._threads = RangeThreads(self._num_threads)
        self._compiles = settings.compile_update and self._host_optimizer is None
        self._kernels: Mapping[KernelKind, UpdateKernel] = {}
        self._begun: int | None = None  # the step whose update is under way
        self._overcome: PipelineError | None = None
        self._waited_s = (0.0, 0.0)  # for saves and for other machines, up to the step before
        self._begin_step()

    def _begin_step(self) -> None:
        self._squares: dict[int, float] = {}
        self._losses: list[float] = []
        self._loss = 0.0
        self._busy_s = 0.0
        self._bundle_updates: list[BundleUpdate] = []
        self._landed: tuple[LandedDirection, ...] = ()

    # The thread.

    def enter(self) -> None:
        """Prepare the thread, before its first task."""
        use_threads_here(self._num_threads)
        if self._compiles:
            self._kernels = get_kernels(self._kinds(), self._while_compiling, self._threads)

    def leave(self) -> None:
        """End what the thread began."""
        self._threads.close()

    def is_begun(self, step: int) -> bool:
        """Tell whether the update of a step has begun, and so has to be completed."""
        return self._begun == step

    def fault(self, task: Task | None, error: BaseException) -> None:
        """Report an error that ends the thread."""
        failure = self._exchange.located(error)
        self._on_failure(failure or self._failure(task, error, self._store.is_consistent))

    def overcome(self, task: Task, error: BaseException) -> None:
        """Keep an error of which the update is independent, to report it once the store is whole."""
        self._overcome = self._overcome or self._failure(task, error)

    def _failure(self, task: Task | None, error: BaseException, leaves_whole: bool = True) -> PipelineError:
        problem = f"{type(error).__name__}: {error}"
        if not leaves_whole:
            why = "some layers are updated" if self._store.policy is BOUNDED else "a second try failed too"
            if self._host_optimizer is not None:
                why = "a part of the weights may be updated"
            problem += f" ({why}: {MIXED})"
        location = FaultLocation("optimizer worker") if task is None else task.location
        failure = PipelineError(location, problem, leaves_whole)
        failure.__cause__ = error
        return failure

    def _kinds(self) -> set[KernelKind]:
        """Return the kinds of updates that steps will make."""
        step = self._store.step
        kinds = (
            KernelKind.of(
                bundle.update_buffers(segment, self._written_weights(bundle, step), step),
                self._store.policy.predicts,
            )
            for bundle in self._store.owned
            for segment in bundle.segments
        )
        return {kind for kind in kinds if kind is not None}

    def _while_compiling(self) -> None:
        self._board.raise_if_stopped()
        self._board.note_progress()

    # Gradients.

    def collect(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
        """Add landed parts to the bundle's gradient, as `StepExchange.add`."""
        start_s, waited_s = time.perf_counter(), self._exchange.waited_s
        self._exchange.add(bundle, step, parts, sources)
        self._busy_s += time.perf_counter() - start_s - (self._exchange.waited_s - waited_s)

    def measure(self, bundle: Bundle, step: int) -> None:
        """Take the norm of a whole gradient, and write what devices make directions of."""
        start_s = time.perf_counter()
        self._measure(bundle, step)
        self._busy_s += time.perf_counter() - start_s

    def _measure(self, bundle: Bundle, step: int) -> None:
        self._squares |= self._squares_of(bundle)
        if bundle not in self._directed:
            return
        # The momentum stays as it is, so a skipped step changes nothing.
        for segment in bundle.segments:
            if segment.direction is not None:
                assert bundle.gradient is not None, f"bundle {bundle.index} has no gradient buffer"
                reads = [bundle.gradient, *segment.parts.values()]
                self._board.observer.touched(reads=reads, writes=[segment.direction])
                buffers = bundle.update_buffers(segment, bundle.version(step + 1), step)
                look_ahead_(buffers, self._direction_scale(step))

    def _squares_of(self, bundle: Bundle) -> dict[int, float]:
        """Return the squared norms of a whole gradient, as `StepExchange.all_squares` has them.

        They are added parameter by parameter, so that they do not depend on the layout.
        """
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        self._board.observer.touched(reads=[gradient], writes=())
        directed = {parameter.name for parameter in directed_parameters(bundle)}
        parts: dict[int, list[float]] = {bundle.index: []}
        for parameter in bundle.parameters:
            key = unclipped(bundle.index) if parameter.name in directed else bundle.index
            parts.setdefault(key, []).append(float(sum_of_squares(parameter.view(gradient).reshape(-1))))
        return {key: math.fsum(found) for key, found in parts.items()}

    def _direction_scale(self, step: int) -> float:
        """Return the factor on gradients of parameters with directions. It undoes the loss scale, and clips nothing."""
        return 1.0 / self._store.loss_scaling.scale_of(step)

    def end_pass(self, pass_: Pass) -> None:
        """Read a call's losses, and get those of other machines."""
        losses = self._exchange.all_losses(pass_, read_losses(pass_, self._board.wait, self._pool))
        # The gradient is that of the sum of all calls' losses.
        self._losses += losses
        self._loss += sum(losses) / max(pass_.num_labels, 1)

    # The decision, and updates.

    def decide(self, decision: Decision, directions: Sequence[Buffer]) -> None:
        """Decide whether a step applies.

        All its gradients are whole, and all its directions have landed. In `bounded` no gradient is whole yet: the losses
        alone decide.
        """
        store, step, is_bounded = self._store, decision.step, self._store.policy is BOUNDED
        self._landed = tuple(buffer.content for buffer in directions)
        scale = decision.loss_scale = store.loss_scaling.scale_of(step)
        norm = 0.0  # is no reason to skip
        if not is_bounded:
            norm = self._take_norm(decision) / scale
            decision.norm, decision.clipped_norm = norm, clipped_norm(self._squares) / scale
        decision.fault = self._fault(norm, scale)
        decision.applies = math.isfinite(norm) and not decision.fault
        if decision.applies and self._host_optimizer is not None:
            return  # its step begins the update
        if not is_bounded:
            self._begin_update(step)
        elif decision.applies and store.is_consistent:
            self._mark()
        if decision.applies:
            self._count_update(decision)

    def _take_norm(self, decision: Decision) -> float:
        """Get the norms of all machines, and return that of the whole gradient, with the loss scale."""
        self._squares = self._exchange.all_squares(decision.step, self._squares)
        return math.sqrt(math.fsum(self._squares.values()))

    def _fault(self, norm: float, loss_scale: float) -> str:
        """Return why the update is skipped, or "". An overflow that a lower loss scale can cure is no fault."""
        if not math.isfinite(self._loss):
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "" if self._store.loss_scaling.can_fall(loss_scale) else "the gradient is not finite"
        return str(self._store.spikes.spike(self._loss, norm) or "")

    def _mark(self) -> None:
        """Mark the store as inconsistent, unless the engine stopped: no update begins after a stop.

        Marks first and looks second: a thread that finds a consistent store after a stop may read it.
        """
        self._store.is_consistent = False
        try:
            self._board.raise_if_stopped()
        except Stopped:
            self._store.is_consistent = True
            raise

    def _begin_update(self, step: int) -> None:
        self._mark()
        self._begun = step

    def _count_update(self, decision: Decision) -> None:
        # Before the bundles: the bias correction of this update counts it, whatever layers `bounded` leaves out.
        self._store.applied_updates += 1
        if self._store.policy.predicts:
            self._store.prediction = Prediction.of(self._store.trained, float(decision.lr))

    def step_host_optimizer(self, decision: Decision, task: Task) -> None:
        """Let a `HostOptimizer` update all fp32 weights, if the step applies."""
        if not decision.applies:
            return
        assert self._host_optimizer is not None, "only a HostOptimizer has such a step"
        assert decision.hyperparameters is not None, "a step of a HostOptimizer lacks its hyperparameters"
        start_s = time.perf_counter()
        with ExitStack() as gate:
            gradients: dict[str, Tensor] = {}
            for bundle in self._store.owned:
                gradients |= self._clipped_gradients(bundle, decision)
            # PyTorch's optimizers compute in another way while a compiler is at work in the process.
            gate.enter_context(LAYER_GATE.entered(self._board))
            self._begin_update(decision.step)
            self._host_optimizer.step(decision.hyperparameters, gradients)
        self._count_update(decision)
        self._busy_s += time.perf_counter() - start_s

    def _clipped_gradients(self, bundle: Bundle, decision: Decision) -> dict[str, Tensor]:
        """Return a bundle's clipped gradients without loss scale, by name, for a step that may change its weights."""
        gradient, weight = bundle.gradient, bundle.fp32_weight
        assert gradient is not None, "a trained bundle lacks its gradient"
        self._board.observer.touched(reads=(), writes=[gradient, weight])
        factor = self._factor(bundle, decision)
        if factor != 1.0:
            gradient.mul_(factor)
        return {parameter.name: parameter.view(gradient) for parameter in bundle.parameters}

    def _factor(self, bundle: Bundle, decision: Decision) -> float:
        squares = self._squares[bundle.index]
        return self._clipping.factor(bundle, decision.clipped_norm, squares, decision.loss_scale)

    def update(self, decision: Decision, bundle: Bundle, task: Task) -> None:
        """Update a bundle, or skip it: make version `step + 1` equal to version `step`."""
        start_s = time.perf_counter()
        # In `bounded` a gradient that is not finite is known only here.
        if decision.applies and math.isfinite(self._squares[bundle.index]):
            self._update_surely(bundle, decision, task)
        else:
            self.copy_version(bundle, decision.step)
        self._busy_s += time.perf_counter() - start_s

    def write_lagging(self, bundle: Bundle) -> None:
        """Write device weights that lag, after the step's forward has uploaded the version before."""
        # From here on a checkpoint would lack the older device weights, or mix them with newer ones.
        if self._store.is_consistent:
            self._mark()
        start_s = time.perf_counter()
        self._board.observer.touched(reads=[bundle.fp32_weight], writes=[bundle.device_weights[0]])
        bundle.device_weights[0].copy_(bundle.fp32_weight)
        self._busy_s += time.perf_counter() - start_s

    def copy_version(self, bundle: Bundle, step: int) -> None:
        """Make version `step + 1` of a bundle's device weights equal to version `step`. Any thread may call this."""
        if len(bundle.device_weights) > 1:
            target, source = (bundle.version(step + back) for back in (1, 0))
            self._board.observer.touched(reads=[source], writes=[target])
            target.copy_(source)

    def _update_surely(self, bundle: Bundle, decision: Decision, task: Task) -> None:
        """Update a bundle; if that fails, once more."""
        progress = [UpdateProgress() for _ in bundle.segments]
        start_s = time.perf_counter()
        update = partial(self._update_bundle, bundle, decision, progress)
        try:
            update(self._kernels)
        except BaseException as error:  # noqa: BLE001  (reported once the update is whole again)
            self.overcome(task, error)
            # Without compiled kernels, which may be what failed.
            update({})
        self._bundle_updates.append(BundleUpdate(bundle.layers[0], start_s, time.perf_counter()))

    def _written_weights(self, bundle: Bundle, step: int) -> Tensor:
        """Return the device weights that step `step`'s update writes."""
        # The fp32 weights in place of device weights that lag: the next step's forward has to read those first.
        return bundle.fp32_weight if self._store.lags(bundle) else bundle.version(step + 1)

    def _update_bundle(
        self,
        bundle: Bundle,
        decision: Decision,
        progress: Sequence[UpdateProgress],
        kernels: Mapping[KernelKind, UpdateKernel],
    ) -> None:
        """Update the segments of a bundle, one after the other. A retry continues from `progress`, one for each."""
        step = decision.step
        written = self._written_weights(bundle, step)
        if self._host_optimizer is not None:
            self._board.observer.touched(reads=[bundle.fp32_weight], writes=[written])
            written.copy_(bundle.fp32_weight)
            return
        assert bundle.gradient is not None, "a trained bundle lacks its gradient"
        self._board.observer.touched(reads=bundle.inputs(step), writes=[*bundle.state(), written])
        scale, predicts = self._factor(bundle, decision), self._store.policy.predicts
        for segment, done in zip(bundle.segments, progress, strict=True):
            buffers = bundle.update_buffers(segment, written, step)
            kind = KernelKind.of(buffers, predicts) if kernels else None
            update_(
                buffers,
                lr=decision.lr,
                update=self._store.applied_updates,
                gradient_scale=self._direction_scale(step) if segment.rule.uses_direction else scale,
                progress=done,
                kernel=kernels.get(kind) if kind is not None else None,
                predicts=predicts,
            )

    def finish(self, decision: Decision) -> None:
        """Declare the store whole after a step, and report."""
        store, step, skipped = self._store, decision.step, not decision.applies
        if store.policy is BOUNDED:
            decision.norm = self._take_norm(decision)
        left_out = tuple(
            ", ".join(store.layer_names[layer] for layer in bundle.layers)
            for bundle in reversed(store.trained)
            if not (skipped or math.isfinite(self._squares[bundle.index]))
        )
        if left_out:
            decision.fault = "the gradient is not finite"
        if not skipped and not left_out:
            store.spikes.record(self._loss, decision.norm)
        store.loss_scaling.record(step, not math.isfinite(decision.norm) and store.policy is not BOUNDED)
        # Before `UPDATED` is posted: a call that waits for it must see the fault, not end as if all went well.
        if self._overcome is not None:
            self._on_failure(self._overcome)
        # The step first: a thread that finds the store consistent after a stop saves it under this step.
        store.step = step + 1
        store.is_consistent = True
        self._begun = None
        waited_s = (self.worker.waited_for_saves_s, self._exchange.waited_s)
        report = UpdateReport(
            decision.norm,
            skipped,
            self._busy_s,
            tuple(self._bundle_updates),
            decision.loss_scale,
            decision.fault,
            tuple(index for index, loss in enumerate(self._losses) if not math.isfinite(loss)),
            waited_s[0] - self._waited_s[0],
            left_out,
            self._loss,
            waited_s[1] - self._waited_s[1],
            self._exchange.take_bytes(),
            self._landed,
        )
        self._waited_s = waited_s
        self._begin_step()
        self._board.post(UPDATED(step), report)


def clipped_norm(squares: Mapping[int, float]) -> float:
    """Return the norm of all clipped parameters."""
    return math.sqrt(math.fsum(square for key, square in squares.items() if key >= 0))


def unclipped(index: int) -> int:
    """Return the key, among squared norms by bundle, of the bundle's parameters that are not clipped."""
    return -1 - index


class Clipping:
    """The factor on each bundle's gradient: by the norm of the whole gradient, or, with "layer", by the bundle's own."""

    def __init__(self, store: HostStore, max_norm: float, clip: str) -> None:
        sizes = {bundle.index: _clipped_numel(bundle) for bundle in store.trained}
        self._by_layer = clip == "layer"
        self._max_norms = {
            index: layer_max_norm(max_norm, size, sum(sizes.values())) if self._by_layer else max_norm
            for index, size in sizes.items()
            if size
        }

    def factor(self, bundle: Bundle, norm: float, squares: float, loss_scale: float = 1.0) -> float:
        """Return the factor that clips the bundle's gradient and undoes the loss scale.

        `norm` is that of all clipped parameters, without the loss scale, `squares` the bundle's own part of its square
        with it.
        """
        clipped = math.sqrt(squares) / loss_scale if self._by_layer else norm
        max_norm = self._max_norms.get(bundle.index, 0.0)  # none if no parameter of the bundle is clipped
        return clip_scale(clipped, max_norm) / loss_scale


def _clipped_numel(bundle: Bundle) -> int:
    """Count the elements that are clipped. Orthogonalisation takes a matrix of any scale, so those are not."""
    directed = sum(parameter.shape.numel() for parameter in directed_parameters(bundle))
    return sum(parameter.shape.numel() for parameter in bundle.parameters) - directed


def trained_weights(store: HostStore) -> list[tuple[str, Tensor]]:
    """Return names and fp32 views of the trained weights, as a `HostOptimizer` is bound to them."""
    # In the order of the model's own parameters, by which PyTorch numbers them in a saved state.
    weights: dict[str, Tensor] = {}
    for location in itertools.chain.from_iterable(store.locations):
        bundle, parameter = store.bundles[location.bundle], location.parameter
        if bundle.trainable:
            weights.setdefault(parameter.name, parameter.view(bundle.fp32_weight))
    return list(weights.items())


def update_threads(num_devices: int) -> int:
    """Return the number of threads for the optimizer's operations.

    Leaves a core for each device's thread, but keeps at least half of the cores, and never takes more threads
    than PyTorch has (`engine.cpu_threads`). Kernel launches that wait for a core cost a device far more than
    the update loses by one core, because memory bandwidth bounds the update.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))
