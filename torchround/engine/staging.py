"""Activations and other small tensors on their way: packing, device rings, and boundaries kept on the host.

Rings are fixed device buffers, so no block of device memory is freed on one stream while another still uses
it. A boundary activation lives in a pool buffer from the stage that made it to the last stage that reads it.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchround.engine.device import Device, Event
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.layer import Hidden

ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Packing:
    """How tensors lie in one flat uint8 buffer. `single` means a lone tensor, not a tuple of one."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    ranges: tuple[tuple[int, int], ...]
    single: bool
    nbytes: int

    @staticmethod
    def of(hidden: Hidden) -> "Packing":
        tensors = as_tuple(hidden)
        ranges, start = [], 0
        for tensor in tensors:
            ranges.append((start, start + tensor.nbytes))
            start += aligned(tensor.nbytes)
        return Packing(
            tuple(tensor.shape for tensor in tensors),
            tuple(tensor.dtype for tensor in tensors),
            tuple(ranges),
            isinstance(hidden, Tensor),
            start,
        )

    def views(self, buffer: Tensor) -> tuple[Tensor, ...]:
        """The tensors as views of `buffer`."""
        return tuple(
            buffer[start:stop].view(dtype).view(shape)
            for (start, stop), dtype, shape in zip(self.ranges, self.dtypes, self.shapes, strict=True)
        )


def as_tuple(hidden: Hidden) -> tuple[Tensor, ...]:
    return (hidden,) if isinstance(hidden, Tensor) else hidden


def as_hidden(tensors: Sequence[Tensor], single: bool) -> Hidden:
    return tensors[0] if single else tuple(tensors)


def fill(views: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy tensors into the views of a packing."""
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor)


class Boundary:
    """Tensors between two stages, on the host: valid after `landed`, given back by the last of its readers.

    `facts` go with a micro-batch's integers (`MicroBatch.facts`).
    """

    def __init__(
        self,
        buffer: HostBuffer,
        packing: Packing,
        landed: Event,
        readers: int,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        self.packing = packing
        self.facts = facts or {}
        self.landed = landed
        self.memory = buffer.memory
        self._buffer = buffer
        self._readers = readers
        self._reads: list[Event] = []
        self._lock = threading.Lock()

    def read(self, event: Event, pool: HostPool) -> None:
        """One reader's read ends at `event`."""
        with self._lock:
            self._reads.append(event)
            last = len(self._reads) == self._readers
        if last:
            pool.give(self._buffer, self._reads)


class RingEntry:
    """A device buffer, and the event after which it may be overwritten."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.released: Event | None = None
        self._packing: Packing | None = None
        self._views: tuple[Tensor, ...] = ()

    def views(self, packing: Packing) -> tuple[Tensor, ...]:
        """The tensors of `packing` in this buffer; the same ones as last time while the packing stays."""
        if packing != self._packing:
            self._packing, self._views = packing, packing.views(self.memory)
        return self._views


class Ring:
    """Fixed device buffers used in turn, so that a transfer runs while the previous entry is in use.

    An entry grows when something larger comes; the smaller buffer is kept until the ring goes, because another
    stream may still use it.
    """

    def __init__(self, device: Device, depth: int = 2) -> None:
        self._device = device
        self._entries: list[RingEntry | None] = [None] * depth
        self._outgrown: list[RingEntry] = []
        self._turn = 0

    def reserve(self, nbytes: int) -> None:
        """Nothing up to `nbytes` will have to be allocated later."""
        for turn in range(len(self._entries)):
            self._entry(turn, nbytes)

    def next(self, nbytes: int) -> RingEntry:
        """The least recently used entry, of at least `nbytes`. The writer must wait for `released`."""
        self._turn = (self._turn + 1) % len(self._entries)
        return self._entry(self._turn, nbytes)

    def _entry(self, turn: int, nbytes: int) -> RingEntry:
        entry = self._entries[turn]
        if entry is None or entry.memory.numel() < nbytes:
            if entry is not None:
                self._outgrown.append(entry)
            entry = self._entries[turn] = RingEntry(self._device.allocate(nbytes))
        return entry


def aligned(nbytes: int) -> int:
    """What a tensor takes up in a packing."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
