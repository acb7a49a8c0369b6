"""Bounded updates (PACI): each layer is updated as soon as its own gradient is complete, the deepest layer first.

A step's forward reads the previous version in the first `HostStore.stale_layers` layers. There is one buffer of
device weights, so an update of these layers writes fp32 weights alone. Their device weights follow once the next
step's forward has uploaded the old ones, and before its backward uploads the new ones. Nothing waits for the norm of
the whole gradient: a layer is clipped by its own, and all losses are known before the first gradient is complete.

An update cannot be taken back, and no layer waits for another. So a fault in the middle of a step leaves a store
whose layers are of two versions.
"""

import math
import time

from torch import Tensor

from torchround.engine.errors import PipelineError
from torchround.engine.optimizer_worker import OptimizerWorker
from torchround.engine.passes import TRAINING_PASS, Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.update_report import LEARNING_RATE


class BoundedOptimizerWorker(OptimizerWorker):
    """The optimizer worker of the `bounded` policy. A stop in the middle of a step leaves an inconsistent store."""

    _why_mixed = "some layers are updated"

    def _run_step(self, step: int) -> None:
        """Take and apply a step's gradient, bundle by bundle as it lands."""
        pass_ = self._board.wait(TRAINING_PASS(step))
        share = pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        self._write_lagging(step)
        self._begin_sums()
        overcome: PipelineError | None = None
        lr, fault = 0.0, "not decided"
        left_out: list[Bundle] = []
        for bundle, parts in self._landed.landing_order(share):
            is_whole = self._landed.are_last(bundle, share, parts)
            if is_whole and not self._squares:
                lr, fault = self._decide(pass_)
            self._add_landed(bundle, step, parts, is_whole)
            if not is_whole:
                continue
            if fault or not math.isfinite(self._squares[bundle.index]):
                left_out.append(bundle)
                self._leave_out(bundle, step)
            else:
                failure = self._apply_to(bundle, step, lr)
                overcome = overcome or failure
        norm, skipped = math.sqrt(math.fsum(self._squares.values())), bool(fault)
        if not skipped and not left_out:
            self._store.spikes.record(self._loss, norm)
        self._store.loss_scaling.record(step, overflowed=False)  # which does not scale, but counts the steps
        names = () if skipped else tuple(", ".join(self._location_of(bundle).layers) for bundle in left_out)
        if names:
            fault = "the gradient is not finite"
        self._finish_step(step, overcome, norm, skipped, fault, left_out=names)

    def _write_lagging(self, step: int) -> None:
        """Write version `step` of device weights that lag, after the step's forward has uploaded the version before."""
        for bundle in self._store.trained:
            if not self._store.lags(bundle):
                continue
            self._location = self._location_of(bundle)
            self.moves += 1
            self._wait_for_saves(bundle, step)
            self._ordering.before_device_weight_write(bundle.index, step)
            # From here on a checkpoint would lack the older device weights, or mix them with newer ones.
            if self._store.is_consistent:
                self._begin_update()
            start_s = time.perf_counter()
            device_weights = bundle.device_weights[0]
            self._board.observer.touched(reads=[bundle.fp32_weight], writes=[device_weights])
            device_weights.copy_(bundle.fp32_weight)
            self._busy_s += time.perf_counter() - start_s
            self._ordering.updated(bundle.index, step - 1)

    def _decide(self, pass_: Pass) -> tuple[float, str]:
        """Return the step's learning rate, and why the step is skipped as a whole, or ""."""
        # Every loss is sent before the last round's first gradient is complete.
        self._add_losses(self._read_losses(pass_), pass_)
        loss, lr = self._loss, self._board.wait(LEARNING_RATE(pass_.step))
        # The gradient's norm is not known yet: only the loss can be a spike.
        spike = self._store.spikes.spike(loss, -math.inf)
        fault = str(spike or "") if math.isfinite(loss) else "the loss is not finite"
        if not fault:
            if self._store.is_consistent:
                self._begin_update()
            # The bias correction of this step's updates counts this step, whatever layers are left out.
            self._store.applied_updates += 1
        return lr, fault

    def _add_landed(self, bundle: Bundle, step: int, parts: range, is_whole: bool) -> None:
        """Wait for parts of a gradient, add them up, and compute the squared norm of the whole."""
        self._location = self._location_of(bundle)
        landings = self._landed.wait(bundle, step, parts)
        start_s = time.perf_counter()
        self._landed.add(bundle, step, parts, landings)
        if is_whole:
            self._squares |= self._landed.squares(bundle)
        self._busy_s += time.perf_counter() - start_s

    def _apply_to(self, bundle: Bundle, step: int, lr: float) -> PipelineError | None:
        """Update one bundle. Returns the fault that a second try overcame."""
        lags, overcome = self._store.lags(bundle), None
        self._before_update(bundle, step)
        if not lags:
            overcome = self._await_readers(bundle, step)
        start_s = time.perf_counter()
        # Its own norm clips it: there is no global one yet.
        scale = self._clipping.factor(bundle, math.nan, self._squares[bundle.index])
        failure = self._update_surely(bundle, step, lr, scale)
        self._busy_s += time.perf_counter() - start_s
        self._end_bundle(bundle, step)
        return overcome or failure

    def _written_weights(self, bundle: Bundle, step: int) -> Tensor:
        # The fp32 weights in place of device weights that lag: the next step's forward has to read those first.
        return bundle.fp32_weight if self._store.lags(bundle) else super()._written_weights(bundle, step)

    def _leave_out(self, bundle: Bundle, step: int) -> None:
        """Make version `step + 1` of a bundle equal to version `step`."""
        self._before_update(bundle, step)
        if not self._store.lags(bundle):
            # Nothing is overwritten. But rule 1 would remember the uploads of this version.
            self._await_readers(bundle, step)
        self._end_bundle(bundle, step)

    def _end_bundle(self, bundle: Bundle, step: int) -> None:
        self._ordering.gradient_consumed(bundle.index, step)
        if not self._store.lags(bundle):
            self._ordering.updated(bundle.index, step)
