"""Copies between a device's slots and the host: weights and gradients in chunks, activations one by one.

Chunked transfers advance by one equal chunk in each transfer window, which is one micro-batch of a stage (RoundPipe
paper, section 4.2). The bundle is the unit of every access: it is complete, uploaded or consumed as a whole.

A boundary activation is kept in a pool buffer on the host, from the stage that made it to the last stage that
reads it. So is what layers keep for their backward (`torchround/keeping.py`), which comes up ahead of its use. All that
a layer keeps of a micro-batch travels as one.
"""

import itertools
import os
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from torchround.engine.board import Value
from torchround.engine.buffer_reservation import PassShape
from torchround.engine.device import Event, Stream
from torchround.engine.errors import FaultLocation
from torchround.engine.passes import HostTensors, Pass, StageJob
from torchround.engine.store.host_memory import HostBuffer
from torchround.engine.tasks import Access, Buffer, Task, Worker
from torchround.engine.worker.slots import (
    DeviceSlot,
    Packing,
    SlotRange,
    SlotRing,
    StageLayout,
    fill,
    flatten,
    unflatten,
)
from torchround.layer import Batch, FileTensor, Hidden, aligned
from torchround.planning.host_buffers import LOSS_BYTES, restarted_layers
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS, ROUNDING_ELEMENTS
from torchround.planning.partition import StageKind

if TYPE_CHECKING:
    from torchround.engine.worker.device_worker import DeviceWorker


class Piece(NamedTuple):
    """Elements of a stage's slot, from `start` on, which move between the beginning and the end of an access.

    `source` is the host memory of weights. Frozen weights in memory have no access, because nothing writes them. `what`
    names the event after which they have moved.
    """

    used: SlotRange
    start: int
    numel: int
    access: Access | None
    what: str
    source: Tensor | None = None


