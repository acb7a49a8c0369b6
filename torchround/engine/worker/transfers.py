"""Copies between a device's slots and the host: weights and gradients in chunks, activations one by one.

Chunked transfers advance by one equal chunk in each transfer window, which is one micro-batch of a stage (RoundPipe
paper, section 4.2). The bundle is the unit of every access: it is complete, uploaded or consumed as a whole.

A boundary activation is in a pool buffer on the host, from the stage that made it to the last stage that reads it. So is
what layers keep for their backward (`torchround/keeping.py`): all that a layer keeps of a micro-batch travels as one.
"""

import itertools
import os
import time
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
    ExpertUploads,
    Packing,
    SlotRange,
    SlotRing,
    StageLayout,
    fill,
    flatten,
    unflatten,
)
from torchround.layer import Batch, FileTensor, Hidden, aligned
from torchround.planning.host_buffers import LOSS_BYTES, forward_inputs, kept_cuts, restarted_layers
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS, ROUNDING_ELEMENTS
from torchround.planning.partition import StageKind

if TYPE_CHECKING:
    from torchround.engine.worker.device_worker import DeviceWorker


class Piece(NamedTuple):
    """The copy of weights or gradients between the beginning and the end of an access.

    Frozen weights in memory have no access, because nothing writes them. `what` names the event after the copy.
    """

    used: SlotRange
    source: Tensor
    target: Tensor | None
    access: Access | None
    what: str


# The choices of a token in the usual mixtures. With as many choices as experts, even routing leaves a third untouched.
EXPERTS_PER_TOKEN = 8


