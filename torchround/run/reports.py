"""From finished steps to the records of a run: what was learnt, how fast, and on which share of the devices."""

from collections.abc import Sequence
from functools import cached_property

from torchround.config import TrainingTable
from torchround.engine.device import GIB, Device
from torchround.engine.results import StepResult
from torchround.layer import LayeredModel
from torchround.observe import StepRecord, Throughput, host_gib, mfu, train_flops_per_token
from torchround.run.engine_totals import EngineTotals
from torchround.run.hardware import Hardware
from torchround.run.numbers import DTYPES


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
