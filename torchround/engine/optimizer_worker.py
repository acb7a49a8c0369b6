"""One thread that turns gradients into weights: norm as gradients land, then the update, layer by layer.

The update runs in forward order, so the next step's forward starts on the layers that are done. It can be
finished but not undone: an update that failed in the middle is completed before the fault is reported, so the
host store holds a whole number of updates (DESIGN section 8).
"""

import ctypes
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from torchround.config import OptimizerTable
from torchround.engine.board import Board, Fact
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.ordering import Ordering
from torchround.engine.passes import read_loss
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.transfers import Boundary
from torchround.optim import UpdateProgress, adamw_update_, clip_scale, sum_of_squares
from torchround.optim.adamw import UpdateKernel
from torchround.optim.kernel import UpdateDtypes, get_kernels


@dataclass(frozen=True)
class CollectGradients:
    """Job: add up a step's gradient as its parts land, and its norm. `losses` are its micro-batches'."""

    step: int
    losses: tuple[Fact, ...]
    num_labels: int


@dataclass(frozen=True)
class UpdateWeights:
    """Job: apply a step's gradient, giving weight version `step + 1`."""

    step: int
    lr: float


@dataclass(frozen=True)
class BundleUpdate:
    """When one bundle was updated, by the host's clock (`time.perf_counter`). `layer` is its first user."""

    layer: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class UpdateReport:
    """What an update did. `seconds` is the time the optimizer was busy on this step.

    `grad_norm` is that of the unscaled gradient, before clipping; `loss_scale` what this step's loss was
    multiplied by (1 but in float16). `fault` says why the update was skipped; an overflow under a loss scale that
    can still fall is none. `not_finite` are the micro-batches whose loss is not. `waited_for_save_s`: how long bundles
    had to wait because a save beside training had not read them yet.
    """

    grad_norm: float
    skipped: bool
    seconds: float
    bundles: tuple[BundleUpdate, ...] = ()
    loss_scale: float = 1.0
    fault: str = ""
    not_finite: tuple[int, ...] = ()
    waited_for_save_s: float = 0.0