class BundleTransfer:
    """A transfer of a stage's weights or gradients, piece by piece in chunks, beside the stream of `activations`."""

    stream: Stream
    activations: Stream

    def __init__(
        self, worker: "DeviceWorker", job: StageJob, slot: DeviceSlot, pieces: Iterable[Piece]
    ) -> None:
        self.job = job
        self.slot = slot
        self._device = worker.device
        self._board = worker.board
        self._pieces = deque(pieces)
        self._done = 0  # elements of the first piece
        # Elements that are not enqueued yet.
        self.remaining = sum(piece.source.numel() for piece in self._pieces)

    def advance(self, windows: int = 1, waits: bool = False) -> None:
        """Enqueue the rest, or an equal part for each window. Unless it `waits`, stop at a piece that has to wait."""
        self._device.step_of[self.stream] = self.job.traced_step
        # A chunk queues behind the activations already on their way: a computation waits for each of those. Chunks of one
        # window's size keep an activation from waiting for a whole stage's weights.
        if self._pieces and not waits:
            self._device.follow(self.stream, self.activations, "activations on their way")
        numel = -(-self.remaining // windows)
        while self._pieces and (numel > 0 or waits):
            piece, start = self._pieces[0], self._done
            if start == 0:
                if not waits and not self._is_ready(piece):
                    return
                piece = self._pieces[0] = self._begin(piece)
            stop = self._done = min(start + numel, piece.source.numel())
            assert piece.target is not None, f"bundle {piece.used.bundle.index} has no gradient buffer"
            self._copy(piece.target[start:stop], piece.source[start:stop])
            self.remaining -= stop - start
            numel -= stop - start
            if stop == piece.source.numel():
                self._pieces.popleft()
                self._done = 0
                if piece.access is not None:
                    piece.access.end(self._board, self._device.record(self.stream, piece.what))

    def _is_ready(self, piece: Piece) -> bool:
        return piece.access is None or piece.access.is_ready

    def _begin(self, piece: Piece) -> Piece:
        if piece.access is not None:
            piece.access.begin(self._board)
        return piece

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._device.copy(self.stream, target, source)


class WeightUpload(BundleTransfer):
    """The upload of one stage's weights into a slot. Those in files come from the worker's reader, or else from their map.

    `waited_s` is the host time spent waiting for the optimizer to complete them.
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
        if not is_filled:
            slot.experts = self._by_need(worker, job, slot.memory)
        super().__init__(worker, job, slot, () if is_filled else self._make_pieces(job, worker.reader, slot))
        # The stage before last may still compute with what the slot holds.
        self._device.wait(self.stream, slot.released, "a free slot for weights")

    def _by_need(
        self, worker: "DeviceWorker", job: StageJob, memory: Tensor
    ) -> dict[tuple[int, int], ExpertUploads]:
        """Choose the stacks whose experts come up when a layer asks for them, by layer and bundle."""
        settings, found = worker.setup.settings, {}
        if settings.compiler is not None or not settings.experts_by_need:
            return {}
        num_tokens = sum(job.pass_.shape.shapes[m].numel() for m in job.task.micro_batches)
        for used in self.layout.weights:
            bundle = used.bundle
            if bundle.packed is None or not bundle.packed.by_matrix or bundle.mapped:
                continue
            num_experts = bundle.parameters[0].shape[0]
            if settings.experts_by_need is True or num_tokens * EXPERTS_PER_TOKEN <= num_experts:
                # `.data`: autograd need not know that other parts of the slot are written.
                target = bundle.place(memory[used.start : used.start + bundle.numel].data)
                source = bundle.place(bundle.version(0))
                found[used.use] = ExpertUploads(worker.device, source, target, num_experts)
        return found

    def _make_pieces(self, job: StageJob, reader: "FileReader | None", slot: DeviceSlot) -> Iterator[Piece]:
        for used in self.layout.weights:
            bundle, version = used.bundle, 0
            place = slot.memory[used.start : used.start + bundle.numel]
            if used.use in slot.experts:
                continue
            if bundle.mapped and reader is not None:
                yield from reader.request(used, place, job.pass_.step)
                continue
            if bundle.trainable:
                version = job.pass_.version_read(bundle, used.layer, job.task)
            # Several sources if the weights are mapped from files, one tensor each.
            for start, source in bundle.sources(version):
                # Each bundle has an event: the optimizer may overwrite the version as soon as it has gone up.
                access, what = job.uploads.get(used.use), "an uploaded version"
                yield Piece(used, source, place[start : start + source.numel()], access, what)

    def finish(self) -> Event:
        """Enqueue the rest, waiting for versions if needed. Returns the event after which the slot is filled."""
        self.advance(waits=True)
        self.slot.frozen_weights = None if self._store.trained else self._content
        return self._device.record(self.stream, "uploaded weights")

    def _begin(self, piece: Piece) -> Piece:
        # An update may need this device's last gradients; and they need not wait for a disk.
        if not self._is_ready(piece):
            self._flush()
        start_s = time.perf_counter()
        super()._begin(piece)
        if piece.used.bundle.trainable:
            self.waited_s += time.perf_counter() - start_s
        return piece


class GradientDownload(BundleTransfer):
    """The download of one stage's gradients from a slot to the host store, rounded to the store's dtype.

    It clears the slot first. The deepest layers go first, as the optimizer takes them, each after `layers_final`.
    """

    stream, activations = Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD

    def __init__(self, worker: "DeviceWorker", job: StageJob, layout: StageLayout) -> None:
        self._rounding = worker.slots.rounding
        self._dtype = worker.setup.store.dtype
        self._first_final = layout.layers.stop
        slot = worker.slots.gradients.next(layout.gradient_numel)
        pieces = []
        for used in reversed(layout.gradients):  # in the order in which a backward makes them final
            source = slot.memory[used.start : used.start + used.bundle.numel]
            access = job.parts[used.use]
            pieces.append(Piece(used, source, used.bundle.gradient, access, "a landed gradient"))
        super().__init__(worker, job, slot, pieces)
        self._device.wait(Stream.COMPUTE, slot.released, "a free slot for gradients")
        self._device.run(Stream.COMPUTE, slot.memory.zero_, writes=[slot.memory])

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

    def _begin(self, piece: Piece) -> Piece:
        super()._begin(piece)
        if piece.access is None or not piece.used.bundle.adds_up:
            return piece
        # A buffer of its own, because the part is not the bundle's whole gradient.
        return piece._replace(target=piece.access.buffer.content.memory.view(self._dtype))

    def _copy(self, target: Tensor, source: Tensor) -> None:
        if self._rounding is None:
            super()._copy(target, source)
            return
        # Rounded before the copy, so that fewer bytes cross the link. Both are in one stream: the next part's rounding
        # starts only after this part has left the rounding space.
        for part, exact in zip(target.split(ROUNDING_ELEMENTS), source.split(ROUNDING_ELEMENTS), strict=True):
            rounded = self._rounding[: exact.numel()]
            self._device.run(self.stream, partial(rounded.copy_, exact), reads=[exact], writes=[rounded])
            super()._copy(part, rounded)


class FileReader(Worker):
    """A worker that reads frozen weights in files ahead of a device's uploads, into a ring of page-locked buffers.

    A copy from pageable memory blocks the thread that asks for it until it is over, and a page that is not in memory
    blocks it until the disk has answered. The thread that launches a device's kernels must do neither. The reader never
    touches the map: if the file was cut short meanwhile, reading gives an error, and the map would end the process.
    """

    def __init__(self, worker: "DeviceWorker") -> None:
        self._location = FaultLocation(f"reader of device {worker.device.name}")
        name, pool = f"torchround reads for {worker.device.name}", worker.setup.pool
        super().__init__(name, self._location.actor, worker.board)
        lent = pool.lend([READER_BUFFER_BYTES] * READER_BUFFERS)
        self._ring = itertools.cycle([Buffer("buffer of weights in files", content=part) for part in lent])

    def request(self, used: SlotRange, place: Tensor, step: int) -> list[Piece]:
        """Let the weights of a bundle in files be read, in their order. Returns the pieces to upload, a buffer each.

        `place` is the bundle's range of a slot. The device's thread calls this, and begins and ends the accesses in turn.
        It may declare tasks as the controller does, because no other thread uses the ring.
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
                target = place[first + start : first + start + source.numel()]
                pieces.append(Piece(used, source, target, access, "an uploaded piece of a file"))
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


class ActivationTransfers:
    """The transfers of one device's activations. `inputs` are the slots of what is brought up, until `end_micro_batch`."""

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
        # Kept activations of the next micro-batch by layer, the slot that they fill, and the event after which it has them.
        self._ahead: tuple[dict[int, HostTensors], DeviceSlot, Event] | None = None
        self.inputs: list[DeviceSlot] = []

    def prepare(self, shape: PassShape) -> None:
        """Allocate now what passes of a shape need, in its largest size: memory that is replaced is not used again."""
        sizes, shapes = self._sizes, set(shape.shapes)
        cuts = forward_inputs(shape.stages) | kept_cuts(shape.stages, shape.stale_layers)
        boundary_bytes = max((sizes.boundary(cut, one) for cut in cuts for one in shapes), default=0)
        output_bytes = max(sizes.boundary(sizes.num_layers, one) * shape.gives_outputs for one in shapes)
        # What the layers of each backward stage keep.
        kept = [
            [sizes.kept(layer, one) for layer in range(stage.start, stage.stop)]
            for stage in shape.stages
            if stage.kind is StageKind.BACKWARD
            for one in shapes
        ]
        for position in range(max(map(len, shape.rounds))):
            self._integers.at(position, max(shape.integer_bytes))
        for position in range(2 * max(len(restarted_layers(s, shape.stale_layers)) for s in shape.stages)):
            self.restarts_in.at(position, boundary_bytes)
        self.hidden_in.reserve(boundary_bytes)
        self.gradients_in.reserve(boundary_bytes if shape.training else 0)
        self._out.reserve(max(boundary_bytes, output_bytes, aligned(LOSS_BYTES)))
        self._kept_out.reserve(max(map(max, kept), default=0))
        self._kept_in.reserve(max(map(sum, kept), default=0))

    # Up.

    def bring_micro_batch(self, integers: HostTensors, position: int) -> Batch:
        """Upload the integers of the micro-batch at a position of its round, once for all its stages on this device."""
        slot = self._integers.at(position, integers.packing.nbytes)
        cached = self._micro_batches.get(position)
        if cached is not None and cached[0] is integers:
            self.inputs.append(slot)
            return cached[1]
        assert integers.rebuild is not None, "only a micro-batch's tensors are uploaded here"
        [tensors] = self._received([integers], slot, self._upload([integers], slot))
        micro_batch = integers.rebuild(tensors)
        self._micro_batches[position] = integers, micro_batch
        return micro_batch

    def bring(self, value: HostTensors, ring: SlotRing) -> Hidden:
        """Upload a stage's input through a ring, or the gradients of its output."""
        slot = ring.next(value.packing.nbytes)
        [tensors] = self._received([value], slot, self._upload([value], slot))
        return unflatten(tensors, value.packing.structure)

    def bring_kept(self, pass_: Pass, layers: Iterable[int], m: int) -> dict[int, tuple[Tensor, ...]]:
        """Bring up what the layers keep of micro-batch `m`, unless that is done."""
        if self._ahead is None:
            self._upload_kept({layer: self._wait(pass_.kept[layer, m]) for layer in layers})
        if self._ahead is None:
            return {}
        (kept, slot, uploaded), self._ahead = self._ahead, None
        return dict(zip(kept, self._received(list(kept.values()), slot, uploaded), strict=True))

    def bring_kept_ahead(self, pass_: Pass, layers: Iterable[int], m: int) -> None:
        """Begin to bring up what the layers keep of the next micro-batch, unless it is still to be sent.

        Call this after the present micro-batch's gradient is brought up, which would be held up behind these copies: they
        wait until the micro-batch before has left their slot.
        """
        values = {layer: pass_.kept[layer, m] for layer in layers}
        # Never waits: other devices may need what this thread sends first.
        if all(value.happened for value in values.values()):
            self._upload_kept({layer: self._board.wait(value) for layer, value in values.items()})

    def _upload_kept(self, found: dict[int, HostTensors | None]) -> None:
        kept = {layer: value for layer, value in found.items() if value is not None}
        if kept:
            slot = self._kept_in.next(sum(value.packing.nbytes for value in kept.values()))
            self._ahead = kept, slot, self._upload(list(kept.values()), slot)

    def _upload(self, values: Sequence[HostTensors], slot: DeviceSlot) -> Event:
        """Copy values one after the other into a slot. Returns the event after which they are there."""
        device, start = self._device, 0
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

    def _received(
        self, values: Sequence[HostTensors], slot: DeviceSlot, uploaded: Event
    ) -> list[tuple[Tensor, ...]]:
        """Let the computation that is enqueued next read values in a slot, after `uploaded`."""
        self._device.wait(Stream.COMPUTE, uploaded, "an uploaded input")
        self.inputs.append(slot)
        return slot.views([value.packing for value in values])

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
        device.wait(Stream.COMPUTE, slot.released, "a free slot to pack into")
        # Packed into a slot on the compute stream: the tensors belong to PyTorch's allocator, which may give
        # their memory to the next computation while a copy on another stream still reads it.
        reads = [one.memory for one in self.inputs]  # a layer may pass a part of its input on unchanged
        device.run(Stream.COMPUTE, partial(fill, slot.views([packing])[0], tensors), reads, [slot.memory])
        device.follow(Stream.ACTIVATION_DOWNLOAD, Stream.COMPUTE, "packed tensors")
        buffer = self._pool.take(max(packing.nbytes, buffer_bytes))
        # Devices that used the buffer for something else may still read it.
        for event in buffer.busy:
            device.wait(Stream.ACTIVATION_DOWNLOAD, event, "a free host buffer")
        nbytes = packing.nbytes
        device.copy(Stream.ACTIVATION_DOWNLOAD, buffer.memory[:nbytes], slot.memory[:nbytes])
        landed = slot.released = device.record(Stream.ACTIVATION_DOWNLOAD, "sent tensors")
        return HostTensors(buffer, packing, landed, readers)
