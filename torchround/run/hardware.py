"""The devices and the memory that a run may use: found on this machine, or described for a machine elsewhere."""

from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from torchround.config import EngineTable
from torchround.engine.device import CpuDevice, CudaDevice, Device
from torchround.engine.errors import EngineUsageError
from torchround.pipeline.cards import DeviceSpec, find_device
from torchround.pipeline.memory import GIB

# The share of a GPU's memory that a plan may use. The CUDA context, library workspaces and fragmentation take the rest.
USABLE_CUDA_FRACTION = 0.9
# The share of free host memory that all virtual devices together may use as their device memory.
USABLE_HOST_FRACTION = 0.5
# A container's memory limit, in version 2 and version 1 of cgroups.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Hardware:
    """Devices of one `kind` (`cuda` or `cpu`) and the memory limits of a run.

    `device_bytes` is the limit of each device, `host_bytes` that of the host; None is no limit. `spec` is None when the
    card is not in the table of known devices.
    """

    kind: str
    num_devices: int
    device_bytes: int | None
    host_bytes: int | None = None
    spec: DeviceSpec | None = None

    def make_devices(self) -> list[Device]:
        """Make the devices without allocating on them. If the machine has fewer GPUs, devices share them in turn."""
        if self.kind == "cpu":
            assert self.device_bytes is not None, "a virtual device has a memory limit"
            return [CpuDevice(index, self.device_bytes) for index in range(self.num_devices)]
        present = torch.cuda.device_count()
        shared = self.num_devices > present
        return [CudaDevice(index % present, index if shared else None) for index in range(self.num_devices)]


def find_hardware(table: EngineTable) -> Hardware:
    """Find what `[engine]` asks for on this machine. Raises `EngineUsageError` if it asks for GPUs and there are none."""
    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    host_bytes = available_host_bytes()
    if table.devices == "cpu" or (table.devices == "auto" and not present):
        count = table.num_devices or 1
        share = int(psutil.virtual_memory().available * USABLE_HOST_FRACTION) // count
        return Hardware("cpu", count, _limit(table, share), host_bytes)
    if not present:
        raise EngineUsageError(
            'engine.devices is "cuda", but PyTorch sees no GPU; legal here: "cpu" or "auto"'
        )
    count = table.num_devices or present
    # All devices get one limit: a share of the smallest GPU, by the number of devices on the fullest one.
    smallest = min(torch.cuda.get_device_properties(index).total_memory for index in range(present))
    share = int(smallest * USABLE_CUDA_FRACTION) // -(-count // present)
    spec = find_device(torch.cuda.get_device_name(0))
    return Hardware("cuda", count, _limit(table, share), host_bytes, spec)


def available_host_bytes() -> int:
    """Return the machine's free memory, or the container's limit if that is less."""
    limits = [int(psutil.virtual_memory().available)]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # the other version of cgroups, or "max"
            continue
    return min(limits)


def _limit(table: EngineTable, default_bytes: int) -> int:
    return default_bytes if table.device_memory_gib is None else int(table.device_memory_gib * GIB)
