"""What the engine did in the steps of a record: the object `engine` of a line of `metrics.jsonl`."""

from dataclasses import dataclass


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
