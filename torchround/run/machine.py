"""What this machine has: facts read from the system, and rates measured by short transfers.

Each fact is a pair of texts, its name and its value. A value that could not be read or measured says so: no rate is
taken from a table.
"""

import mmap
import os
import platform
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import psutil
import torch

from torchround.accelerators import AcceleratorKind, present_kind
from torchround.checkpoint.fsync import free_bytes_at
from torchround.checkpoint.uncached_io import DirectFile
from torchround.engine.device import Device, Mark, Stream
from torchround.engine.errors import EngineError
from torchround.engine.store.host_memory import HostAllocator
from torchround.optim.kernel import keep_inductor_private
from torchround.planning.cards import find_device
from torchround.planning.memory import size_text
from torchround.run.hardware import Hardware, available_host_bytes

Fact = tuple[str, str]

DISK_BYTES = 2**27  # written and read once: a second on a disk of 250 MB/s
DISK_FILE = ".torchround-disk-test"
LINK_BYTES = 2**28  # of one copy: long compared with its start
LINK_COPIES = 3
# Where Linux tells the version of a card's driver.
DRIVER_FILES = ("proc/driver/nvidia/version", "sys/module/amdgpu/version")


def system_facts(root: Path = Path("/")) -> Iterator[Fact]:
    """Yield what the system says of itself. `root` holds its `proc` and `sys`."""
    release = platform.release()
    wsl = " (WSL: Linux inside Windows)" if "microsoft" in release.lower() else ""
    yield "system", f"{platform.system()} {release} on {platform.machine()}{wsl}"
    yield "software", f"Python {sys.version.split()[0]}, torch {torch.__version__}"
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield "processors", f"{usable} usable of {os.cpu_count()}"
    yield (
        "host memory",
        f"{size_text(available_host_bytes())} available of {size_text(psutil.virtual_memory().total)}",
    )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limit = "no limit" if locked == resource.RLIM_INFINITY else size_text(locked)
    yield "memlock", f"{limit} (ulimit -l)"
    yield "driver", _driver(root)


def device_facts(hardware: Hardware) -> Iterator[Fact]:
    """Yield each device that a run would use here, with its memory and its link's measured rates."""
    kind = present_kind()
    devices = hardware.make_devices()
    if hardware.kind == "cpu" or kind is None:
        yield "devices", f"{len(devices)} virtual, on the processor{hardware.note}"
        yield "link", link_text(devices[0])
        return
    for index in range(kind.count()):
        yield f"device {index}", _card_text(kind, index)
    yield "compiled layers", compiler_text(kind)
    # One worker for each card: workers that share a card share its link.
    for index, device in enumerate(devices[: kind.count()]):
        yield f"link {index}", link_text(device)


def compiler_text(kind: AcceleratorKind) -> str:
    """Compile and run one kernel, and say whether that works."""
    missing = kind.missing_compiler()
    if missing is not None:
        return missing
    try:
        keep_inductor_private()
        torch.compile(lambda x: x.sin() + 1)(torch.ones(8, device=kind.name))
    except Exception as error:  # noqa: BLE001  (compilers raise whatever they like)
        reason = str(error).strip().partition("\n")[0]
        return f"a kernel could not be compiled ({type(error).__name__}: {reason}); layers run uncompiled"
    return "Inductor compiled a kernel, which ran"


def disk_text(folder: Path, num_bytes: int = DISK_BYTES) -> str:
    """Measure the disk of a folder that is there, past the page cache, and say its rates. Leaves nothing behind."""
    path = folder / f"{DISK_FILE}-{os.getpid()}"
    content = mmap.mmap(-1, num_bytes)  # begins at a page, as direct transfers demand
    # A disk may store zeros without writing them.
    content.write(np.random.default_rng().bytes(num_bytes))
    try:
        written_s = _write(path, content)
        read_s = _read(path, content)
    except OSError as error:
        return f"not measured in {folder}: {error.strerror or error}"
    finally:
        # A read-only disk refuses this too, though nothing is there.
        with suppress(OSError):
            path.unlink()
    free_bytes = free_bytes_at(folder)
    free = "" if free_bytes is None else f"; {size_text(free_bytes)} are free"
    where = f"{size_text(num_bytes)} once, in {folder}{free}"
    if read_s is None:
        return f"{_rate(num_bytes, written_s)} written through the page cache and synced, reads not measured: {where}"
    return f"{_rate(num_bytes, written_s)} written, {_rate(num_bytes, read_s)} read, past the page cache: {where}"


def link_text(device: Device) -> str:
    """Measure copies between host and device, one direction at a time, and say their rates."""
    if not device.has_link:
        return "none: a virtual device computes in host memory"
    device.enter_thread()
    allocator = HostAllocator(device.pins_host_memory)
    try:
        host = allocator.allocate(LINK_BYTES, for_devices=True)
        locked = allocator.locked_buffers() > 0
        there = device.allocate(LINK_BYTES)
        up_s = _copy_s(device, Stream.WEIGHT_UPLOAD, there, host)
        down_s = _copy_s(device, Stream.GRADIENT_DOWNLOAD, host, there)
    except (EngineError, RuntimeError) as error:
        return f"not measured: {error}"
    finally:
        device.finish()
        device.free()
        allocator.close()
    memory = "page-locked" if locked else "NOT page-locked"
    return f"{_rate(LINK_BYTES, up_s)} up, {_rate(LINK_BYTES, down_s)} down, from and to {memory} host memory"


def _copy_s(device: Device, stream: Stream, destination: torch.Tensor, source: torch.Tensor) -> float:
    """Return the seconds of a copy: the mean of several, after one that is not counted."""
    device.copy(stream, destination, source)
    begin: Mark = device.mark(stream)
    for _ in range(LINK_COPIES):
        device.copy(stream, destination, source)
    return device.mark(stream).seconds_since(begin) / LINK_COPIES


def _write(path: Path, content: mmap.mmap) -> float:
    begin_s = time.perf_counter()
    with closing(DirectFile(path)) as file:
        file.write(memoryview(content))
        file.sync()
    return time.perf_counter() - begin_s


def _read(path: Path, content: mmap.mmap) -> float | None:
    """Return the seconds of a read past the page cache; None if the file system has no such reads."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):  # AttributeError: the system has no O_DIRECT
        return None
    try:
        begin_s, view, done = time.perf_counter(), memoryview(content), 0
        while done < len(content):
            if not (got := os.preadv(descriptor, [view[done : done + 2**23]], done)):
                return None
            done += got
        return time.perf_counter() - begin_s
    finally:
        os.close(descriptor)


def _rate(nbytes: int, seconds: float) -> str:
    return f"{nbytes / seconds / 1e9:.2f} GB/s"


def _card_text(kind: AcceleratorKind, index: int) -> str:
    free, total = kind.free_and_total_bytes(index)
    name = kind.card_name(index)
    known = "" if find_device(name) else "; its speed is not in our table, so plans give no times"
    return f"{name}: {size_text(free)} free of {size_text(total)}{known}"


def _driver(root: Path) -> str:
    for name in DRIVER_FILES:
        try:
            lines = (root / name).read_text(errors="replace").splitlines()
        except OSError:
            continue
        if lines:
            return lines[0].strip()
    return f"none is shown in {' or '.join(f'/{name}' for name in DRIVER_FILES)}"
