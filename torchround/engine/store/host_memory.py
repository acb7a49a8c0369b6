"""The one place that allocates host memory, and the pool of host buffers that devices stream through.

Buffers have their exact size and begin at a page, so that checkpoints are written straight from them. PyTorch's pinned
allocator rounds each block up to a power of two and keeps it.

Forked processes do not get these buffers: copy-on-write would move pages away from under the devices. A buffer is
unregistered before it is unmapped. Its finalizer cannot watch the `mmap` itself, which unmaps before it runs finalizers.
"""

import ctypes
import mmap
import os
import threading
import warnings
import weakref
from bisect import bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import accumulate

import torch
from torch import Tensor

from torchround.accelerators import kind_of, present_kind
from torchround.engine.board import Observer
from torchround.engine.device import Event
from torchround.engine.errors import HostMemoryError
from torchround.planning.host_buffers import whole_pages
from torchround.planning.memory import GIB, size_text

# Buffers of the pool are registered together up to this size: a registration of 512 GiB or more fails and leaves an error
# behind. The driver refuses a copy that begins in one registration and ends in another, so none holds a part of a buffer.
REGISTRATION_BYTES = 64 * GIB


class HostAllocator:
    """An allocator of host buffers, page-locked if `pinned` is set, until the driver refuses. `what` says whose, for messages."""

    def __init__(self, pinned: bool, what: str = "the host store") -> None:
        self.allocated_bytes = 0
        self.num_allocations = 0
        self._what = what
        self._pinned = pinned
        self._lock = threading.Lock()
        self._unlocks: list[weakref.finalize[..., ctypes.Array[ctypes.c_char]]] = []

    def allocate(self, nbytes: int, for_devices: bool) -> Tensor:
        """Return zeroed uint8 memory; `for_devices` asks for page-locked memory. Raises `HostMemoryError`."""
        if nbytes == 0:
            return torch.zeros(nbytes, dtype=torch.uint8)
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise HostMemoryError(
                f"the system refused {size_text(nbytes)} of host memory ({error.strerror}); {self._what} had "
                f"{size_text(self.allocated_bytes)} by then. Lower engine.host_memory_gib, free memory, or raise the limit of the "
                "process (ulimit -v; vm.overcommit_memory)"
            ) from error
        with self._lock:
            self.allocated_bytes += nbytes
            self.num_allocations += 1
        # Fewer page faults when it is filled, and fewer entries to look up in each copy.
        _advise(mapping, "MADV_HUGEPAGE")
        if not (self._pinned and for_devices):
            return torch.frombuffer(mapping, dtype=torch.uint8)
        # The tensor refers to this view of the mapping, and the view to the mapping.
        view = (ctypes.c_char * nbytes).from_buffer(mapping)
        _advise(mapping, "MADV_DONTFORK")
        # Only this call unmaps the memory: Python's end, which runs no finalizers, or a forked process would do so too.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))
        _when_dropped(view, mapping, ctypes.pythonapi.Py_DecRef, ctypes.py_object(mapping))
        buffer = torch.frombuffer(view, dtype=torch.uint8)
        # Registration pins pages that exist. It would create missing ones itself, but with one thread, for minutes.
        buffer.zero_()
        locker = present_kind() or kind_of("cpu")  # which refuses
        status = locker.lock_pages(buffer.data_ptr(), nbytes)
        if status == 0:
            unlock = _when_dropped(view, mapping, locker.unlock_pages, buffer.data_ptr())
            with self._lock:
                self._unlocks = [*(earlier for earlier in self._unlocks if earlier.alive), unlock]
        else:
            self._pinned = False
            text = (
                f"could not page-lock {nbytes / GIB:.2f} GiB of host memory (error {status} of the driver). This memory and "
                "all later buffers stay pageable, so copies are slower and do not overlap with compute. Raise the memlock "
                "limit (ulimit -l) or use a smaller model."
            )
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return buffer

    def close(self) -> None:
        """Undo all page-locking. No device may be using the buffers. Each lives on while a tensor refers to it."""
        with self._lock:
            unlocks, self._unlocks = self._unlocks, []
        for unlock in unlocks:
            unlock()


