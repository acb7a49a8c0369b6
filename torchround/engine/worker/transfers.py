"""One device's activations in both directions: host boundaries to device rings, results back to the host."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchround.engine.board import Board, Fact
from torchround.engine.device import Device, Event, Stream
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.layer import Hidden, MicroBatch

ALIGNMENT_BYTES = 256
LOSS_BYTES = 4


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


@dataclass(frozen=True)
class StagingSizes:
    """Bytes of the largest boundary and of the largest micro-batch's integers, and micro-batches in a round."""

    boundary_bytes: int
    integer_bytes: int
    micro_batches: int
    training: bool


class ActivationTransfers:
    """Moves boundaries for one worker. What it brings is valid until `release`, on the compute stream."""

    def __init__(self, device: Device, board: Board, pool: HostPool) -> None:
        self._device = device
        self._board = board
        self._pool = pool
        self._hidden_in, self._gradients_in, self._out = Ring(device), Ring(device), Ring(device)
        # By place in the round: space for a micro-batch's integers, and the one whose are there.
        self._integers: dict[int, RingEntry] = {}
        self._micro_batches: dict[int, tuple[Boundary, MicroBatch]] = {}
        self._prepared: set[StagingSizes] = set()
        # Buffers that became too small, kept because another stream may still read them.
        self._outgrown: list[RingEntry] = []
        self._stage_end: Event | None = None

    def prepare(self, sizes: StagingSizes) -> None:
        """Allocate now what the passes of these sizes would else allocate at different times."""
        if sizes in self._prepared:
            return
        self._prepared.add(sizes)
        for position in range(sizes.micro_batches):
            self._integer_space(position, sizes.integer_bytes)
        if sizes.boundary_bytes:
            self._hidden_in.reserve(sizes.boundary_bytes)
            if sizes.training:
                self._gradients_in.reserve(sizes.boundary_bytes)
        self._out.reserve(max(sizes.boundary_bytes, aligned(LOSS_BYTES)))

    def bring_micro_batch(self, boundary: Boundary, position: int) -> tuple[MicroBatch, RingEntry]:
        """A micro-batch's integers, uploaded once per round and kept for its other stages on this device.

        `position` is the micro-batch's place in its round.
        """
        entry = self._integer_space(position, boundary.memory.numel())
        cached = self._micro_batches.get(position)
        if cached is not None and cached[0] is boundary:
            return cached[1], entry
        entry.released = self._stage_end
        micro_batch = MicroBatch(*self._upload(boundary, entry), **boundary.facts)
        self._micro_batches[position] = (boundary, micro_batch)
        return micro_batch, entry

    def _integer_space(self, position: int, nbytes: int) -> RingEntry:
        entry = self._integers.get(position)
        if entry is None or entry.memory.numel() < nbytes:
            if entry is not None:
                self._outgrown.append(entry)
            entry = self._integers[position] = RingEntry(self._device.allocate(nbytes))
        return entry

    def end_stage(self) -> None:
        """All computation of a stage is enqueued."""
        self._stage_end = self._device.record(Stream.COMPUTE)

    def bring_hidden(self, boundary: Boundary) -> tuple[Hidden, RingEntry]:
        entry = self._hidden_in.next(boundary.memory.numel())
        return as_hidden(self._upload(boundary, entry), boundary.packing.single), entry

    def bring_gradients(self, boundary: Boundary) -> tuple[tuple[Tensor, ...], RingEntry]:
        entry = self._gradients_in.next(boundary.memory.numel())
        return self._upload(boundary, entry), entry

    def release(self, entry: RingEntry | None) -> None:
        """The computation enqueued so far is the last that reads `entry`."""
        if entry is not None:
            entry.released = self._device.record(Stream.COMPUTE)

    def send(self, fact: Fact, hidden: Hidden, readers: int) -> None:
        """Copy to the host by way of a ring entry, and post it for `readers` readers."""
        device, packing = self._device, Packing.of(hidden)
        entry = self._out.next(packing.nbytes)
        if entry.released is not None:
            device.wait(Stream.COMPUTE, entry.released)
        device.run(
            Stream.COMPUTE, lambda: fill(entry.views(packing), as_tuple(hidden)), writes=[entry.memory]
        )
        device.wait(Stream.ACTIVATION_DOWNLOAD, device.record(Stream.COMPUTE))
        buffer = self._pool.take(packing.nbytes)
        for event in buffer.busy:
            device.wait(Stream.ACTIVATION_DOWNLOAD, event)
        device.copy(Stream.ACTIVATION_DOWNLOAD, buffer.memory, entry.memory[: packing.nbytes])
        landed = entry.released = device.record(Stream.ACTIVATION_DOWNLOAD)
        self._board.post(fact, Boundary(buffer, packing, landed, readers))

    def _upload(self, boundary: Boundary, entry: RingEntry) -> tuple[Tensor, ...]:
        device, nbytes = self._device, boundary.memory.numel()
        if entry.released is not None:
            device.wait(Stream.ACTIVATION_UPLOAD, entry.released)
        device.wait(Stream.ACTIVATION_UPLOAD, boundary.landed)
        device.copy(Stream.ACTIVATION_UPLOAD, entry.memory[:nbytes], boundary.memory)
        uploaded = device.record(Stream.ACTIVATION_UPLOAD)
        device.wait(Stream.COMPUTE, uploaded)
        boundary.read(uploaded, self._pool)
        return entry.views(boundary.packing)