class BundleTransfer(ABC):
    """A transfer of a stage's weights or gradients, piece by piece in chunks, beside the stream of `activations`."""

    stream: Stream
    activations: Stream

    def __init__(self, worker: "DeviceWorker", slot: DeviceSlot, pieces: Iterable[Piece]) -> None:
        self.slot = slot
        self._device = worker.device
        self._board = worker.board
        self._pieces = deque(pieces)
        self._done = 0  # elements of the first piece
        self.remaining = sum(piece.numel for piece in self._pieces)  # elements that are not enqueued yet

    def advance(self, windows: int = 1, waits: bool = False) -> None:
        """Enqueue what is left, or an equal part of it for each of so many transfer windows.

        Unless it `waits`, stops at a piece that has to wait for another thread.
        """
        # A chunk queues behind the activations already on their way. It has until the end of the stage, but a computation
        # waits for each activation. Chunks of one window's size keep an activation from waiting for a whole stage's
        # weights.
        if self._pieces and not waits:
            self._device.follow(self.stream, self.activations, "activations on their way")
        numel = -(-self.remaining // windows)
        while self._pieces and (numel > 0 or waits):
            piece, start = self._pieces[0], self._done
            if start == 0:
                if not waits and not self._is_ready(piece):
                    return
                self._begin(piece)
            stop = self._done = min(start + numel, piece.numel)
            self._copy(piece, start, stop)
            self.remaining -= stop - start
            numel -= stop - start
            if stop == piece.numel:
                self._pieces.popleft()
                self._done = 0
                if piece.access is not None:
                    piece.access.end(self._board, self._device.record(self.stream, piece.what))

    def _is_ready(self, piece: Piece) -> bool:
        return piece.access is None or piece.access.is_ready

    @abstractmethod
    def _begin(self, piece: Piece) -> None:
        """Wait until the piece may be moved."""

    @abstractmethod
    def _copy(self, piece: Piece, start: int, stop: int) -> None:
        """Enqueue the copy of elements `[start, stop)` of a piece."""


class WeightUpload(BundleTransfer):
    """The upload of one stage's weights into a slot.

    `waited_s` is the host time spent waiting for the optimizer to complete them. Weights in files come from the worker's
    reader, or straight from their map if there is none.
    """

    stream, activations = Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD

    def __init__(self, worker: "DeviceWorker", job: StageJob) -> None:
        self.layout = layout = worker.slots.layout(job.task.stage)
        self.waited_s = 0.0
        self._store = worker.setup.store
        self._flush = worker.flush
        slot = worker.slots.weights.next(layout.weight_numel)
        # Read before the weights: those that are written later come again.
        self._content = layout, self._store.refreshes
        is_filled = slot.frozen_weights == self._content  # since the stage before last
        super().__init__(worker, slot, () if is_filled else self._make_pieces(job, worker.reader))
        # The stage before last may still compute with what the slot holds.
        if slot.released is not None:
            self._device.wait(self.stream, slot.released, "a free slot for weights")

    def _make_pieces(self, job: StageJob, reader: "FileReader | None") -> Iterator[Piece]:
        for used in self.layout.weights:
            bundle, version = used.bundle, 0
            if bundle.mapped and reader is not None:
                yield from reader.request(used, job.pass_.step)
                continue
            if bundle.trainable:
                version = job.pass_.version_read(bundle, used.layer, job.task)
            # Several sources if the weights are mapped from files, one tensor each.
            for start, source in bundle.sources(version):
                # Each bundle has an event: the optimizer may overwrite the version as soon as it has gone up.
                access, what = job.uploads.get(used.use), "an uploaded version"
                yield Piece(used, used.start + start, source.numel(), access, what, source)

    def finish(self) -> Event:
        """Enqueue the rest, waiting for versions if needed. Returns the event after which the slot is filled."""
        self.advance(waits=True)
        self.slot.frozen_weights = None if self._store.trained else self._content
        return self._device.record(self.stream, "uploaded weights")

    def _begin(self, piece: Piece) -> None:
        if piece.access is not None:
            # An update may need this device's last gradients; and they need not wait for a disk.
            if not piece.access.is_ready:
                self._flush()
            start_s = time.perf_counter()
            piece.access.begin(self._board)
            if piece.used.bundle.trainable:
                self.waited_s += time.perf_counter() - start_s

    def _copy(self, piece: Piece, start: int, stop: int) -> None:
        assert piece.source is not None, "weights come from host memory"
        target = self.slot.memory[piece.start + start : piece.start + stop]
        self._device.copy(self.stream, target, piece.source[start:stop])


class GradientDownload(BundleTransfer):
    """The download of one stage's gradients from a slot to the host store, rounded to the store's gradient dtype.

    It clears the slot first. The deepest layers go first, as the optimizer takes them; a layer's gradients go after
    `layers_final`. `job` is the stage job that makes them; its `parts` are the accesses to their places on the host.
    """

    stream, activations = Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD

    def __init__(self, worker: "DeviceWorker", job: StageJob, layout: StageLayout) -> None:
        pieces = (
            Piece(used, used.start, used.bundle.numel, job.parts[used.use], "a landed gradient")
            for used in reversed(layout.gradients)  # in the order in which a backward makes them final
        )
        super().__init__(worker, worker.slots.gradients.next(layout.gradient_numel), pieces)
        self.job = job
        self._dtype = worker.setup.store.gradient_dtype
        self._rounding = worker.slots.rounding
        self._first_final = layout.layers.stop
        self._target: Tensor | None = None  # of the first piece
        if self.slot.released is not None:
            self._device.wait(Stream.COMPUTE, self.slot.released, "a free slot for gradients")
        self._device.run(Stream.COMPUTE, self.slot.memory.zero_, writes=[self.slot.memory])

    def layers_final(self, first: int) -> None:
        """Note that the computation enqueued so far is the last that adds to gradients of layer `first` or deeper ones."""
        if first < self._first_final:
            self._first_final = first
            self._device.follow(self.stream, Stream.COMPUTE, "final gradients")

    def finish(self) -> None:
        """Enqueue the rest, waiting for the optimizer if needed, and release the slot."""
        assert self._first_final <= self.job.task.stage.start, "the stage's backward has not ended"
        self.advance(waits=True)
        self.slot.released = self._device.record(self.stream, "sent gradients")

    def _is_ready(self, piece: Piece) -> bool:
        return piece.used.layer >= self._first_final and super()._is_ready(piece)

    def _begin(self, piece: Piece) -> None:
        """Choose where a part goes: the bundle's gradient if the part is the whole sum, otherwise a buffer of its own."""
        assert piece.access is not None, "a gradient has a place on the host"
        piece.access.begin(self._board)
        self._target = piece.used.bundle.gradient
        if piece.used.bundle.adds_up:
            self._target = piece.access.buffer.content.memory.view(self._dtype)

    def _copy(self, piece: Piece, start: int, stop: int) -> None:
        assert self._target is not None, f"bundle {piece.used.bundle.index} has no gradient buffer"
        target = self._target[start:stop]
        source = self.slot.memory[piece.start + start : piece.start + stop]
        if self._rounding is None:
            self._device.copy(self.stream, target, source)
            return
        # Rounded before the copy, so that fewer bytes cross the link. Both are in one stream: the next part's rounding
        # starts only after this part has left the rounding space.
        for part, exact in zip(target.split(ROUNDING_ELEMENTS), source.split(ROUNDING_ELEMENTS), strict=True):
            rounded = self._rounding[: exact.numel()]
            self._device.run(self.stream, partial(rounded.copy_, exact), reads=[exact], writes=[rounded])
            self._device.copy(self.stream, part, rounded)


class FileReader(Worker):
    """A worker that reads frozen weights in files ahead of a device's uploads, into a ring of page-locked buffers.

    A copy from pageable memory blocks the thread that asks for it until it is over, and a page that is not in memory
    blocks it until the disk has answered. The thread that launches a device's kernels must do neither.

    The reader reads by offset from the file that was opened when the weights were mapped. It never touches the
    map itself: if the file was cut short meanwhile, this gives an error, and the map would end the process.
    """

    def __init__(self, worker: "DeviceWorker") -> None:
        self._location = FaultLocation(f"reader of device {worker.device.name}")
        name, pool = f"torchround reads for {worker.device.name}", worker.setup.pool
        super().__init__(name, self._location.actor, worker.board)
        ring = [Buffer("buffer of weights in files") for _ in range(READER_BUFFERS)]
        for buffer in ring:
            buffer.content = pool.take(READER_BUFFER_BYTES)
        self._ring = itertools.cycle(ring)

    def request(self, used: SlotRange, step: int) -> list[Piece]:
        """Let the weights of a bundle in files be read, in their order. Returns the pieces to upload, a buffer each.

        The device's thread calls this, and begins and ends the accesses in turn. It may declare tasks as the controller
        does, because no other thread uses the ring.
        """
        reads, pieces = [], []
        for first, mapped in used.bundle.mapped:
            size = READER_BUFFER_BYTES // mapped.memory.itemsize
            for start in range(0, mapped.memory.numel(), size):
                memory = mapped.memory[start : start + size]
                part = replace(mapped, memory=memory, begin=mapped.begin + start * memory.itemsize)
                buffer = next(self._ring)
                run = partial(self._read, part, buffer.content)
                read = Task("read of weights in files", step, self._location, run)
                reads.append(read.declare(writes=[buffer]))
                upload = Task("upload of weights in files", step, self._location)
                [access] = upload.declare(reads=[buffer]).accesses
                source = buffer.content.memory[: memory.nbytes].view(memory.dtype)
                place, what = used.start + first + start, "an uploaded piece of a file"
                pieces.append(Piece(used, place, source.numel(), access, what, source))
        if reads:
            self.put(reads)
        return pieces

    def _read(self, part: FileTensor, buffer: HostBuffer) -> None:
        """Read a range of a file into a buffer. Raises `OSError`, which names the file."""
        content = buffer.memory[: part.memory.nbytes]
        self._board.observer.touched(reads=(), writes=[content])
        space, begin = content.numpy().data, part.begin
        while space:
            try:
                num_read = os.preadv(part.descriptor, [space], begin)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(part.path)) from error
            if num_read == 0:
                raise OSError(
                    f"{part.path} was cut short while the run used it: it ends before byte {begin + 1}"
                )
            space, begin = space[num_read:], begin + num_read


