"""The one function that allocates host memory, and the pool of host buffers that devices stream through.

PyTorch's pinned allocator rounds each block up to a power of two, so buffers that devices touch are allocated
exactly, pre-faulted, then registered with CUDA in chunks (DESIGN section 4).
"""

import threading
import warnings
from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from torchround.engine.device import Event
from torchround.engine.observer import Observer

REGISTRATION_BYTES = 64 * 2**30  # one registration of 512 GiB or more fails and leaves a sticky error


class PinningWarning(UserWarning):
    """Host memory could not be page-locked; copies from and to it are slower and do not overlap."""


def allocate_host(nbytes: int, pinned: bool) -> Tensor:
    """A zeroed uint8 buffer of exactly `nbytes`, page-locked when `pinned` and CUDA allows it."""
    buffer = torch.zeros(nbytes, dtype=torch.uint8)
    if pinned and nbytes > 0:
        _register(buffer)
    return buffer


def release_host(buffers: Iterable[Tensor]) -> None:
    """Undo the page-locking of buffers from `allocate_host(pinned=True)` before they are freed."""
    for buffer in buffers:
        for start in range(0, buffer.numel(), REGISTRATION_BYTES):
            torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr() + start)


def _register(buffer: Tensor) -> None:
    runtime = torch.cuda.cudart()
    for start in range(0, buffer.numel(), REGISTRATION_BYTES):
        size = min(REGISTRATION_BYTES, buffer.numel() - start)
        status = int(runtime.cudaHostRegister(buffer.data_ptr() + start, size, 0))
        if status != 0:
            warnings.warn(
                f"could not page-lock {size / 2**30:.2f} GiB of host memory (CUDA error {status}); using pageable "
                "memory instead, which makes copies slower and keeps them from overlapping with compute. "
                "Raise the memlock limit (ulimit -l) or use a smaller model.",
                PinningWarning,
                stacklevel=3,
            )
            return


class HostBuffer:
    """A pool buffer and the device events after which its bytes may be overwritten."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.busy: list[Event] = []


class HostPool:
    """Host buffers by exact size, reused in turn, so that a steady run allocates nothing.

    A taker must make its writing stream wait for `HostBuffer.busy` first; what the giving thread did itself is
    in the past.
    """

    def __init__(self, pinned: bool, observer: Observer) -> None:
        self._pinned = pinned
        self._observer = observer
        self._lock = threading.Lock()
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)
        self._owned: list[Tensor] = []
        self.allocated_bytes = 0

    def take(self, nbytes: int) -> HostBuffer:
        with self._lock:
            if self._free[nbytes]:
                buffer = self._free[nbytes].pop()
                self._observer.waited(buffer)
                return buffer
            self.allocated_bytes += nbytes
        memory = allocate_host(nbytes, self._pinned)
        with self._lock:
            self._owned.append(memory)
        return HostBuffer(memory)

    def give(self, buffer: HostBuffer, busy: list[Event]) -> None:
        """Return a buffer; `busy` are the events of the last reads of it."""
        buffer.busy = busy
        self._observer.posted(buffer)
        with self._lock:
            self._free[buffer.memory.numel()].append(buffer)

    def close(self) -> None:
        with self._lock:
            if self._pinned:
                release_host(self._owned)
            self._owned.clear()
            self._free.clear()
