"""Chunked transfers of weights and gradients between device slots and the host store.

Transfers advance by one equal chunk in each transfer window, which is one micro-batch of a stage (RoundPipe
paper, section 4.2). The bundle is the unit of every access: it is complete, uploaded or consumed as a
whole.
"""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from torchround.engine.device import Device, Event, Stream
from torchround.engine.errors import FaultLocation
from torchround.engine.passes import StageJob
from torchround.engine.store.bundles import MappedRange
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.tasks import Access, Buffer, Task, Tasks, Worker
from torchround.engine.worker.slots import SlotRange, StageLayout
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS, ROUNDING_ELEMENTS

if TYPE_CHECKING:
    from torchround.engine.worker.device_worker import DeviceWorker


class BundleTransfer(ABC):
    """A transfer of a stage's weights or gradients. It moves the `ranges` of a slot one after the other, in chunks."""

    def __init__(self, worker: "DeviceWorker", ranges: Sequence[SlotRange]) -> None:
        self._device = worker.device
        self._store = worker.setup.store
        self._tasks = worker.setup.tasks
        self._ranges = ranges
        self._next_range = 0
        self._done_elements = 0  # of the next range

    def advance(self, numel: int) -> None:
        """Enqueue up to `numel` elements. Stops at a range that would have to wait for another thread."""
        while numel > 0 and not self.complete and self._may_enqueue(self._ranges[self._next_range]):
            numel -= self._enqueue(self._ranges[self._next_range], numel)

    @property
    def remaining(self) -> int:
        """Count the elements that are not enqueued yet."""
        return sum(left.numel for left in self._ranges[self._next_range :]) - self._done_elements

    @property
    def complete(self) -> bool:
        """Whether everything is enqueued."""
        return self._next_range == len(self._ranges)

    def _enqueue_rest(self) -> None:
        while not self.complete:
            slot_range = self._ranges[self._next_range]
            self._enqueue(slot_range, slot_range.numel)

    @abstractmethod
    def _may_enqueue(self, slot_range: SlotRange) -> bool:
        """Tell whether `_enqueue` of the next range would wait for no other thread."""

    @abstractmethod
    def _enqueue(self, slot_range: SlotRange, numel: int) -> int:
        """Enqueue about `numel` elements of the next range. Returns how many."""

    def _move_to(self, stop: int) -> bool:
        """Note that the next range is enqueued up to element `stop`. Returns whether that is its end."""
        self._done_elements = stop
        if stop < self._ranges[self._next_range].numel:
            return False
        self._next_range, self._done_elements = self._next_range + 1, 0
        return True


