"""Tokens per second and MFU, over the right interval and the right tokens.

The interval is the time from one report to the next, less what is spent in validation and checkpoints:
those come every so many steps and would make the rate of a step depend on whether it happens to be followed
by one. Waiting for data counts, because it slows training. Tokens are all
that are computed but padding, whether or not the loss counts them: in conversations it counts few.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

from torchround.config import TrainingTable
from torchround.engine.device import GIB, Device
from torchround.engine.results import DeviceTimes, StepResult
from torchround.layer import LayeredModel, LayerWork
from torchround.observe import EngineRecord, StepRecord, host_gib, host_peak_gib
from torchround.run.hardware import Hardware
from torchround.run.numbers import DTYPES


@dataclass(frozen=True)
class Interval:
    """Means over the steps of one interval: seconds per step, and those of them spent waiting for data."""

    num_steps: int
    tokens_per_s: float
    step_s: float
    data_s: float


class Throughput:
    """Counts steps and tokens. The interval starts when it is made, and anew at each `report`."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._restart()

    def count(self, tokens: int) -> None:
        """One more step is done, of `tokens` tokens without padding."""
        self._num_steps += 1
        self._tokens += tokens

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Around validation and checkpoints: the time does not count."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._excluded_s += self._clock() - start_s

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Around the loader: the time counts, and is reported as `data_s` too."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._data_s += self._clock() - start_s

    def report(self) -> Interval:
        """The interval since the last report. Raises `ValueError` if no step was counted in it."""
        if self._num_steps == 0:
            raise ValueError("no step was counted since the last report, so there is no rate")
        training_s = self._clock() - self._start_s - self._excluded_s
        interval = Interval(
            num_steps=self._num_steps,
            tokens_per_s=self._tokens / training_s if training_s > 0 else 0.0,
            step_s=training_s / self._num_steps,
            data_s=self._data_s / self._num_steps,
        )
        self._restart()
        return interval

    def _restart(self) -> None:
        self._start_s = self._clock()
        self._excluded_s = 0.0
        self._data_s = 0.0
        self._num_steps = 0
        self._tokens = 0


def train_flops_per_token(works: Iterable[LayerWork], num_tokens: int) -> float:
    """FLOPs of training per token, from the layers' work for `num_tokens`: forward and backward.

    Recompute is not among them: it is a price of the engine, not work of the model (PaLM, appendix B). Nor are gradients
    of frozen weights, which nobody computes: a LoRA run has 4 FLOPs per token and frozen weight, not 6.
    """
    return sum(work.forward_flops + work.backward_flops for work in works) / num_tokens


def mfu(
    tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float | None, num_devices: int
) -> float | None:
    """Model FLOPs utilisation as a fraction; `None` where the device's peak is not known."""
    if peak_flops_per_s is None:
        return None
    return tokens_per_s * flops_per_token / (peak_flops_per_s * num_devices)


# What the engine did over some steps, added up for a record: where device time went, bytes moved, memory taken.


