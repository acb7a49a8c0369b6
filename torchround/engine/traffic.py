"""One device's activations in both directions: host boundaries to device rings, results back to the host."""

from torch import Tensor

from torchround.engine.device import Device, Event, Stream
from torchround.engine.ordering import Board, Fact
from torchround.engine.reserve import LOSS_BYTES, StagingSizes
from torchround.engine.staging import (
    Boundary,
    Packing,
    Ring,
    RingEntry,
    aligned,
    as_hidden,
    as_tuple,
    fill,
)
from torchround.engine.store.host_memory import HostPool
from torchround.layer import Hidden, MicroBatch


class Traffic:
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