# Kept activations of a stage for one micro-batch, by layer, and the slot that holds them after the event.
BroughtUp = tuple[dict[int, tuple[Tensor, ...]], DeviceSlot, Event]


class ActivationTransfers:
    """The transfers of one device's activations.

    What is brought up is valid until `end_micro_batch`, on the compute stream. `inputs` are the slots that hold it.
    `bring` fills those of the three public rings.
    """

    def __init__(self, worker: "DeviceWorker") -> None:
        self._device = device = worker.device
        self._board = worker.board
        self._wait = worker.wait
        self._pool = worker.setup.pool
        self._sizes = worker.setup.sizes
        self.hidden_in, self.gradients_in, self._kept_in = (SlotRing(device) for _ in range(3))
        self._out, self._kept_out = SlotRing(device), SlotRing(device)
        # By position in the round: space for a micro-batch's integers, and the micro-batch whose integers it holds.
        self._integers = SlotRing(device, depth=0)
        self._micro_batches: dict[int, tuple[HostTensors, Batch]] = {}
        # For inputs of layers inside a stage, of two micro-batches: one computes while those of the next one arrive.
        self.restarts_in = SlotRing(device, depth=0)
        self._ahead: BroughtUp | None = None  # of the next micro-batch
        self.inputs: list[DeviceSlot] = []

    def prepare(self, shape: PassShape) -> None:
        """Allocate now everything that passes of a shape need, instead of each buffer at its first use.

        Each buffer has its largest size at once: memory of one that is replaced is not used again.
        """

        def largest(cuts: Iterable[int]) -> int:
            sizes = (self._sizes.boundary(cut, one) for cut in cuts for one in shapes)
            return max(sizes, default=0)

        shapes = set(shape.shapes)
        boundary_bytes = largest(shape.cuts)
        output_bytes = largest([self._sizes.num_layers]) if shape.gives_outputs else 0
        # What the layers of each backward stage keep.
        kept = [
            [self._sizes.kept(layer, one) for layer in range(stage.start, stage.stop)]
            for stage in shape.stages
            if stage.kind is StageKind.BACKWARD
            for one in shapes
        ]
        for position in range(max(map(len, shape.rounds))):
            self._integers.at(position, max(shape.integer_bytes))
        for position in range(2 * max(len(restarted_layers(s, shape.stale_layers)) for s in shape.stages)):
            self.restarts_in.at(position, boundary_bytes)
        if boundary_bytes:
            self.hidden_in.reserve(boundary_bytes)
            if shape.training:
                self.gradients_in.reserve(boundary_bytes)
        self._out.reserve(max(boundary_bytes, output_bytes, aligned(LOSS_BYTES)))
        if kept_bytes := max(map(sum, kept), default=0):
            self._kept_out.reserve(max(map(max, kept)))
            self._kept_in.reserve(kept_bytes)

    # Up.

    def bring_micro_batch(self, integers: HostTensors, position: int) -> Batch:
        """Upload a micro-batch's integers, once per round: later stages of the round on this device find them there.

        `position` is the micro-batch's position in its round.
        """
        slot = self._integers.at(position, integers.packing.nbytes)
        cached = self._micro_batches.get(position)
        if cached is None or cached[0] is not integers:
            assert integers.rebuild is not None, "only a micro-batch's tensors are uploaded here"
            self._device.wait(Stream.COMPUTE, self._upload([integers], slot), "an uploaded input")
            [tensors] = slot.views([integers.packing])
            cached = self._micro_batches[position] = integers, integers.rebuild(tensors)
        self.inputs.append(slot)
        return cached[1]

    def bring(self, value: HostTensors, ring: SlotRing) -> Hidden:
        """Upload a stage's input through a ring, or the gradients of its output."""
        slot = ring.next(value.packing.nbytes)
        self._device.wait(Stream.COMPUTE, self._upload([value], slot), "an uploaded input")
        self.inputs.append(slot)
        return unflatten(slot.views([value.packing])[0], value.packing.structure)

    def bring_kept(self, pass_: Pass, layers: Iterable[int], m: int) -> dict[int, tuple[Tensor, ...]]:
        """Bring up what the layers keep of micro-batch `m`, unless that is done."""
        brought, self._ahead = self._ahead, None
        if brought is None:
            brought = self._upload_kept({layer: self._wait(pass_.kept.at(layer, m)) for layer in layers})
        if brought is None:
            return {}
        tensors, slot, uploaded = brought
        self._device.wait(Stream.COMPUTE, uploaded, "an uploaded input")
        self.inputs.append(slot)
        return tensors

    def bring_kept_ahead(self, pass_: Pass, layers: Iterable[int], m: int) -> None:
        """Begin to bring up what the layers keep of the next micro-batch, unless it is still to be sent.

        Call this after the gradient of the present micro-batch is brought up. These copies wait until the micro-batch
        before has left their slot, and would hold up a gradient in the queue behind them.
        """
        values = {layer: pass_.kept.at(layer, m) for layer in layers}
        # Never waits: other devices may need what this thread sends first.
        if all(value.happened for value in values.values()):
            self._ahead = self._upload_kept({i: self._board.wait(value) for i, value in values.items()})

    def _upload_kept(self, found: dict[int, HostTensors | None]) -> BroughtUp | None:
        """Copy all that a stage's layers keep of a micro-batch into one slot. None if that is nothing."""
        kept = {layer: value for layer, value in found.items() if value is not None}
        if not kept:
            return None
        packings = [value.packing for value in kept.values()]
        slot = self._kept_in.next(sum(packing.nbytes for packing in packings))
        uploaded = self._upload(list(kept.values()), slot)
        return dict(zip(kept, slot.views(packings), strict=True)), slot, uploaded

    def _upload(self, values: Sequence[HostTensors], slot: DeviceSlot) -> Event:
        """Copy values one after the other into a slot. Returns the event after which they are there."""
        device, start = self._device, 0
        if slot.released is not None:
            device.wait(Stream.ACTIVATION_UPLOAD, slot.released, "a free slot for an input")
        for value in values:
            device.wait(Stream.ACTIVATION_UPLOAD, value.landed, "an input in host memory")
            stop = start + value.packing.nbytes
            device.copy(Stream.ACTIVATION_UPLOAD, slot.memory[start:stop], value.memory)
            start = stop
        uploaded = device.record(Stream.ACTIVATION_UPLOAD, "an uploaded input")
        # As soon as the copies are enqueued: the next writer of a buffer waits for `uploaded`, not for this stage.
        for value in values:
            value.reader_ends(uploaded, self._pool)
        return uploaded

    def end_micro_batch(self) -> None:
        """Note that nothing more will read what was brought up for the micro-batch."""
        read = self._device.record(Stream.COMPUTE, "inputs that are read")
        for slot in self.inputs:
            slot.released = read
        self.inputs.clear()

    # Down.

    def send(
        self,
        value: Value[HostTensors],
        hidden: Hidden,
        readers: int = 1,
        cut: int = 0,
        shape: torch.Size | None = None,
    ) -> None:
        """Copy tensors to the host and post them for `readers` readers.

        If they are the input of layer `cut` for a micro-batch of `shape`, or its gradient, their bytes are measured.
        """
        tensors, structure = flatten(hidden)
        packing = Packing.of(tensors, structure)
        nbytes = self._sizes.met(cut, shape, packing.nbytes) if shape else packing.nbytes
        # Posted when enqueued, not when landed: the reader's stream waits for `landed`, its thread for nothing.
        self._board.post(value, self._send(self._out, tensors, packing, readers, nbytes))

    def send_kept(
        self, value: Value[HostTensors | None], kept: Sequence[Tensor], layer: int, shape: torch.Size
    ) -> None:
        """Copy what a layer keeps of a micro-batch of `shape` `[B, T]` to the host, and post it."""
        packing = Packing.of(kept)
        nbytes = self._sizes.buffer_for_kept(layer, shape, packing)
        sent = None if nbytes is None else self._send(self._kept_out, kept, packing, 1, nbytes)
        self._board.post(value, sent)

    def _send(
        self, ring: SlotRing, tensors: Sequence[Tensor], packing: Packing, readers: int, buffer_bytes: int
    ) -> HostTensors:
        """Copy tensors through a ring into a buffer of the pool of at least `buffer_bytes`."""
        device = self._device
        slot = ring.next(packing.nbytes)
        if slot.released is not None:
            device.wait(Stream.COMPUTE, slot.released, "a free slot to pack into")
        # Packed into a slot on the compute stream: the tensors belong to PyTorch's allocator, which may give
        # their memory to the next computation while a copy on another stream still reads it.
        addresses = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        device.run(
            Stream.COMPUTE,
            partial(fill, slot.views([packing])[0], tensors),
            # A layer may pass a part of its input on unchanged.
            reads=[one.memory for one in self.inputs if one.memory.untyped_storage().data_ptr() in addresses],
            writes=[slot.memory],
        )
        device.follow(Stream.ACTIVATION_DOWNLOAD, Stream.COMPUTE, "packed tensors")
        buffer = self._pool.take(max(packing.nbytes, buffer_bytes))
        # Devices that used the buffer for something else may still read it.
        for event in buffer.busy:
            device.wait(Stream.ACTIVATION_DOWNLOAD, event, "a free host buffer")
        nbytes = packing.nbytes
        device.copy(Stream.ACTIVATION_DOWNLOAD, buffer.memory[:nbytes], slot.memory[:nbytes])
        landed = slot.released = device.record(Stream.ACTIVATION_DOWNLOAD, "sent tensors")
        return HostTensors(buffer, packing, landed, readers)
