"""One thread that turns gradients into weights: norm as gradients land, then the update, layer by layer.

The update runs in forward order, so the next step's forward starts on the layers that are done. It can be
finished but not undone. An update that failed in the middle is therefore completed before the fault is
reported, so that the host store holds a whole number of updates.
"""

import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from torchround.engine.board import Board
from torchround.engine.device import use_threads_here
from torchround.engine.directions import Directions
from torchround.engine.errors import MIXED, FaultLocation, PipelineError, Stopped
from torchround.engine.exchange.step_exchange import StepExchange, StepSums
from torchround.engine.landed_gradients import Clipping, clipped_norm
from torchround.engine.ordering import Ordering
from torchround.engine.pass_data import read_losses
from torchround.engine.passes import TRAINING_PASS, Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.store.prediction import Prediction
from torchround.engine.update_report import (
    LEARNING_RATE,
    UPDATED,
    BundleUpdate,
    UpdateReport,
    further_calls,
)
from torchround.optim import UpdateProgress
from torchround.optim.kernel import get_kernels
from torchround.optim.kernel_kind import KernelKind
from torchround.optim.range_threads import RangeThreads
from torchround.optim.update_pass import UpdateKernel, update_


class OptimizerWorker:
    """The thread that updates the host store, step by step: gradients of `TRAINING_PASS`, then `LEARNING_RATE`.

    If it `accumulates`, the passes of `NEXT_CALL` belong to the step too. `moves` grows with each bundle that an update
    comes to. A stop leaves a consistent store as it is.
    """

    _why_mixed = "a second try failed too"

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        pool: HostPool,
        max_norm: float,
        clip: str,
        on_failure: Callable[[PipelineError], None],
        num_threads: int,
        compiles: bool,
        accumulates: bool,
        exchange: StepExchange,
    ) -> None:
        self._store = store
        self._board = board
        self._ordering = ordering
        self._pool = pool
        self._exchange = exchange
        self._landed = exchange.landed
        self._clipping = Clipping(store, max_norm, clip)
        self._directions = Directions(store, ordering, board.observer)
        self._on_failure = on_failure
        self._num_threads = num_threads
        self._threads = RangeThreads(num_threads)
        self.moves = 0
        self._compiles = compiles
        self._accumulates = accumulates
        self._first_step = store.step
        self._kernels: Mapping[KernelKind, UpdateKernel] = {}
        self._squares: dict[int, float] = {}
        self._losses: list[float] = []
        self._loss = 0.0
        self._busy_s = 0.0
        self._waited_for_save_s = 0.0
        self._bundle_updates: list[BundleUpdate] = []
        self._location = FaultLocation("optimizer worker")
        self.thread = threading.Thread(target=self._main, name="torchround optimizer", daemon=True)

    @property
    def left_whole(self) -> bool:
        """Whether the store holds a whole number of updates."""
        return self._store.is_consistent

    def _main(self) -> None:
        try:
            use_threads_here(self._num_threads)
            if self._compiles:
                self._kernels = get_kernels(self._kinds(), self._while_compiling, self._threads)
            for step in itertools.count(self._first_step):
                self._run_step(step)
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            failure = self._exchange.located(error)
            self._on_failure(failure or self._failure(error, self._store.is_consistent))
        finally:
            self._threads.close()

    def _run_step(self, step: int) -> None:
        """Take a step's gradient as it lands, and apply it once it is whole."""
        pass_ = self._board.wait(TRAINING_PASS(step))
        self._begin_sums()
        self._collect(pass_)
        if self._accumulates:
            for further in further_calls(self._board, pass_):
                self._collect(further)
            self._measure(step)
        lr = self._board.wait(LEARNING_RATE(step))
        self._directions.wait(step)
        self._update(step, lr)

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

    def _begin_sums(self) -> None:
        self._squares = {}  # other machines' figures of the step before are among them
        self._losses, self._loss = [], 0.0

    def _collect(self, pass_: Pass) -> None:
        """Add up a call's gradient as parts land, and the norm unless more calls may follow, then read the losses."""
        step, share = pass_.step, pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        for bundle, parts in self._landed.landing_order(share):
            # Otherwise a stop would be noticed only after all gradients that had landed before it.
            self._board.raise_if_stopped()
            self._location = self._location_of(bundle)
            landings = self._landed.wait(bundle, step, parts)
            start, waited_s = time.perf_counter(), self._landed.waited_s
            self._landed.add(bundle, step, parts, landings)
            # The norm needs the whole sum, so it comes with the last round.
            if not self._accumulates and self._landed.are_last(bundle, share, parts):
                self._take_whole(bundle, step)
            self._busy_s += time.perf_counter() - start - (self._landed.waited_s - waited_s)
        # Losses last: devices that wait until a part of a gradient is consumed cannot send the later ones.
        losses = self._read_losses(pass_)
        sums = self._exchange.agree(pass_, StepSums(losses, self._squares))
        self._squares = dict(sums.squares)
        self._add_losses(sums.losses, pass_)

    def _measure(self, step: int) -> None:
        """Compute the norm of the sum of several calls."""
        start_s = time.perf_counter()
        for bundle in reversed(self._store.owned):
            self._board.raise_if_stopped()
            self._location = self._location_of(bundle)
            self._take_whole(bundle, step)
        self._busy_s += time.perf_counter() - start_s

    def _take_whole(self, bundle: Bundle, step: int) -> None:
        """Take the norm of a gradient that is whole, and hand its look-aheads to a device."""
        self._squares |= self._landed.squares(bundle)
        self._directions.look_ahead(bundle, step)

    def _read_losses(self, pass_: Pass) -> list[float]:
        return read_losses(pass_, self._board.wait, self._pool)

    def _add_losses(self, losses: Sequence[float], pass_: Pass) -> None:
        """Add a call's loss to the step's: the gradient is that of the sum of all calls' losses."""
        self._losses += losses
        self._loss += sum(losses) / max(pass_.num_labels, 1)

    # Updates.

    def _update(self, step: int, lr: float) -> None:
        """Apply a step's gradient, giving weight version `step + 1`, and report."""
        start = time.perf_counter()
        loss_scale = self._store.loss_scaling.scale_of(step)
        norm = math.sqrt(math.fsum(self._squares.values())) / loss_scale
        loss = self._loss
        fault, overflowed = self._fault(loss, norm, loss_scale), not math.isfinite(norm)
        skipped = overflowed or bool(fault)
        self._begin_update()
        self._exchange.decided(step, applies=not skipped)
        if skipped:
            overcome = self._advance_version(step)
        else:
            overcome = self._apply(step, lr, clipped_norm(self._squares) / loss_scale, loss_scale)
            self._store.spikes.record(loss, norm)
        self._store.loss_scaling.record(step, overflowed)
        self._busy_s += time.perf_counter() - start - self._waited_for_save_s
        self._finish_step(step, overcome, norm, skipped, fault, loss_scale)

    def _finish_step(
        self,
        step: int,
        overcome: PipelineError | None,
        norm: float,
        skipped: bool,
        fault: str,
        loss_scale: float = 1.0,
        left_out: tuple[str, ...] = (),
    ) -> None:
        """Declare the store whole after a step, and report. `overcome` is a fault that a second try overcame."""
        # Before `UPDATED` is posted: a call that waits for it must see the fault, not end as if all went well.
        if overcome is not None:
            self._on_failure(overcome)
        # The step first: a thread that finds the store consistent after a stop saves it under this step.
        self._store.step = step + 1
        self._store.is_consistent = True
        self._ordering.settled(step + 1, self._store.resume_state())
        not_finite = tuple(index for index, loss in enumerate(self._losses) if not math.isfinite(loss))
        report = UpdateReport(
            norm,
            skipped,
            self._busy_s,
            tuple(self._bundle_updates),
            loss_scale,
            fault,
            not_finite,
            self._waited_for_save_s,
            left_out,
            self._loss,
            self._landed.waited_s,
            self._exchange.take_bytes(),
            self._directions.landed,
        )
        self._landed.waited_s = 0.0
        self._busy_s, self._waited_for_save_s, self._bundle_updates = 0.0, 0.0, []
        self._board.post(UPDATED(step), report)
        # After `UPDATED`: a stop must not take the report of an update that is complete. The next job may be
        # posted already, and waiting for it would not notice the stop.
        self._board.raise_if_stopped()

    def _begin_update(self) -> None:
        """Mark the store as inconsistent, unless the engine stopped: no update begins after a stop.

        Marks first and looks second: a thread that finds a consistent store after a stop may read it.
        """
        self._store.is_consistent = False
        try:
            self._board.raise_if_stopped()
        except Stopped:
            self._store.is_consistent = True
            raise

    def _fault(self, loss: float, norm: float, loss_scale: float) -> str:
        """Return why the update is skipped, or "". An overflow that a lower loss scale can cure is no fault."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "" if self._store.loss_scaling.can_fall(loss_scale) else "the gradient is not finite"
        return str(self._store.spikes.spike(loss, norm) or "")

    def _apply(self, step: int, lr: float, norm: float, loss_scale: float) -> PipelineError | None:
        """Update every bundle, in forward order. Returns the first fault that a second try overcame."""
        overcome: PipelineError | None = None
        # Before the bundles: the bias correction of this update counts it.
        self._store.applied_updates += 1
        if self._store.policy.predicts:
            self._store.prediction = Prediction.of(self._store.trained, float(lr))
        for bundle in self._store.owned:
            self._location = self._location_of(bundle)
            self._before_update(bundle, step)
            fault = self._await_readers(bundle, step)
            overcome = overcome or fault
            gradient_scale = self._clipping.factor(bundle, norm, self._squares[bundle.index], loss_scale)
            fault = self._update_surely(bundle, step, lr, gradient_scale)
            overcome = overcome or fault
            # Posted per bundle: the next step's forward uploads the first layers
            # while later ones are updated.
            self._ordering.gradient_consumed(bundle.index, step)
            self._exchange.updated(bundle, step)
        return overcome

    def _update_surely(
        self, bundle: Bundle, step: int, lr: float, gradient_scale: float
    ) -> PipelineError | None:
        """Update a bundle; if that fails, once more. Returns the fault that the second try overcame."""
        overcome: PipelineError | None = None
        progress = [UpdateProgress() for _ in bundle.segments]
        start_s = time.perf_counter()
        try:
            self._update_bundle(bundle, step, lr, gradient_scale, progress, self._kernels)
        except BaseException as error:  # noqa: BLE001  (reported once the update is whole again)
            overcome = self._failure(error)
            # Without compiled kernels, which may be what failed.
            self._update_bundle(bundle, step, lr, gradient_scale, progress, {})
        self._bundle_updates.append(BundleUpdate(bundle.layers[0], start_s, time.perf_counter()))
        return overcome

    def _written_weights(self, bundle: Bundle, step: int) -> Tensor:
        """Return the device weights that step `step`'s update writes."""
        return bundle.version(step + 1)

    def _update_bundle(
        self,
        bundle: Bundle,
        step: int,
        lr: float,
        gradient_scale: float,
        progress: Sequence[UpdateProgress],
        kernels: Mapping[KernelKind, UpdateKernel],
    ) -> None:
        """Update the segments of a bundle, one after the other. A retry continues from `progress`, one for each."""
        written = self._written_weights(bundle, step)
        assert bundle.gradient is not None, "a trained bundle lacks its gradient"
        self._board.observer.touched(reads=bundle.inputs(step), writes=[*bundle.state(), written])
        for segment, done in zip(bundle.segments, progress, strict=True):
            buffers = bundle.update_buffers(segment, written, step)
            own_scale = self._directions.scale(step) if segment.rule.uses_direction else gradient_scale
            kind = KernelKind.of(buffers, self._store.policy.predicts) if kernels else None
            update_(
                buffers,
                lr=lr,
                update=self._store.applied_updates,
                gradient_scale=own_scale,
                progress=done,
                kernel=kernels.get(kind) if kind is not None else None,
                predicts=self._store.policy.predicts,
            )

    def _advance_version(self, step: int) -> PipelineError | None:
        """Skip an update: make version `step + 1` equal to version `step` and drop the gradient.

        Returns the first fault, if any. The new version is complete all the same.
        """
        # All gradients first: devices need not wait for the copies below.
        for bundle in self._store.owned:
            self._ordering.gradient_consumed(bundle.index, step)
        overcome: PipelineError | None = None
        for bundle in self._store.trained:
            self._location = self._location_of(bundle)
            self._before_update(bundle, step)
            fault = self._await_readers(bundle, step)
            overcome = overcome or fault
            if len(bundle.device_weights) > 1:
                target, source = (bundle.version(step + back) for back in (1, 0))
                self._board.observer.touched(reads=[source], writes=[target])
                target.copy_(source)
            self._ordering.updated(bundle.index, step)
        return overcome

    def _before_update(self, bundle: Bundle, step: int) -> None:
        self.moves += 1
        self._ordering.before_update(bundle.index, step)
        self._ordering.before_overwriting_sent(bundle.index, step + 1)
        self._wait_for_saves(bundle, step)

    def _wait_for_saves(self, bundle: Bundle, step: int) -> None:
        start_s = time.perf_counter()
        self._ordering.before_overwriting_saved(bundle.index, step)
        self._waited_for_save_s += time.perf_counter() - start_s

    def _await_readers(self, bundle: Bundle, step: int) -> PipelineError | None:
        """Wait until no device reads the version to be overwritten. Returns the fault of a device that failed.

        A failed device reads no more, so the update may continue.
        """
        try:
            self._ordering.before_device_weight_write(bundle.index, step + 1)
        except Stopped:
            return None  # results of what devices still read are dropped: the engine has stopped
        except BaseException as error:  # noqa: BLE001  (reported once the update is whole)
            return self._failure(error)
        return None

    def _location_of(self, bundle: Bundle) -> FaultLocation:
        return FaultLocation(
            "optimizer worker", layers=tuple(self._store.layer_names[layer] for layer in bundle.layers)
        )

    def _failure(self, error: BaseException, leaves_whole: bool = True) -> PipelineError:
        problem = f"{type(error).__name__}: {error}"
        if not leaves_whole:
            problem += f" ({self._why_mixed}: {MIXED})"
        failure = PipelineError(self._location, problem, leaves_whole)
        failure.__cause__ = error
        return failure