class EngineTotals:
    """Steps are added in order; a record is of those since the last one, allocations since that was made."""

    def __init__(self, devices: Sequence[Device]) -> None:
        self._devices = devices
        self._device_allocations = self._host_allocations = 0
        self._last: StepResult | None = None
        self._times = [DeviceTimes()] * len(devices)
        self._optimizer_s = 0.0

    @property
    def busy_s(self) -> float:
        """Of all devices and steps since the last record."""
        return sum(times.busy_s for times in self._times)

    @property
    def optimizer_s(self) -> float:
        """Of all steps since the last record."""
        return self._optimizer_s

    def add(self, result: StepResult) -> None:
        """Count a step, once it and its update are done."""
        more = result.device_times(len(self._devices))
        self._times = [one + other for one, other in zip(self._times, more, strict=True)]
        self._optimizer_s += result.update().seconds
        if self._last is not None and self._last.pool is not result.pool:
            self._host_allocations = 0  # another engine with a pool of its own
        self._last = result

    def record(self, num_steps: int) -> EngineRecord:
        """Means over the `num_steps` steps that were added since the last one."""
        assert self._last is not None, "a record needs a step"

        def per_step(name: str, unit: float = 1.0) -> tuple[float, ...]:
            return tuple(getattr(times, name) / unit / num_steps for times in self._times)

        device_allocations = sum(device.num_allocations for device in self._devices)
        pool = self._last.pool
        host_allocations = pool.num_allocations
        record = EngineRecord(
            busy_s=per_step("busy_s"),
            input_wait_s=per_step("waiting_for_input_s"),
            weights_wait_s=per_step("waiting_for_weights_s"),
            optimizer_wait_s=per_step("waiting_for_optimizer_s"),
            optimizer_exposed_s=sum(per_step("waiting_for_optimizer_s")) / len(self._devices),
            uploaded_gib=per_step("uploaded_bytes", GIB),
            downloaded_gib=per_step("downloaded_bytes", GIB),
            device_peak_gib=tuple(device.peak_bytes() / GIB for device in self._devices),
            host_peak_gib=host_peak_gib(),
            host_pool_gib=pool.allocated_bytes / GIB,
            device_allocations=device_allocations - self._device_allocations,
            host_allocations=host_allocations - self._host_allocations,
        )
        self._device_allocations, self._host_allocations = device_allocations, host_allocations
        self._times, self._optimizer_s = [DeviceTimes()] * len(self._devices), 0.0
        return record


# From finished steps to the records of a run: what was learnt, how fast, and on which share of the devices.


class StepReports:
    """Adds steps up and makes a record of those since the last one. Steps are added in order.

    `skipped_steps` counts over the whole run. Time spent in `throughput.excluded()` is nobody's.
    """

    def __init__(
        self,
        model: LayeredModel,
        training: TrainingTable,
        choice: Hardware,
        devices: Sequence[Device],
        skipped_steps: int,
    ) -> None:
        self.throughput = Throughput()
        self._model = model
        self._training = training
        self._choice = choice
        self._devices = devices
        self._skipped_steps = skipped_steps
        self._engine = EngineTotals(devices)
        self._grad_norm = 0.0
        self._loss = 0.0

    def add(self, step: int, result: StepResult, num_tokens: int) -> None:
        """Wait for a step of `num_tokens` tokens without padding and its update, and count them."""
        update = result.update()
        self._loss, self._grad_norm = result.loss(), update.grad_norm
        self._engine.add(result)
        self._skipped_steps += update.skipped
        self.throughput.count(num_tokens)

    def record(self, step: int, tokens: int, lr: float, validation_loss: float | None) -> StepRecord:
        """Of the step added last, with means over the steps since the last record."""
        interval = self.throughput.report()
        devices_s = len(self._devices) * interval.step_s * interval.num_steps
        return StepRecord(
            step=step,
            loss=self._loss,
            grad_norm=self._grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_s=interval.tokens_per_s,
            mfu=self._mfu(interval.tokens_per_s),
            step_s=interval.step_s,
            data_s=interval.data_s,
            optimizer_s=self._engine.optimizer_s / interval.num_steps,
            bubble=1 - self._engine.busy_s / devices_s if devices_s > 0 else None,
            device_peak_gib=max(device.peak_bytes() for device in self._devices) / GIB,
            host_gib=host_gib(),
            skipped_steps=self._skipped_steps,
            validation_loss=validation_loss,
            engine=self._engine.record(interval.num_steps),
        )

    def _mfu(self, tokens_per_s: float) -> float | None:
        """None where the card's peak is not known: a guess would be a wrong figure."""
        if self._choice.spec is None:
            return None
        peak = self._choice.spec.peak_flops.get(self._training.dtype)
        return mfu(tokens_per_s, self._flops_per_token, peak, len(self._devices))

    @cached_property
    def _flops_per_token(self) -> float:
        seq_len, element_bytes = self._training.seq_len, DTYPES[self._training.dtype].itemsize
        works = [
            layer.work(1, seq_len, element_bytes)  # type: ignore[operator]
            for layer in self._model.layers
        ]
        return train_flops_per_token(works, seq_len)