class OptimizerWorker:
    """Runs jobs `Fact("job", 0)`, `Fact("job", 1)`, ... in order; posts `Fact("updated", step)`.

    `moves` grows with each bundle that an update comes to. After a stop, a store that is consistent stays as it is.
    """

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        pool: HostPool,
        settings: OptimizerTable,
        max_norm: float,
        on_failure: Callable[[PipelineError], None],
        num_threads: int,
        compiles: bool,
    ) -> None:
        self._store = store
        self._board = board
        self._ordering = ordering
        self._pool = pool
        self._settings = settings
        self._max_norm = max_norm
        self._on_failure = on_failure
        self._num_threads = num_threads
        self.moves = 0
        self._compiles = compiles
        self._kernels: Mapping[UpdateDtypes, UpdateKernel] = {}
        self._squares: dict[int, float] = {}
        self._losses: list[float] = []
        self._num_labels = 0
        self._busy_s = 0.0
        self._waited_for_save_s = 0.0
        self._bundle_updates: list[BundleUpdate] = []
        self._place = FaultLocation("optimizer worker")
        self.thread = threading.Thread(target=self._main, name="torchround optimizer", daemon=True)

    def _main(self) -> None:
        job_index = 0
        try:
            use_threads_here(self._num_threads)
            if self._compiles:
                self._kernels = get_kernels(self._dtypes(), self._while_compiling)
            while True:
                job = self._board.wait(Fact("job", job_index))
                if isinstance(job, CollectGradients):
                    self._collect(job)
                else:
                    self._update(job)
                job_index += 1
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (any fault must reach the caller)
            self._on_failure(self._failure(error, self._store.is_consistent))

    def _dtypes(self) -> set[UpdateDtypes]:
        """What the bundles' gradients and masters are made of."""
        return {
            (bundle.gradient.dtype, bundle.masters[0].dtype)
            for bundle in self._store.trained
            if bundle.gradient is not None
        }

    def _while_compiling(self) -> None:
        self._board.raise_if_stopped()
        self._board.note_progress()

    def _collect(self, job: CollectGradients) -> None:
        """Round by round, and in each the deepest layers first: the order in which gradients land."""
        for bundle, parts in self._landing_order(job.step):
            self._board.raise_if_stopped()  # gradients that landed before a stop would else all be gone through
            self._place = self._place_of(bundle)
            landings = [self._ordering.before_gradient_read(bundle.index, job.step, part) for part in parts]
            start = time.perf_counter()
            if bundle.adds_up:
                self._add_up(bundle, job.step, parts, landings)
            if parts.stop == self._ordering.contributions(bundle.index, job.step):
                self._squares[bundle.index] = self._norm_squared(bundle)
            self._busy_s += time.perf_counter() - start
        # Last: devices that wait until a part of a gradient is consumed get no further with later losses.
        self._losses = [self._loss_sum(fact) for fact in job.losses]
        self._num_labels = job.num_labels

    def _loss_sum(self, fact: Fact) -> float:
        boundary = self._board.wait(fact)
        assert isinstance(boundary, Boundary), f"{fact} is {boundary!r}"
        return read_loss(boundary, self._pool)

    def _landing_order(self, step: int) -> Iterator[tuple[Bundle, range]]:
        """Bundles, and which parts of their gradient one round makes."""
        for round_index in itertools.count():
            for bundle in reversed(self._store.trained):
                uses = len(bundle.layers)
                parts = range(round_index * uses, (round_index + 1) * uses)
                if parts.stop > self._ordering.contributions(bundle.index, step):
                    return
                yield bundle, parts

    def _add_up(self, bundle: Bundle, step: int, parts: range, landings: list[HostBuffer]) -> None:
        """Add parts to the sum in their fixed order, in fp32, and give their buffers back."""
        assert bundle.gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        for part, buffer in zip(parts, landings, strict=True):
            landed = buffer.memory.view(self._store.gradient_dtype)
            self._board.observer.touched(reads=[buffer.memory], writes=[bundle.gradient])
            if part == 0:
                bundle.gradient.copy_(landed)
            else:
                bundle.gradient.add_(landed)
            self._pool.give(buffer, busy=[])
            self._ordering.part_consumed(bundle.index, step, part)

    def _norm_squared(self, bundle: Bundle) -> float:
        """Added parameter by parameter in a fixed order, so that it does not depend on the layout."""
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        self._board.observer.touched(reads=[gradient], writes=())
        return math.fsum(
            float(sum_of_squares(parameter.view(gradient).reshape(-1))) for parameter in bundle.parameters
        )

    def _update(self, job: UpdateWeights) -> None:
        start = time.perf_counter()
        loss_scale = self._store.loss_scaling.scale_of(job.step)
        norm = math.sqrt(math.fsum(self._squares.values())) / loss_scale
        loss = sum(self._losses) / max(self._num_labels, 1)
        fault, overflowed = self._fault(loss, norm, loss_scale), not math.isfinite(norm)
        skipped = overflowed or bool(fault)
        self._begin_update()
        if skipped:
            overcome = self._advance_version(job)
        else:
            overcome = self._apply(job, clip_scale(norm, self._max_norm) / loss_scale)
            self._store.spikes.record(loss, norm)
        self._store.loss_scaling.record(job.step, overflowed)
        if overcome is not None:
            self._on_failure(overcome)  # before a call could see the step, and end as if all were well
        self._store.step = job.step + 1
        self._store.is_consistent = True
        self._ordering.settled(job.step + 1, self._store.resume_state())
        seconds = self._busy_s + time.perf_counter() - start - self._waited_for_save_s
        not_finite = tuple(index for index, loss in enumerate(self._losses) if not math.isfinite(loss))
        report = UpdateReport(
            norm,
            skipped,
            seconds,
            tuple(self._bundle_updates),
            loss_scale,
            fault,
            not_finite,
            self._waited_for_save_s,
        )
        self._busy_s, self._waited_for_save_s, self._bundle_updates = 0.0, 0.0, []
        self._board.post(Fact("updated", job.step), report)
        self._board.raise_if_stopped()

    def _begin_update(self) -> None:
        """None begins after a stop. Marked before looking: whoever sees a whole store after a stop may read it."""
        self._store.is_consistent = False
        try:
            self._board.raise_if_stopped()
        except Stopped:
            self._store.is_consistent = True
            raise

    def _fault(self, loss: float, norm: float, loss_scale: float) -> str:
        """Why the update is skipped. Empty also where it overflowed under a loss scale that a lower one replaces."""
        if not math.isfinite(loss):
            return "the loss is not finite"
        if not math.isfinite(norm):
            return "" if self._store.loss_scaling.can_fall(loss_scale) else "the gradient is not finite"
        return str(self._store.spikes.spike(loss, norm) or "")

    def _apply(self, job: UpdateWeights, gradient_scale: float) -> PipelineError | None:
        """Update every bundle, in forward order. Returns the first fault that a second try overcame."""
        overcome: PipelineError | None = None
        self._store.applied_updates += 1
        for bundle in self._store.trained:
            self._place = self._place_of(bundle)
            self._before_update(bundle, job)
            fault = self._await_readers(bundle, job)
            overcome = overcome or fault
            progress = (UpdateProgress(), UpdateProgress())
            start_s = time.perf_counter()
            try:
                self._update_bundle(bundle, job, gradient_scale, progress, self._kernels)
            except BaseException as error:  # noqa: BLE001  (reported once the update is whole again)
                overcome = overcome or self._failure(error)
                self._update_bundle(bundle, job, gradient_scale, progress, {})
            self._bundle_updates.append(BundleUpdate(bundle.layers[0], start_s, time.perf_counter()))
            self._ordering.gradient_consumed(bundle.index, job.step)
            self._ordering.updated(bundle.index, job.step)
        return overcome

    def _update_bundle(
        self,
        bundle: Bundle,
        job: UpdateWeights,
        gradient_scale: float,
        progress: tuple[UpdateProgress, UpdateProgress],
        kernels: Mapping[UpdateDtypes, UpdateKernel],
    ) -> None:
        """AdamW on the parameters with weight decay, then on the others; `progress` lets a retry go on."""
        weight, first, second, gradient = bundle.weight, bundle.exp_avg, bundle.exp_avg_sq, bundle.gradient
        assert weight is not None and first is not None and second is not None and gradient is not None, (
            "a trained bundle lacks a buffer"
        )
        master = bundle.masters[(job.step + 1) % len(bundle.masters)]
        self._board.observer.touched(reads=[gradient], writes=[weight, first, second, master])
        segments = (slice(0, bundle.decayed), slice(bundle.decayed, bundle.numel))
        decays = (self._settings.weight_decay, 0.0)
        for segment, weight_decay, done in zip(segments, decays, progress, strict=True):
            adamw_update_(
                weight[segment],
                first[segment],
                second[segment],
                gradient[segment],
                master[segment],
                lr=job.lr,
                betas=self._settings.betas,
                eps=self._settings.eps,
                weight_decay=weight_decay,
                bias_correction_step=self._store.applied_updates,
                gradient_scale=gradient_scale,
                progress=done,
                kernel=kernels.get((gradient.dtype, master.dtype)),
            )

    def _advance_version(self, job: UpdateWeights) -> PipelineError | None:
        """A skipped update: version `step + 1` equals version `step`, and the gradient is of no more use.

        Returns the first fault that did not keep the new version from being complete.
        """
        for bundle in self._store.trained:
            self._ordering.gradient_consumed(bundle.index, job.step)
        overcome: PipelineError | None = None
        for bundle in self._store.trained:
            self._place = self._place_of(bundle)
            self._before_update(bundle, job)
            fault = self._await_readers(bundle, job)
            overcome = overcome or fault
            if len(bundle.masters) > 1:
                target, source = (bundle.masters[(job.step + back) % len(bundle.masters)] for back in (1, 0))
                self._board.observer.touched(reads=[source], writes=[target])
                target.copy_(source)
            self._ordering.updated(bundle.index, job.step)
        return overcome

    def _before_update(self, bundle: Bundle, job: UpdateWeights) -> None:
        self.moves += 1
        self._ordering.before_update(bundle.index, job.step)
        start_s = time.perf_counter()
        self._ordering.before_overwriting_saved(bundle.index, job.step)
        self._waited_for_save_s += time.perf_counter() - start_s

    def _await_readers(self, bundle: Bundle, job: UpdateWeights) -> PipelineError | None:
        """Until nobody reads the version to be overwritten. A device that failed reads no more: its fault."""
        try:
            self._ordering.before_master_write(bundle.index, job.step + 1)
        except Stopped:
            return None  # what the devices of an engine that has stopped still read is used by nobody
        except BaseException as error:  # noqa: BLE001  (reported once the update is whole)
            return self._failure(error)
        return None

    def _place_of(self, bundle: Bundle) -> FaultLocation:
        return FaultLocation(
            "optimizer worker", layers=tuple(self._store.layer_names[layer] for layer in bundle.layers)
        )

    def _failure(self, error: BaseException, leaves_whole: bool = True) -> PipelineError:
        problem = f"{type(error).__name__}: {error}"
        if not leaves_whole:
            problem += " (a second try failed too: the host store mixes two weight versions, do not save it)"
        failure = PipelineError(self._place, problem, leaves_whole)
        failure.__cause__ = error
        return failure


# How many cores the optimizer may use beside the threads that drive devices.


def update_threads(num_devices: int) -> int:
    """Threads for the optimizer's operations: a core is left for each device's thread, but half of them are kept.

    Never more than PyTorch's own number (`engine.cpu_threads`). Kernel launches that wait for a core cost a
    device far more than the update loses by one core, being bound by memory.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), max(available - num_devices, available // 2)))


def use_threads_here(count: int) -> None:
    """Run this thread's parallel operations, PyTorch's and compiled ones, with `count` threads.

    `torch.set_num_threads` would change it for threads yet to come as well, so OpenMP is asked directly, once
    PyTorch has set this thread up. Where that cannot be found, PyTorch's number stays.
    """
    torch.get_num_threads()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(torch._C.__file__).omp_set_num_threads(ctypes.c_int(count))