class WeightUpload(BundleTransfer):
    """The upload of one stage's weights into a slot.

    `versions` has the version of each trained bundle, by layer and bundle. `waited_s` is the host time spent waiting
    for the optimizer to complete them. Weights in files come from `reader`, by whole buffers, or straight from their map
    if there is none.
    """

    def __init__(self, worker: "DeviceWorker", job: StageJob) -> None:
        self.layout = layout = worker.slots.layout(job.task.stage)
        super().__init__(worker, layout.weights)
        self.slot = slot = worker.slots.weights.next(layout.weight_numel)
        self.waited_s = 0.0
        self._accesses = job.uploads
        self.versions = {
            (used.layer, used.bundle): job.pass_.version_read(bundle, used.layer, job.task)
            for used in layout.weights
            if (bundle := self._store.bundles[used.bundle]).trainable
        }
        # Read before the weights: those that are written later come again.
        self._content = layout, self._store.refreshes
        # By the range's position: the pieces that the reader brings, each with the access to its buffer.
        self._pieces: dict[int, deque[tuple[MappedRange, Access]]] = {}
        if slot.frozen_weights == self._content:
            self._next_range = len(layout.weights)  # they are there since the stage before last
        elif worker.reader is not None:
            self._request(worker.reader, job.pass_.step)
        # The stage before last may still compute with what the slot holds.
        if slot.released is not None:
            self._device.wait(Stream.WEIGHT_UPLOAD, slot.released, "a free slot for weights")

    def finish(self) -> Event:
        """Enqueue the rest, waiting for versions if needed. Returns the event after which the slot is filled."""
        self._enqueue_rest()
        self.slot.frozen_weights = None if self._store.trained else self._content
        return self._device.record(Stream.WEIGHT_UPLOAD, "uploaded weights")

    @property
    def blocked(self) -> bool:
        """Whether `finish` would have to wait for the optimizer."""
        return not all(map(self._is_complete, self._ranges[self._next_range :]))

    def _is_complete(self, slot_range: SlotRange) -> bool:
        """Tell whether the optimizer has completed the weights of a range. Frozen ones always are."""
        access = self._accesses.get((slot_range.layer, slot_range.bundle))
        return access is None or access.is_ready

    def _may_enqueue(self, slot_range: SlotRange) -> bool:
        pieces = self._pieces.get(self._next_range)
        return pieces[0][1].is_ready if pieces else self._is_complete(slot_range)

    def _request(self, reader: "FileReader", step: int) -> None:
        """Let the reader begin with all weights of the stage that are in files."""
        for position, slot_range in enumerate(self._ranges):
            if mapped := self._store.bundles[slot_range.bundle].mapped:
                pieces = pieces_of(mapped)
                self._pieces[position] = deque(zip(pieces, reader.request(pieces, step), strict=True))

    def _enqueue(self, slot_range: SlotRange, numel: int) -> int:
        start = self._done_elements
        if pieces := self._pieces.get(self._next_range):
            self._enqueue_piece(slot_range, *pieces.popleft())
            # Gaps between parameters count as done with the piece before them.
            stop = pieces[0][0].start if pieces else slot_range.numel
            self._move_to(stop)
            return stop - start
        access = self._accesses.get((slot_range.layer, slot_range.bundle))
        # Once per bundle: when its first chunk may go, so may the others. Frozen weights are never written.
        if access is not None and start == 0:
            start_s = time.perf_counter()
            self._tasks.begin(access)
            self.waited_s += time.perf_counter() - start_s
        stop = min(start + numel, slot_range.numel)
        version = self.versions.get((slot_range.layer, slot_range.bundle), 0)
        # Several sources if the weights are mapped from files, one tensor each.
        for source in self._store.bundles[slot_range.bundle].sources(version, start, stop):
            self._copy(slot_range, source.start, source.memory)
        # Per bundle, not per stage: the optimizer may overwrite this version as soon as it has gone up.
        if self._move_to(stop) and access is not None:
            self._tasks.end(access, self._device.record(Stream.WEIGHT_UPLOAD, "an uploaded version"))
        return stop - start

    def _enqueue_piece(self, slot_range: SlotRange, piece: MappedRange, access: Access) -> None:
        self._tasks.begin(access)
        content = access.buffer.content.memory[: piece.memory.nbytes]
        self._copy(slot_range, piece.start, content.view(piece.memory.dtype))
        self._tasks.end(access, self._device.record(Stream.WEIGHT_UPLOAD, "an uploaded piece of a file"))

    def _copy(self, slot_range: SlotRange, start: int, source: Tensor) -> None:
        """Enqueue the copy of elements of a range, from element `start` on."""
        target = self.slot.memory[slot_range.start + start :][: source.numel()]
        self._device.copy(Stream.WEIGHT_UPLOAD, target, source)


class GradientDownload(BundleTransfer):
    """The download of one stage's gradients from a slot to the host store, rounded to the store's gradient dtype.

    It clears the slot first. The deepest layers go first, as the optimizer takes them; a layer's gradients go after
    `layers_final`. `job` is the stage job that makes them; its `parts` are the accesses to their places on the host.
    """

    def __init__(self, worker: "DeviceWorker", job: StageJob, layout: StageLayout) -> None:
        super().__init__(worker, layout.gradients[::-1])  # in the order in which a backward makes them final
        self.job = job
        self.slot = slot = worker.slots.gradients.next(layout.gradient_numel)
        self._landings = worker.setup.landings
        self._rounding = worker.slots.rounding
        self._first_layer = layout.layers.start
        self._first_final = layout.layers.stop
        self._landing: tuple[Tensor, HostBuffer | None] | None = None
        if slot.released is not None:
            self._device.wait(Stream.COMPUTE, slot.released, "a free slot for gradients")
        self._device.run(Stream.COMPUTE, slot.memory.zero_, writes=[slot.memory])

    def layers_final(self, first: int) -> None:
        """Note that the computation enqueued so far is the last that adds to gradients of layer `first` or deeper ones."""
        if first < self._first_final:
            self._first_final = first
            self._device.follow(Stream.GRADIENT_DOWNLOAD, Stream.COMPUTE, "final gradients")

    def finish(self) -> None:
        """Enqueue the rest, waiting for the optimizer if needed, and release the slot."""
        assert self._first_final <= self._first_layer, "the stage's backward has not ended"
        self._enqueue_rest()
        self.slot.released = self._device.record(Stream.GRADIENT_DOWNLOAD, "sent gradients")

    def _may_enqueue(self, slot_range: SlotRange) -> bool:
        return slot_range.layer >= self._first_final and self._access(slot_range).is_ready

    def _access(self, slot_range: SlotRange) -> Access:
        return self.job.parts[slot_range.layer, slot_range.bundle]

    def _enqueue(self, slot_range: SlotRange, numel: int) -> int:
        if self._landing is None:
            self._landing = self._open_landing(slot_range)
        target, buffer = self._landing
        start = self._done_elements
        # The space for rounded elements holds ROUNDING_ELEMENTS.
        stop = min(start + min(numel, ROUNDING_ELEMENTS), slot_range.numel)
        self._copy(target[start:stop], self.slot.memory[slot_range.start + start : slot_range.start + stop])
        if self._move_to(stop):
            access = self._access(slot_range)
            access.buffer.content = buffer
            self._tasks.end(access, self._device.record(Stream.GRADIENT_DOWNLOAD, "a landed gradient"))
            self._landing = None
        return stop - start

    def _open_landing(self, slot_range: SlotRange) -> tuple[Tensor, HostBuffer | None]:
        """Return where a part goes: the bundle's gradient if the part is the whole sum, otherwise a buffer of its own."""
        bundle = self._store.bundles[slot_range.bundle]
        self._tasks.begin(self._access(slot_range))
        if not bundle.adds_up:
            assert bundle.gradient is not None, f"bundle {slot_range.bundle} has no gradient buffer"
            return bundle.gradient, None
        buffer = self._landings.take(bundle)
        # Devices that used the buffer for other things may still read it.
        for event in buffer.busy:
            self._device.wait(Stream.GRADIENT_DOWNLOAD, event, "a free landing buffer")
        return buffer.memory.view(self._store.gradient_dtype), buffer

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._rounding is None:
            self._device.copy(Stream.GRADIENT_DOWNLOAD, target, source)
            return
        # Rounded before the copy, so that fewer bytes cross the link. Both are in one stream: the next
        # chunk's rounding starts only after this chunk has left the rounding space.
        rounded = self._rounding[: source.numel()]
        self._device.run(
            Stream.GRADIENT_DOWNLOAD, partial(rounded.copy_, source), reads=[source], writes=[rounded]
        )
        self._device.copy(Stream.GRADIENT_DOWNLOAD, target, rounded)


