"""The devices and the memory that a run may use: found on this machine, or described for a machine elsewhere."""

import logging
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from torchround.accelerators import (
    PLANNED_KIND,
    AcceleratorKind,
    kind_of,
    known_kinds,
    maker_of_build,
    present_kind,
)
from torchround.config import EngineTable
from torchround.config.usual_names import nearest_value
from torchround.engine.device import AcceleratorDevice, CpuDevice, Device
from torchround.engine.errors import EngineUsageError
from torchround.machines.group import HostShare
from torchround.planning.cards import DeviceSpec, find_device
from torchround.planning.memory import GIB
from torchround.planning.partition import split_evenly
from torchround.run.missing_cards import why_no_accelerator

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
# A container's memory limit, in version 2 and version 1 of cgroups. The same folder says how much is in use
# (`CGROUP_USED`), and how much of that the kernel gives back when memory runs short (`memory.stat`).
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
CGROUP_USED = ("memory.current", "memory.usage_in_bytes")
CGROUP_CACHES = ("inactive_file", "active_file", "total_inactive_file", "total_active_file")


@dataclass(frozen=True)
class Hardware:
    """Devices of one `kind` (`cpu`, or a kind of accelerator by PyTorch's name) and the memory limits of a run.

    `device_bytes` is the limit of each device, `host_bytes` that of the host; None is no limit. `spec` is None when the
    card is not in the table of known devices. `note` is said after the devices: why `auto` found no accelerator. `cards`
    are the numbers of the accelerators that this process may use; empty means all.
    """

    kind: str
    num_devices: int
    device_bytes: int | None
    host_bytes: int | None = None
    spec: DeviceSpec | None = None
    note: str = ""
    cards: tuple[int, ...] = ()

    def make_devices(self) -> list[Device]:
        """Make the devices without allocating on them. If the machine has fewer GPUs, devices share them in turn."""
        if self.kind == "cpu":
            assert self.device_bytes is not None, "a virtual device has a memory limit"
            return [CpuDevice(index, self.device_bytes) for index in range(self.num_devices)]
        kind = kind_of(self.kind)
        if not kind.locks_pages:
            logger.warning(
                "%s devices cannot page-lock host memory that exists, so copies do not overlap with compute",
                self.kind,
            )
        cards = self.cards or tuple(range(kind.count()))
        shared = self.num_devices > len(cards)
        return [
            AcceleratorDevice(f"{self.kind}:{cards[index % len(cards)]}", index if shared else None)
            for index in range(self.num_devices)
        ]


def find_hardware(table: EngineTable, host_share: HostShare | None = None) -> Hardware:
    """Find what `[engine]` asks for on this machine, within this process's share of its host; None is the whole host.

    Accelerators and free memory are divided. Limits that the table gives are each process's own. Raises
    `EngineUsageError` if the table asks for devices that are not here.
    """
    share = host_share or HostShare()
    kind, host_bytes = _asked_for(table), usable_host_bytes(table, share.count)
    if kind is None:
        threads = table.cpu_threads or torch.get_num_threads()
        count = table.num_devices or min(threads, MOST_VIRTUAL_DEVICES)
        device_bytes = int(host_bytes * VIRTUAL_DEVICES_FRACTION) // count
        note = _note_of_absence() if table.devices == "auto" else ""
        return Hardware("cpu", count, _limit(table, device_bytes), host_bytes, note=note)
    cards, num_users = _own_cards(kind.count(), share)
    count = table.num_devices or len(cards)
    # All devices get one limit: a share of the fullest GPU that the run uses, by the largest number of devices on one GPU.
    used = cards[:count]
    smallest = min(available_device_bytes(kind, index) for index in used)
    device_bytes = int(smallest * USABLE_DEVICE_FRACTION) // (-(-count // len(cards)) * num_users)
    spec = find_device(kind.card_name(cards[0]))
    own = cards if share.count > 1 else ()
    return Hardware(kind.name, count, _limit(table, device_bytes), host_bytes, spec, cards=own)


