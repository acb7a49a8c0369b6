"""From finished steps to the records of a run: what was learnt, how fast, and what the devices did meanwhile.

Rates are over the steps since the last record, and over at least `STEPS_PER_DEVICE` steps for each device: steps overlap,
so several may end at the same moment, and the time between two ends is no step's time. The time of validations and
blocking saves is left out, because the rate of a step must not depend on whether one of them follows it. The wait for
data counts, because it slows training. Tokens are all that are computed except padding, whether the loss counts them or not.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torchround.engine.device import Device
from torchround.engine.passes import StepResult
from torchround.engine.reports import StageReport
from torchround.layer import LayeredModel
from torchround.observe.record import StepRecord, host_gib, host_peak_gib
from torchround.planning.memory import GIB

# With one stage per step each device may have a step under way, and all may end together: two such rounds give a rate.
STEPS_PER_DEVICE = 2

# The figures of a stage slot that a record gives for each device.
_FIGURES: dict[str, Callable[[StageReport], float]] = {
    "busy_s": lambda slot: slot.busy_s,
    "input_wait_s": lambda slot: slot.idle_s.input,
    "weights_wait_s": lambda slot: slot.idle_s.weights,
    "optimizer_wait_s": lambda slot: slot.idle_s.optimizer,
    "uploaded_gib": lambda slot: slot.uploaded_bytes / GIB,
    "downloaded_gib": lambda slot: slot.downloaded_bytes / GIB,
}


class StepMeter:
    """Adds up finished steps, in order, and makes a record of those since the last one.

    `flops_per_token` is `flops_per_token()` of the model; `all_flops_per_s` is the peak of all devices of the run, also on
    other machines, None if it is not known.
    `skipped_steps` counts over the whole run. The clock runs from `start` on.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        flops_per_token: float,
        all_flops_per_s: float | None,
        skipped_steps: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._devices = devices
        self._flops_per_token = flops_per_token
        self._all_flops_per_s = all_flops_per_s
        self._skipped_steps = skipped_steps
        self._clock = clock
        # Devices and pools count allocations from their beginning; these are the counts at the last record.
        self._device_allocations = self._host_allocations = 0
        self._last: StepResult | None = None
        self._loss = self._grad_norm = 0.0
        # Sums over all steps by name, those of devices by name and device; the newest sums before each step of the window.
        self._sums: Counter[Any] = Counter()
        self._window: deque[Counter[Any]] = deque(maxlen=STEPS_PER_DEVICE * len(devices))
        self._at_record: Counter[Any] = Counter()
        # Loss and number of labels of each step with a finite loss.
        self._averaged: list[tuple[float, int]] = []
        # Seconds since the newest step: those of validations and blocking saves, and those of waits for data.
        self._spent_s = {"excluded": 0.0, "data": 0.0}
        self.start()

    def start(self) -> None:
        """Start the first interval. Called once, before the first batch."""
        self._start_s = self._last_s = self._clock()

    @contextmanager
    def timed(self, what: Literal["excluded", "data"]) -> Iterator[None]:
        """Leave the time of the block out (validations, checkpoints, a new engine), or count it as a wait for data too."""
        start_s = self._clock()
        try:
            yield
        finally:
            self._spent_s[what] += self._clock() - start_s

    def add(self, result: StepResult, num_tokens: int) -> None:
        """Wait for a step of `num_tokens` tokens without padding and for its update, and count them."""
        update = result.update()
        self._loss, self._grad_norm = result.loss(), update.grad_norm
        if math.isfinite(self._loss):
            self._averaged.append((self._loss, result.num_labels))
        self._skipped_steps += update.skipped
        self._window.append(self._sums.copy())
        now_s = self._clock()
        more = {
            "steps": 1,
            "tokens": num_tokens,
            "training_s": now_s - self._last_s - self._spent_s["excluded"],
            "data_s": self._spent_s["data"],
            "optimizer_s": update.seconds,
            "peers_wait_s": update.peers_wait_s,
        }
        self._sums.update(more)
        for name, figure in _FIGURES.items():
            by_device = result.by_device(figure, len(self._devices))
            self._sums.update({(name, device): value for device, value in enumerate(by_device)})
        self._last_s, self._spent_s = now_s, {"excluded": 0.0, "data": 0.0}
        if self._last is not None and self._last.pool is not result.pool:
            self._host_allocations = 0  # a new engine's pool counts its allocations from 0
        self._last = result

    def record(self, step: int, tokens: int, lr: float, validation_loss: float | None) -> StepRecord:
        """Return the record of the newest step, start the next interval. `tokens`: all labels so far. Raises `ValueError`."""
        if self.num_steps == 0 or self._last is None:
            raise ValueError("no step was counted since the last record, so there is no rate")
        before = min(self._window[0], self._at_record, key=lambda sums: sums["steps"])
        steps = self._sums["steps"] - before["steps"]
        mean = {key: (value - before[key]) / steps for key, value in self._sums.items()}
        numbers = range(len(self._devices))
        figures = {name: tuple(mean[name, number] for number in numbers) for name in _FIGURES}
        step_s = mean["training_s"]
        tokens_per_s = mean["tokens"] / step_s if step_s > 0 else 0.0
        devices_s = len(self._devices) * step_s
        device_allocations = sum(device.num_allocations for device in self._devices)
        host_allocations = self._last.pool.num_allocations
        record = StepRecord(
            step=step,
            loss=self._mean_loss(),
            loss_steps=len(self._averaged) or 1,
            grad_norm=self._grad_norm,
            lr=lr,
            tokens=tokens,
            tokens_per_s=tokens_per_s,
            mfu=mfu(tokens_per_s, self._flops_per_token, self._all_flops_per_s),
            step_s=step_s,
            elapsed_s=self.elapsed_s,
            data_s=mean["data_s"],
            optimizer_s=mean["optimizer_s"],
            # A step that was under way before the window has computed for longer than the window's part of it.
            bubble=max(0.0, 1 - sum(figures["busy_s"]) / devices_s) if devices_s > 0 else None,
            host_gib=host_gib(),
            skipped_steps=self._skipped_steps,
            validation_loss=validation_loss,
            has_virtual_devices=not any(device.has_link for device in self._devices),
            **figures,
            device_peaks_gib=tuple(device.peak_bytes() / GIB for device in self._devices),
            host_peak_gib=host_peak_gib(),
            host_pool_gib=self._last.pool.allocated_bytes / GIB,
            device_allocations=device_allocations - self._device_allocations,
            host_allocations=host_allocations - self._host_allocations,
            peers_wait_s=mean["peers_wait_s"],
            machines=(),
            samples=(),
        )
        self._device_allocations, self._host_allocations = device_allocations, host_allocations
        self._at_record, self._averaged = self._sums.copy(), []
        return record

    @property
    def num_steps(self) -> int:
        return int(self._sums["steps"] - self._at_record["steps"])

    @property
    def elapsed_s(self) -> float:
        return self._last_s - self._start_s

    def mean_tokens_per_s(self) -> float:
        return self._sums["tokens"] / self._sums["training_s"] if self._sums["training_s"] else 0.0

    def _mean_loss(self) -> float:
        """Average the loss per label over the steps since the last record with a finite loss, otherwise take the newest."""
        if len(self._averaged) < 2:
            # A product and a division would change the last bits of a single loss.
            return self._averaged[0][0] if self._averaged else self._loss
        num_labels = sum(labels for _, labels in self._averaged)
        loss_sum = math.fsum(loss * labels for loss, labels in self._averaged)
        return loss_sum / num_labels if num_labels else 0.0


def flops_per_token(model: LayeredModel, seq_len: int, element_bytes: int) -> float:
    """Return the FLOPs of training per token, forward and backward, on sequences of `seq_len` tokens.

    Recomputation does not count: it is a cost of the engine, not work of the model (PaLM, appendix B). Gradients of
    frozen weights do not count either, because they are never computed: a LoRA run has 4 FLOPs per token and frozen
    weight instead of 6.
    """
    works = [layer.work(1, seq_len, element_bytes) for layer in model.layers]  # type: ignore[operator]
    return float(sum(work.forward_flops + work.backward_flops for work in works)) / seq_len


def mfu(tokens_per_s: float, flops_per_token: float, peak_flops_per_s: float | None) -> float | None:
    """Compute the model FLOPs utilisation. The peak is that of all devices; None if it is not known: it is never guessed."""
    return None if peak_flops_per_s is None else tokens_per_s * flops_per_token / peak_flops_per_s