class FileReader(Worker):
    """A worker that reads frozen weights in files ahead of a device's uploads, into a ring of page-locked buffers.

    A copy from pageable memory blocks the thread that asks for it until it is over, and a page that is not in memory
    blocks it until the disk has answered. The thread that launches a device's kernels must do neither.

    The reader reads by offset from the file that was opened when the weights were mapped. It never touches the
    map itself: if the file was cut short meanwhile, this gives an error, and the map would end the process.
    """

    def __init__(self, device: Device, tasks: Tasks, pool: HostPool) -> None:
        self._location = FaultLocation(f"reader of device {device.name}")
        super().__init__(f"torchround reads for {device.name}", self._location.actor, tasks)
        ring = [Buffer("buffer of weights in files") for _ in range(READER_BUFFERS)]
        for buffer in ring:
            buffer.content = pool.take(READER_BUFFER_BYTES)
        self._ring = itertools.cycle(ring)

    def request(self, pieces: Sequence[MappedRange], step: int) -> list[Access]:
        """Let these pieces be read, in this order. Returns the access of each one's upload.

        The device's thread calls this, and begins and ends the accesses in turn. It may declare tasks as the controller
        does, because no other thread uses the ring.
        """
        reads, uploads = [], []
        for piece, buffer in zip(pieces, self._ring, strict=False):
            run = partial(self._read, piece, buffer.content)
            read = Task("read of weights in files", step, self._location, run)
            reads.append(self._tasks.declare(read, writes=[buffer]))
            upload = Task("upload of weights in files", step, self._location)
            uploads += self._tasks.declare(upload, reads=[buffer]).accesses
        if reads:
            self.put(reads)
        return uploads

    def _read(self, piece: MappedRange, buffer: HostBuffer) -> None:
        content = buffer.memory[: piece.memory.nbytes]
        self._tasks.board.observer.touched(reads=(), writes=[content])
        read_range(piece, content)


def pieces_of(ranges: Sequence[MappedRange]) -> list[MappedRange]:
    """Cut ranges into pieces that fit into a buffer each."""
    return [
        mapped.part(start, min(start + size, mapped.memory.numel()))
        for mapped in ranges
        for size in [READER_BUFFER_BYTES // mapped.memory.itemsize]
        for start in range(0, mapped.memory.numel(), size)
    ]


def read_range(file_range: MappedRange, content: Tensor) -> None:
    """Read a range of a file into `content`, uint8 of its size. Raises `OSError`, which names the file."""
    file = file_range.file
    assert file is not None, "the range is in memory, not in a file"
    space, begin = content.numpy().data, file_range.begin
    while space:
        try:
            num_read = os.preadv(file.descriptor, [space], begin)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file.path)) from error
        if num_read == 0:
            raise OSError(f"{file.path} was cut short while the run used it: it ends before byte {begin + 1}")
        space, begin = space[num_read:], begin + num_read