def _own_cards(present: int, share: HostShare) -> tuple[tuple[int, ...], int]:
    """Return the cards of a process that shares its host, and how many processes use each of them at most."""
    if share.count > present:
        return (share.index % present,), -(-share.count // present)
    return tuple(split_evenly(present, share.count)[share.index]), 1


def planned_kind(table: EngineTable) -> str:
    """Return the kind of device that a plan for a machine elsewhere is for. Raises `EngineUsageError` for no kind."""
    if table.devices in ("auto", "cpu"):
        return PLANNED_KIND  # the kind of the cards in the table
    if table.devices not in known_kinds():
        raise EngineUsageError(_not_legal(table.devices, known_kinds()))
    return table.devices


def available_device_bytes(kind: AcceleratorKind, index: int) -> int:
    """Return the device memory that this process could use: free memory, and what its own allocator keeps unused.

    Memory of other processes counts as taken, and so do this process's tensors. A run asks before it makes its first
    engine, so the plan from measured steps has the same limit although an engine holds memory by then.
    """
    free, _ = kind.free_and_total_bytes(index)
    return free + kind.cached_bytes(index)


def usable_host_bytes(table: EngineTable, num_processes: int = 1) -> int:
    """Return the host memory that one of the run's processes here may use.

    It is `engine.host_memory_gib`, otherwise an equal part of a share of what is free.
    """
    if table.host_memory_gib is not None:
        return int(table.host_memory_gib * GIB)
    return int(available_host_bytes() * USABLE_HOST_FRACTION) // num_processes


def available_host_bytes() -> int:
    """Return the machine's free memory, or what is left of the container's limit if that is less."""
    limits = [int(psutil.virtual_memory().available)]
    for path in CGROUP_LIMITS:
        try:
            limit = int(Path(path).read_text())
        except (OSError, ValueError):  # the other version of cgroups, or "max"
            continue
        limits.append(max(0, limit - _used_bytes(Path(path).parent)))
    return min(limits)


def _used_bytes(cgroup: Path) -> int:
    """Return the memory that a container uses, without files that the kernel only keeps in memory."""
    for name in CGROUP_USED:
        try:
            used = int((cgroup / name).read_text())
            stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # Version 1 gives the sums over inner containers under names of their own.
        totals = [name for name in CGROUP_CACHES if name.startswith("total_") and name in stat]
        return max(0, used - sum(int(stat[name]) for name in totals or CGROUP_CACHES if name in stat))
    return 0


def _asked_for(table: EngineTable) -> AcceleratorKind | None:
    """Return the accelerators that `engine.devices` asks for, None for virtual devices on the CPU."""
    here = present_kind()
    if table.devices == "auto":
        return here
    if table.devices == "cpu":
        return None
    if here is None or here.name != table.devices:
        raise EngineUsageError(_not_legal(table.devices, [] if here is None else [here.name]))
    return here


def _note_of_absence() -> str:
    """Return why `auto` found no accelerator. One warning if the machine has a card, which is then not used."""
    absence = why_no_accelerator(maker_of_build())
    if absence.has_card:
        logger.warning(
            'engine.devices = "auto" found no accelerator, so the run uses the CPU, which is far slower: %s. '
            'engine.devices = "cpu" asks for that without this warning',
            absence.reason,
        )
    return f": no accelerator found ({absence.reason})"


def _not_legal(asked: str, kinds: list[str]) -> str:
    """Say why `asked` is refused where these kinds are legal besides the two words."""
    reason = "PyTorch sees none here"
    if asked not in known_kinds():
        reason = f"no such kind is known{nearest_value(asked, ['auto', 'cpu', *known_kinds()])}"
    elif not kinds:
        absence = why_no_accelerator(maker_of_build())
        # A build for the CPU is the usual cause.
        reason += f" ({absence.reason if absence.has_card else f'this is torch {torch.__version__}'})"
    names = ", ".join(f'"{name}"' for name in ("auto", "cpu", *kinds))
    return f'engine.devices = "{asked}": {reason}; legal: {names}'


def _limit(table: EngineTable, default_bytes: int) -> int:
    return default_bytes if table.device_memory_gib is None else int(table.device_memory_gib * GIB)
