"""What a run logs of a step: one object of `metrics.jsonl`, one console line. Also the process's host memory."""

import math
import resource
from dataclasses import asdict, dataclass
from typing import Any

import psutil

# Keys of a line and of its object `engine` that are fields of the record.
LINE_KEYS = (
    *("step", "loss", "grad_norm", "lr", "tokens", "tokens_per_s", "mfu", "step_s", "elapsed_s", "data_s"),
    *("optimizer_s", "bubble", "device_peak_gib", "host_gib", "skipped_steps", "loss_steps"),
)
ENGINE_KEYS = (
    *("busy_s", "input_wait_s", "weights_wait_s", "optimizer_wait_s", "uploaded_gib", "downloaded_gib"),
    *("host_peak_gib", "host_pool_gib", "device_allocations", "host_allocations"),
)


@dataclass(frozen=True)
class MachineTimes:
    """One machine's part in the logged steps: means per step, times in seconds.

    `name` is the machine's, as messages have it. `busy_s` is the busiest device's. `peers_wait_s` is how long the
    optimizer waited for other machines, `optimizer_exposed_s` how long the devices waited for updated weights, the
    mean over them.
    """

    name: str
    step_s: float
    data_s: float
    busy_s: float
    optimizer_s: float
    optimizer_exposed_s: float
    peers_wait_s: float
    host_gib: float

    @property
    def own_s(self) -> float:
        """Seconds per step that the machine would take if it waited for no other one."""
        return self.data_s + max(self.busy_s, self.optimizer_s)


@dataclass(frozen=True)
class PromptSample:
    """A prompt of `validation.prompts` and its continuation."""

    prompt: str
    text: str


@dataclass(frozen=True)
class StepRecord:
    """One logged step. Rates, times and bytes are means per step over the newest steps.

    Those are the steps since the last record, and at least two for each device, because steps overlap (`StepMeter`).
    `elapsed_s` is the time from the start or resumption of the run to this step, validations and saves included.

    `step` counts finished updates, so the first is 1. `tokens` counts the labels trained on since the run
    began, without padding and masked tokens. `tokens_per_s` and `mfu` leave out padding alone. `loss` is the
    mean per label over `loss_steps` steps: those since the last record whose loss is finite. `grad_norm` is
    the step's own, before clipping, and so is `lr`. `bubble` and `mfu` are fractions of 1.
    GiB are 2^30 bytes. None means a value that is not known, such as the `mfu` of a card whose peak is not
    known.

    Tuples have one value for each device, in device order; a record without device figures has empty ones. A
    device computes (`busy_s`), or it is idle until an input or gradient of a neighbouring stage arrives
    (`input_wait_s`), until its weights are uploaded (`weights_wait_s`), or until the optimizer has written
    them (`optimizer_wait_s`). Peaks are over the whole run; workers that share a GPU each report the whole
    card's. Allocations count since the last record.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    mfu: float | None
    step_s: float
    data_s: float
    optimizer_s: float
    bubble: float | None
    host_gib: float
    skipped_steps: int
    validation_loss: float | None = None
    loss_steps: int = 1
    elapsed_s: float = 0.0
    has_virtual_devices: bool = False
    """Whether device peaks leave activations out: virtual devices count their buffers alone. Not stored."""

    busy_s: tuple[float, ...] = ()
    input_wait_s: tuple[float, ...] = ()
    weights_wait_s: tuple[float, ...] = ()
    optimizer_wait_s: tuple[float, ...] = ()
    uploaded_gib: tuple[float, ...] = ()
    downloaded_gib: tuple[float, ...] = ()
    device_peaks_gib: tuple[float, ...] = ()
    host_peak_gib: float = 0.0
    host_pool_gib: float = 0.0
    device_allocations: int = 0
    host_allocations: int = 0
    peers_wait_s: float = 0.0
    machines: tuple[MachineTimes, ...] = ()
    """One entry for each machine of the run, by rank; empty for a run on one machine."""

    samples: tuple[PromptSample, ...] = ()
    """The continuations of a validated step."""

    @property
    def slowest(self) -> int | None:
        """Rank of the machine whose own work takes longest, the first of equals. None on one machine."""
        times = [machine.own_s for machine in self.machines]
        return times.index(max(times)) if times else None

    def machine_times(self, name: str) -> MachineTimes:
        """Extract what this record tells the others about the machine `name` that made it."""
        same = ("step_s", "data_s", "optimizer_s", "peers_wait_s", "host_gib")
        return MachineTimes(
            name=name,
            busy_s=max(self.busy_s, default=0.0),
            optimizer_exposed_s=_mean(self.optimizer_wait_s),
            **{key: getattr(self, key) for key in same},
        )

    @property
    def device_peak_gib(self) -> float | None:
        """The most memory held at once on any device so far."""
        return max(self.device_peaks_gib, default=None)

    def as_dict(self) -> dict[str, Any]:
        """List the keys and values to store. A validated step has two more keys, and a third with `samples`.

        A number that is not finite becomes None, JSON's null: strict readers refuse a whole file with one NaN in it.
        """
        values = {name: getattr(self, name) for name in LINE_KEYS}
        if self.validation_loss is not None:
            values["validation_loss"] = self.validation_loss
            values["validation_perplexity"] = perplexity(self.validation_loss)
        if self.busy_s:
            values["engine"] = {name: getattr(self, name) for name in ENGINE_KEYS}
            values["engine"]["optimizer_exposed_s"] = _mean(self.optimizer_wait_s)
            values["engine"]["device_peak_gib"] = self.device_peaks_gib
        if self.machines:
            by_name = [asdict(machine) for machine in self.machines]
            lists = {key: tuple(each[key] for each in by_name) for key in by_name[0]}
            values["machines"] = {"slowest": self.slowest, **lists}
        if self.samples:
            values["samples"] = [asdict(sample) for sample in self.samples]
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def _mean(values: tuple[float, ...]) -> float:
    return sum(values) / len(values) if values else 0.0


def perplexity(loss: float) -> float:
    """Compute `exp(loss)`: the number of equally likely tokens with such a mean loss. Infinite above 1e300."""
    return math.exp(loss) if loss < 690 else math.inf


def host_gib() -> float:
    """Measure the resident memory in GiB (2^30 bytes), pinned and shared included; the peak if no file can be opened."""
    try:
        return float(psutil.Process().memory_info().rss) / 2**30
    except OSError:
        return host_peak_gib()


def host_peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # the system counts in KiB
