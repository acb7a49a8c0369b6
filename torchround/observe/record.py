"""What is reported of a logged step: one object of `metrics.jsonl`, one console line."""

import math
import resource
from dataclasses import asdict, dataclass, fields
from typing import Any

import psutil


@dataclass(frozen=True)
class EngineRecord:
    """Tuples have one value for each device, in device order. Times and bytes are means per step; GiB are 2^30 bytes.

    A device computes (`busy_s`) or stands still for want of an input or gradient of a neighbouring stage
    (`input_wait_s`), of weights on their way up (`weights_wait_s`), or of weights that the optimizer still has to
    write (`optimizer_wait_s`; `optimizer_exposed_s` is its mean over the devices). Peaks are over the whole run; GPUs
    that several workers share tell each of them the card's. Allocations are numbers since the record before.
    """

    busy_s: tuple[float, ...]
    input_wait_s: tuple[float, ...]
    weights_wait_s: tuple[float, ...]
    optimizer_wait_s: tuple[float, ...]
    optimizer_exposed_s: float
    uploaded_gib: tuple[float, ...]
    downloaded_gib: tuple[float, ...]
    device_peak_gib: tuple[float, ...]
    host_peak_gib: float
    host_pool_gib: float
    device_allocations: int
    host_allocations: int


@dataclass(frozen=True)
class StepRecord:
    """One logged step. Rates and times are means over the steps since the last record.

    `step` counts finished updates, so the first is 1. `tokens` counts the labels trained on since the run
    began; padding and masked tokens are not among them. `tokens_per_s` and `mfu` leave out padding alone. `loss` is the mean over the step's labels,
    `grad_norm` the norm before clipping, `bubble` and `mfu` fractions of 1, GiB are 2^30 bytes. `None` is a
    value that is not known here (`mfu` of a device whose peak is not, `device_peak_gib` without a device).
    `engine` tells more about the devices; a record without it has no such key.
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
    device_peak_gib: float | None
    host_gib: float
    skipped_steps: int
    validation_loss: float | None = None
    engine: EngineRecord | None = None

    def as_dict(self) -> dict[str, Any]:
        """The keys and values to store. Those of a validation are there only for a step that was validated.

        What is not finite becomes `None`, JSON's null: a NaN is no JSON, and one such line would keep strict
        readers from the whole file.
        """
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.validation_loss is None:
            del values["validation_loss"]
        else:
            values["validation_perplexity"] = perplexity(self.validation_loss)
        if self.engine is None:
            del values["engine"]
        else:
            values["engine"] = asdict(self.engine)
        return {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }


def perplexity(loss: float) -> float:
    """`exp(loss)`, the number of tokens that are equally likely at such a mean loss; infinite above 1e300."""
    return math.exp(loss) if loss < 690 else math.inf


def host_gib() -> float:
    """Resident memory of this process in GiB (2^30 bytes), pinned buffers and shared libraries included."""
    return float(psutil.Process().memory_info().rss) / 2**30


def host_peak_gib() -> float:
    """The most that `host_gib` has been in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # counted in KiB
