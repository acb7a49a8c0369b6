"""Buffers of virtual devices and of host pools that can be asked whether they are still in memory.

Each buffer is the memory of a numpy array. A tensor's storage holds the array, so the array lives exactly as long as
the last view of the buffer. Python's weak references to tensors and storages say nothing about their memory.
"""

import weakref

import numpy as np
import torch

from torchround.engine.device import CpuDevice
from torchround.engine.store.host_memory import HostAllocator, HostPool


class RecordedBuffers:
    """The buffers that were allocated while it was in force, with a word for who asked for each."""

    def __init__(self):
        self._buffers: list[tuple[str, int, weakref.ref[np.ndarray]]] = []

    def allocate(self, owner, nbytes):
        array = np.zeros(nbytes, dtype=np.uint8)
        self._buffers.append((owner, nbytes, weakref.ref(array)))
        return torch.from_numpy(array)

    def alive(self):
        """Describe every buffer that is still in memory."""
        return [f"{nbytes} bytes of {owner}" for owner, nbytes, array in self._buffers if array() is not None]

    def owners(self):
        """Return who asked for buffers so far."""
        return {owner for owner, _, _ in self._buffers}


def record_buffers(monkeypatch):
    """Record the buffers of all virtual devices and host pools until the test ends."""
    buffers = RecordedBuffers()
    count_bytes, open_pool = CpuDevice._allocate, HostPool.__init__

    def allocate(self, nbytes):
        count_bytes(self, nbytes)  # the device's own count and limit
        return buffers.allocate(self.name, nbytes)

    class RecordedAllocator(HostAllocator):
        def allocate(self, nbytes, for_devices, **sizes):
            super().allocate(nbytes, for_devices, **sizes)
            return buffers.allocate("a pool", nbytes)

    def open_recorded(self, *arguments):
        open_pool(self, *arguments)
        self._memory = RecordedAllocator(pinned=False)

    monkeypatch.setattr(CpuDevice, "_allocate", allocate)
    monkeypatch.setattr(HostPool, "__init__", open_recorded)
    return buffers
