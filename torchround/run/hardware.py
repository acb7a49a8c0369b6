"""The devices and the memory that a run may use: found on this machine, or described for a machine elsewhere."""

import logging
import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from torchround.accelerators import PLANNED_KIND, VISIBLE_CARDS, kind_of, kinds, present_kind
from torchround.config import EngineTable
from torchround.engine.device import AcceleratorDevice, CpuDevice, Device
from torchround.engine.errors import EngineUsageError
from torchround.machines.group import HostShare
from torchround.planning.cards import DeviceSpec, find_device
from torchround.planning.memory import GIB

logger = logging.getLogger(__name__)

# The share of a device's free memory that a plan may use. Library workspaces and fragmentation take the rest.
USABLE_DEVICE_FRACTION = 0.9
# The share of free host memory that a run may use. The interpreter's own objects, the tables of its pages and other
# processes take the rest: none of those is counted.
USABLE_HOST_FRACTION = 0.95
# The share of usable host memory that all virtual devices together may use as their device memory.
VIRTUAL_DEVICES_FRACTION = 0.5
# Virtual devices of a run that names no number. Each computes with one thread, so this many use as many cores; with more
# of them, steps of few micro-batches would leave most idle.
MOST_VIRTUAL_DEVICES = 8
# A container's control group: its memory limit, what is in use, and what of that the kernel gives back when memory runs
# short.
CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Hardware:
    """Devices of one `kind` (`cpu`, or a kind of accelerator by PyTorch's name) and the memory limits of a run.

    `device_bytes` is the limit of each device, `host_bytes` that of the host; None is no limit. `spec` is None when the
    card is not in the table of known devices. `note` is said after the devices: why `auto` found no accelerator.
    """

    kind: str
    num_devices: int
    device_bytes: int | None
    host_bytes: int | None = None
    spec: DeviceSpec | None = None
    note: str = ""

    def make_devices(self) -> list[Device]:
        """Make the devices without allocating on them. If the machine has fewer GPUs, devices share them in turn."""
        if self.kind == "cpu":
            assert self.device_bytes is not None, "a virtual device has a memory limit"
            return [CpuDevice(index, self.device_bytes) for index in range(self.num_devices)]
        kind = kind_of(self.kind)
        if not kind.locks_pages:
            text = "%s devices cannot page-lock existing host memory, so copies do not overlap with compute"
            logger.warning(text, self.kind)
        num_cards = kind.count()
        shared = self.num_devices > num_cards
        return [
            AcceleratorDevice(f"{self.kind}:{index % num_cards}", index if shared else None)
            for index in range(self.num_devices)
        ]


def find_hardware(table: EngineTable, host_share: HostShare | None = None) -> Hardware:
    """Find what `[engine]` asks for on this machine, within this process's share of its host; None is the whole host.

    Free memory is divided; limits of the table are each process's own. Raises `EngineUsageError` for devices not here.
    """
    share = host_share or HostShare()
    kind = None if table.devices == "cpu" else present_kind()
    if table.devices not in ("auto", "cpu") and (kind is None or kind.name != table.devices):
        raise EngineUsageError(_not_legal(table.devices, [kind.name] if kind else []))
    if table.host_memory_gib is not None:
        host_bytes = int(table.host_memory_gib * GIB)
    else:
        host_bytes = int(available_host_bytes() * USABLE_HOST_FRACTION) // share.count
    limit = None if table.device_memory_gib is None else int(table.device_memory_gib * GIB)
    if kind is None:
        threads = table.cpu_threads or torch.get_num_threads()
        count = table.num_devices or min(threads, MOST_VIRTUAL_DEVICES)
        device_bytes = int(host_bytes * VIRTUAL_DEVICES_FRACTION) // count
        note = f": no accelerator found ({why_no_accelerator()})" if table.devices == "auto" else ""
        return Hardware("cpu", count, limit or device_bytes, host_bytes, note=note)
    num_cards = kind.count()
    count = table.num_devices or num_cards
    # All devices get one limit: a share of the fullest GPU that the run uses, by the largest number of devices on one GPU,
    # of all processes. Unused memory of this process's own allocator counts as free, tensors of any process do not.
    used = range(min(count, num_cards))
    smallest = min(kind.free_and_total_bytes(index)[0] + kind.cached_bytes(index) for index in used)
    device_bytes = int(smallest * USABLE_DEVICE_FRACTION) // (-(-count // num_cards) * share.count)
    return Hardware(kind.name, count, limit or device_bytes, host_bytes, find_device(kind.card_name(0)))


def planned_kind(table: EngineTable) -> str:
    """Return the kind of device that a plan for a machine elsewhere is for. Raises `EngineUsageError` for no kind."""
    if table.devices in ("auto", "cpu"):
        return PLANNED_KIND  # the kind of the cards in the table
    if table.devices not in kinds():
        raise EngineUsageError(_not_legal(table.devices, list(kinds())))
    return table.devices


def available_host_bytes() -> int:
    """Return the machine's free memory, or what is left of the container's limit if that is less."""
    free_bytes = int(psutil.virtual_memory().available)
    limit, used, stat = (_read(CGROUP / f"memory.{name}") for name in ("max", "current", "stat"))
    if not limit.isdecimal():
        return free_bytes  # no container, or "max"
    counts = dict(line.split() for line in stat.splitlines())
    caches = sum(int(counts.get(name, 0)) for name in ("inactive_file", "active_file"))
    return min(free_bytes, max(0, int(limit) - max(0, int(used or 0) - caches)))


def _not_legal(asked: str, here: list[str]) -> str:
    is_known = asked in kinds()
    reason = f"PyTorch sees none here ({why_no_accelerator()})" if is_known else "no such kind is known"
    legal = ", ".join(f'"{name}"' for name in ("auto", "cpu", *here))
    return f'engine.devices = "{asked}": {reason}; legal: {legal}'


def why_no_accelerator() -> str:
    reason = "it names no reason"
    try:
        torch.get_device_module(PLANNED_KIND).init()
    except Exception as error:  # noqa: BLE001  (an error of any type is the reason)
        reason = (str(error) or type(error).__name__).splitlines()[0]
    shown = os.environ.get(VISIBLE_CARDS)
    hidden = "" if shown is None else f"; {VISIBLE_CARDS} is {shown or 'empty'}"
    return f"torch {torch.__version__}: {reason}{hidden}"


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