def _when_dropped(
    view: ctypes.Array[ctypes.c_char], mapping: mmap.mmap, call: Callable[..., object], *arguments: object
) -> "weakref.finalize[..., ctypes.Array[ctypes.c_char]]":
    """Return a finalizer that makes a call once `view` is dropped in this process, not at the end of Python.

    Until the call has ended, `mapping` stays mapped. A forked process has copies of the objects, but not the memory.
    """
    process = os.getpid()

    def call_here(_: mmap.mmap) -> None:
        if os.getpid() == process:
            call(*arguments)

    finalizer = weakref.finalize(view, call_here, mapping)
    finalizer.atexit = False
    return finalizer


def _advise(mapping: mmap.mmap, name: str) -> None:
    advice = getattr(mmap, name, None)  # only Linux has the advice that is used here
    if advice is not None:
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(advice)


class HostBuffer:
    """A pool buffer. `memory` is the part of `space` that the taker asked for, `busy` the events that it must wait for."""

    def __init__(self, space: Tensor) -> None:
        self.space = self.memory = space
        self.busy: list[Event] = []


class HostPool(HostAllocator):
    """Host buffers by size in pages, reused, so that a steady run allocates nothing.

    The buffer that was given back first is taken first: its last read is the likeliest to be over already. A taker must
    make its writing stream wait for `HostBuffer.busy`, the events of these reads.
    """

    def __init__(self, pinned: bool, observer: Observer) -> None:
        super().__init__(pinned, "the pool of host buffers")
        self.reserved_bytes = 0  # of `allocated_bytes`; `take` had to add the rest
        self._observer = observer
        self._free: dict[int, deque[HostBuffer]] = defaultdict(deque)
        self._owned: Counter[int] = Counter()
        self._buffers: list[HostBuffer] = []

    def reserve(self, counts: Mapping[int, int]) -> None:
        """Make sure that the pool owns at least `counts` buffers of each size in bytes, by as few allocations as may be."""
        wanted: Counter[int] = Counter()
        for nbytes, number in counts.items():
            wanted[whole_pages(nbytes)] += number
        sizes = list((wanted - self._owned).elements())
        while sizes:
            together = max(bisect_right(list(accumulate(sizes)), REGISTRATION_BYTES), 1)
            space = self.allocate(sum(sizes[:together]), for_devices=True)
            self.reserved_bytes += space.numel()
            for part in space.split(sizes[:together]):
                self.give(self._add(part), busy=[])
            sizes = sizes[together:]

    def lend(self, sizes: Sequence[int]) -> list[HostBuffer]:
        """Reserve and take buffers that are never given back. Later calls of `reserve` do not count them."""
        asked = Counter(map(whole_pages, sizes))
        self.reserve(self._owned + asked)
        lent = [self.take(nbytes) for nbytes in sizes]
        self._owned -= asked
        return lent

    def take(self, nbytes: int) -> HostBuffer:
        """Take a free buffer, otherwise a new one, which page-locks memory in the middle of a step unlike `reserve`."""
        size, buffer = whole_pages(nbytes), None
        with self._lock:
            if self._free[size]:
                buffer = self._free[size].popleft()
                self._observer.waited(buffer)
        if buffer is None:
            buffer = self._add(self.allocate(size, for_devices=True))
        buffer.memory = buffer.space[:nbytes]
        return buffer

    def give(self, buffer: HostBuffer, busy: list[Event]) -> None:
        buffer.busy = busy
        # Before the buffer can be taken, so that the race checker sees the two in this order.
        self._observer.posted(buffer)
        with self._lock:
            self._free[buffer.space.numel()].append(buffer)

    def _add(self, space: Tensor) -> HostBuffer:
        buffer = HostBuffer(space)
        with self._lock:
            self._owned[space.numel()] += 1
            self._buffers.append(buffer)
        return buffer

    def close(self) -> None:
        """Undo page-locking and drop the memory of all buffers, also of those that the result of a failed pass refers to."""
        super().close()
        with self._lock:
            self._free.clear()
            for buffer in self._buffers:
                buffer.space = buffer.memory = torch.empty(0, dtype=torch.uint8)
                buffer.busy = []
            self._buffers.clear()
