"""What the engine did over some steps, added up for a record: where device time went, bytes moved, memory taken."""

from collections.abc import Sequence

from torchround.engine.device import GIB, Device
from torchround.engine.reports import DeviceTimes
from torchround.engine.results import StepResult
from torchround.observe import EngineRecord, host_peak_gib


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
