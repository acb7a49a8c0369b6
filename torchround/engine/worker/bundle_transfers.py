"""Chunked transfers of weights and gradients between device slots and the host store.

Transfers advance by one equal chunk in each transfer window, which is one micro-batch of a stage (RoundPipe
paper, section 4.2). The bundle is the unit of every access: it is complete, uploaded or consumed as a
whole.
"""

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor

from torchround.engine.device import Device, Event, Stream
from torchround.engine.landings import Landings
from torchround.engine.passes import StageJob
from torchround.engine.store.bundles import Bundle, MappedRange
from torchround.engine.store.host_memory import HostBuffer
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access, Tasks
from torchround.engine.worker.file_reader import FileReader, pieces_of
from torchround.engine.worker.slots import DeviceSlot, SlotRange, StageLayout
from torchround.planning.memory import ROUNDING_ELEMENTS


class WeightUpload:
    """The upload of one stage's weights into a slot.

    `accesses` are those to trained bundles, by layer and bundle. `version_of` gives the version that a layer reads
    of a bundle; `versions` keeps it by layer and trained bundle. `waited_s` is the host time spent waiting for the
    optimizer to complete them. Weights in files come from `reader`, or straight from their map if there
    is none.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        tasks: Tasks,
        slot: DeviceSlot,
        layout: StageLayout,
        version_of: Callable[[Bundle, int], int],
        accesses: Mapping[tuple[int, int], Access],
        reader: FileReader | None,
    ) -> None:
        self.slot = slot
        self.layout = layout
        self.waited_s = 0.0
        self._device = device
        self._store = store
        self._tasks = tasks
        self.versions = {
            (used.layer, used.bundle): version_of(store.bundles[used.bundle], used.layer)
            for used in layout.weights
            if store.bundles[used.bundle].trainable
        }
        self._accesses = accesses
        self._next_range = 0
        self._done_elements = 0  # of the next range
        # Read before the weights: those that are written later come again.
        self._content = layout, store.refreshes
        if slot.frozen_weights == self._content:
            self._next_range = len(layout.weights)  # they are there since the stage before last
        self._reader = reader
        # By position among the stage's ranges: the pieces that the reader brings.
        self._pieces: dict[int, deque[MappedRange]] = {}
        if reader is not None and not self.complete:
            self._request(reader)
        # The stage before last may still compute with what the slot holds.
        if slot.released is not None:
            device.wait(Stream.WEIGHT_UPLOAD, slot.released, "a free slot for weights")

    def advance(self, numel: int) -> None:
        """Enqueue up to `numel` elements, weights in files by whole buffers.

        Stops at a bundle whose version is not complete yet, and at a buffer that is not full yet.
        """
        while numel > 0 and self._may_advance:
            numel -= self._enqueue(numel)

    def finish(self) -> Event:
        """Enqueue the rest, waiting for versions if needed. Returns the event after which the slot is filled."""
        while not self.complete:
            self._enqueue(self.layout.weight_numel)
        self.slot.frozen_weights = None if self._store.trained else self._content
        return self._device.record(Stream.WEIGHT_UPLOAD, "uploaded weights")

    @property
    def remaining(self) -> int:
        """Count the elements that are not enqueued yet."""
        return sum(left.numel for left in self.layout.weights[self._next_range :]) - self._done_elements

    @property
    def complete(self) -> bool:
        """Whether everything is enqueued."""
        return self._next_range == len(self.layout.weights)

    @property
    def _may_advance(self) -> bool:
        """Whether `advance` would enqueue anything."""
        if self.complete:
            return False
        if self._reader is not None and self._next_range in self._pieces:
            return self._reader.ready
        return self._is_complete(self.layout.weights[self._next_range])

    @property
    def blocked(self) -> bool:
        """Whether `finish` would have to wait for the optimizer."""
        return not self.complete and not all(
            self._is_complete(slot_range) for slot_range in self.layout.weights[self._next_range :]
        )

    def _is_complete(self, slot_range: SlotRange) -> bool:
        """Tell whether the optimizer has completed the weights of a range. Frozen ones always are."""
        access = self._accesses.get((slot_range.layer, slot_range.bundle))
        return access is None or access.is_ready

    def _request(self, reader: FileReader) -> None:
        """Let the reader begin with all weights of the stage that are in files."""
        for position, slot_range in enumerate(self.layout.weights):
            if mapped := self._store.bundles[slot_range.bundle].mapped:
                self._pieces[position] = deque(pieces_of(mapped))
        reader.request([piece for pieces in self._pieces.values() for piece in pieces])

    def _enqueue_piece(self, reader: FileReader, slot_range: SlotRange, pieces: deque[MappedRange]) -> int:
        """Enqueue the next buffer that the reader fills, waiting for it if needed. Returns the number of elements."""
        piece, start = pieces.popleft(), self._done_elements
        content = reader.take().view(piece.memory.dtype)
        target = self.slot.memory[slot_range.start + piece.start :][: content.numel()]
        self._device.copy(Stream.WEIGHT_UPLOAD, target, content)
        reader.uploaded(self._device.record(Stream.WEIGHT_UPLOAD, "an uploaded piece of a file"))
        # Gaps between parameters count as done with the piece before them.
        stop = pieces[0].start if pieces else slot_range.numel
        if pieces:
            self._done_elements = stop
        else:
            self._next_range, self._done_elements = self._next_range + 1, 0
        return stop - start

    def _enqueue(self, numel: int) -> int:
        slot_range = self.layout.weights[self._next_range]
        if self._reader is not None and self._next_range in self._pieces:
            return self._enqueue_piece(self._reader, slot_range, self._pieces[self._next_range])
        bundle = self._store.bundles[slot_range.bundle]
        version = self.versions.get((slot_range.layer, slot_range.bundle), 0)
        access = self._accesses.get((slot_range.layer, slot_range.bundle))
        # Once per bundle: when its first chunk may go, so may the others. Frozen weights are never written.
        if access is not None and self._done_elements == 0:
            start_s = time.perf_counter()
            self._tasks.begin(access)
            self.waited_s += time.perf_counter() - start_s
        start, stop = self._done_elements, min(self._done_elements + numel, slot_range.numel)
        # Several sources if the weights are mapped from files, one tensor each.
        for source in bundle.sources(version, start, stop):
            target = self.slot.memory[slot_range.start + source.start :][: source.memory.numel()]
            self._device.copy(Stream.WEIGHT_UPLOAD, target, source.memory)
        self._done_elements = stop
        if stop == slot_range.numel:
            self._next_range, self._done_elements = self._next_range + 1, 0
            # Per bundle, not per stage: the optimizer may overwrite this version as soon as it has gone up.
            if access is not None:
                self._tasks.end(access, self._device.record(Stream.WEIGHT_UPLOAD, "an uploaded version"))
        return stop - start


class GradientDownload:
    """The download of one stage's gradients from a slot to the host store, rounded to the store's gradient dtype.

    The deepest layers go first, as the optimizer takes them; a layer's gradients go after `layers_final`.
    `job` is the stage job that made them; its `parts` are the accesses to their places on the host. `rounding` is device memory for rounded elements, None if
    slots have the store's gradient dtype.
    """

    def __init__(
        self,
        device: Device,
        store: HostStore,
        tasks: Tasks,
        landings: Landings,
        rounding: Tensor | None,
        slot: DeviceSlot,
        layout: StageLayout,
        job: StageJob,
    ) -> None:
        self.job = job
        self._device = device
        self._store = store
        self._tasks = tasks
        self._landings = landings
        self._rounding = rounding
        self._slot = slot
        # In the order in which a backward makes them final.
        self._ranges = layout.gradients[::-1]
        self._first_layer = layout.layers.start
        self._first_final = layout.layers.stop
        self._next_range = 0
        self._done_elements = 0  # of the next range
        self._landing: tuple[Tensor, HostBuffer | None] | None = None

    def layers_final(self, first: int) -> None:
        """Note that the computation enqueued so far is the last that adds to gradients of layer `first` or deeper ones."""
        if first < self._first_final:
            self._first_final = first
            self._device.follow(Stream.GRADIENT_DOWNLOAD, Stream.COMPUTE, "final gradients")

    def advance(self, numel: int) -> None:
        """Enqueue up to `numel` elements.

        Stops at a gradient that is not final, or whose buffer the optimizer still reads.
        """
        while numel > 0 and not self.complete and self._may_download():
            numel -= self._enqueue(numel)

    def finish(self) -> None:
        """Enqueue the rest, waiting for the optimizer if needed, and release the slot."""
        assert self._first_final <= self._first_layer, "the stage's backward has not ended"
        while not self.complete:
            self._enqueue(self.remaining)
        self._slot.released = self._device.record(Stream.GRADIENT_DOWNLOAD, "sent gradients")

    @property
    def remaining(self) -> int:
        """Count the elements that are not enqueued yet."""
        return sum(left.numel for left in self._ranges[self._next_range :]) - self._done_elements

    @property
    def complete(self) -> bool:
        """Whether everything is enqueued."""
        return self._next_range == len(self._ranges)

    def _may_download(self) -> bool:
        slot_range = self._ranges[self._next_range]
        return slot_range.layer >= self._first_final and self._access(slot_range).is_ready

    def _access(self, slot_range: SlotRange) -> Access:
        return self.job.parts[slot_range.layer, slot_range.bundle]

    def _enqueue(self, numel: int) -> int:
        slot_range = self._ranges[self._next_range]
        if self._landing is None:
            self._landing = self._open_landing(slot_range)
        target, buffer = self._landing
        start = self._done_elements
        # The space for rounded elements holds ROUNDING_ELEMENTS.
        stop = min(start + min(numel, ROUNDING_ELEMENTS), slot_range.numel)
        self._copy(target[start:stop], self._slot.memory[slot_range.start + start : slot_range.start + stop])
        self._done_elements = stop
        if stop == slot_range.numel:
            access = self._access(slot_range)
            access.buffer.content = buffer
            self._tasks.end(access, self._device.record(Stream.GRADIENT_DOWNLOAD, "a landed gradient"))
            self._next_range, self._done_elements, self._landing = self._next_range + 1, 0, None
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
