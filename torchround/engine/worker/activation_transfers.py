"""Activations on their way: from the host to a device's slots, and from the device back to the host.

A boundary activation is kept in a pool buffer on the host, from the stage that made it to the last stage that
reads it.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from torchround.engine.board import Board, HandOver, HandOverKey
from torchround.engine.device import Device, Event, Stream
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.worker.slots import DeviceSlot, Packing, SlotRing, fill, flatten, unflatten
from torchround.layer import Batch, Hidden, aligned
from torchround.planning.host_buffers import LOSS_BYTES


class HostTensors:
    """Packed tensors on the host: a stage's input or its gradient, a micro-batch's integers, or a loss.

    They are valid after `landed`; the last reader gives them back.

    `rebuild` makes a micro-batch from its uploaded tensors (`Batch.rebuild`).
    """

    def __init__(
        self,
        buffer: HostBuffer,
        packing: Packing,
        landed: Event,
        readers: int,
        rebuild: Callable[[Sequence[Tensor]], Batch] | None = None,
    ) -> None:
        self.packing = packing
        self.rebuild = rebuild
        self.landed = landed
        self._buffer = buffer
        self._readers = readers
        self._reads: list[Event] = []
        self._lock = threading.Lock()

    @property
    def memory(self) -> Tensor:
        """The bytes of the packing; empty after the end of the engine."""
        return self._buffer.memory[: self.packing.nbytes]

    def reader_ends(self, event: Event, pool: HostPool) -> None:
        """Note that one reader's read ends at `event`."""
        with self._lock:
            self._reads.append(event)
            last = len(self._reads) == self._readers
        if last:
            pool.give(self._buffer, self._reads)


BOUNDARY = HandOver[HostTensors]("the input of layer {1} for micro-batch {2} of pass {0}")
BOUNDARY_GRADIENT = HandOver[HostTensors]("the gradient of layer {1}'s input for micro-batch {2} of pass {0}")
LOSS = HandOver[HostTensors]("the loss of micro-batch {1} of pass {0}")
OUTPUT = HandOver[HostTensors]("the output of micro-batch {1} of pass {0}")


@dataclass(frozen=True)
class StagingSizes:
    """Bytes of the largest boundary and of the largest micro-batch's integers, and micro-batches in a round.

    `kept_out_bytes` is the most that a layer keeps of a micro-batch, `kept_in_bytes` the most that the layers of a
    backward stage keep together. `restarts` is the most layers inside one backward stage that take an input of
    their own from the host. `output_bytes` is the largest output of a pass that gives outputs.
    """

    boundary_bytes: int
    integer_bytes: int
    micro_batches: int
    training: bool
    kept_out_bytes: int = 0
    kept_in_bytes: int = 0
    restarts: int = 0
    output_bytes: int = 0


class Outbox:
    """The way of activations from a device to the host: through a ring of device slots into buffers of the pool."""

    def __init__(self, device: Device, pool: HostPool) -> None:
        self._device = device
        self._pool = pool
        self._slots = SlotRing(device)

    def reserve(self, nbytes: int) -> None:
        """Allocate now what tensors of `nbytes` in all need."""
        self._slots.reserve(nbytes)

    def send(
        self,
        tensors: tuple[Tensor, ...],
        packing: Packing,
        readers: int,
        inputs: Sequence[DeviceSlot],
        buffer_bytes: int = 0,
    ) -> HostTensors:
        """Copy tensors to the host for `readers` readers.

        `inputs` are slots of which the tensors may be parts. The host buffer has `buffer_bytes` if they need fewer.
        """
        device = self._device
        slot = self._slots.next(packing.nbytes)
        if slot.released is not None:
            device.wait(Stream.COMPUTE, slot.released, "a free slot to pack into")
        # Packed into a slot on the compute stream: the tensors belong to PyTorch's allocator, which may give
        # their memory to the next computation while a copy on another stream still reads it.
        device.run(
            Stream.COMPUTE,
            partial(fill, slot.views(packing), tensors),
            reads=[staged.memory for staged in inputs if staged.holds_any(tensors)],
            writes=[slot.memory],
        )
        device.follow(Stream.ACTIVATION_DOWNLOAD, Stream.COMPUTE, "packed tensors")
        buffer = self._pool.take(max(packing.nbytes, buffer_bytes))
        # Devices that used the buffer for something else may still read it.
        for event in buffer.busy:
            device.wait(Stream.ACTIVATION_DOWNLOAD, event, "a free host buffer")
        device.copy(
            Stream.ACTIVATION_DOWNLOAD, buffer.memory[: packing.nbytes], slot.memory[: packing.nbytes]
        )
        landed = slot.released = device.record(Stream.ACTIVATION_DOWNLOAD, "sent tensors")
        return HostTensors(buffer, packing, landed, readers)


class ActivationTransfers:
    """The transfers of one device's activations.

    Uploaded activations and gradients are valid until `end_micro_batch`, on the compute stream. `inputs` are the
    slots of those that are valid.
    """

    def __init__(self, device: Device, board: Board, pool: HostPool) -> None:
        self._device = device
        self._board = board
        self._pool = pool
        self._hidden_in, self._gradients_in = SlotRing(device), SlotRing(device)
        self._out = Outbox(device, pool)
        # By position in the round: space for a micro-batch's integers, and the
        # micro-batch whose integers it holds.
        self._integers = SlotRing(device, depth=0)
        # Room for two micro-batches: one computes while the inputs of the next one arrive.
        self._restarts_in = SlotRing(device, depth=0)
        self._micro_batches: dict[int, tuple[HostTensors, Batch]] = {}
        self._prepared: set[StagingSizes] = set()
        self._stage_end: Event | None = None
        self.inputs: list[DeviceSlot] = []

    def prepare(self, sizes: StagingSizes) -> None:
        """Allocate now everything that passes of these sizes need, instead of each buffer at its first use."""
        if sizes in self._prepared:
            return
        self._prepared.add(sizes)
        for position in range(sizes.micro_batches):
            self._integers.at(position, sizes.integer_bytes)
        for position in range(2 * sizes.restarts):
            self._restarts_in.at(position, sizes.boundary_bytes)
        if sizes.boundary_bytes:
            self._hidden_in.reserve(sizes.boundary_bytes)
            if sizes.training:
                self._gradients_in.reserve(sizes.boundary_bytes)
        self._out.reserve(max(sizes.boundary_bytes, sizes.output_bytes, aligned(LOSS_BYTES)))

    def bring_micro_batch(self, boundary: HostTensors, position: int) -> tuple[Batch, DeviceSlot]:
        """Upload a micro-batch's integers, once per round: later stages of the round on this device find them there.

        `position` is the micro-batch's position in its round.
        """
        slot = self._integers.at(position, boundary.packing.nbytes)
        cached = self._micro_batches.get(position)
        if cached is not None and cached[0] is boundary:
            return cached[1], slot
        # Only stages of earlier rounds read the micro-batch that was here, and all of those are enqueued.
        slot.released = self._stage_end
        assert boundary.rebuild is not None, "only a micro-batch's tensors are uploaded here"
        micro_batch = boundary.rebuild(self._upload(boundary, slot))
        self._micro_batches[position] = (boundary, micro_batch)
        return micro_batch, slot

    def end_stage(self) -> None:
        """Note that all computation of a stage is enqueued."""
        self._stage_end = self._device.record(Stream.COMPUTE, "the end of a stage")

    def bring_hidden(self, boundary: HostTensors, restarts: bool = False) -> tuple[Hidden, DeviceSlot]:
        """Upload the input of a stage, or, with `restarts`, the input of a layer inside it that begins anew."""
        ring = self._restarts_in if restarts else self._hidden_in
        slot = ring.next(boundary.packing.nbytes)
        self.inputs.append(slot)
        return unflatten(self._upload(boundary, slot), boundary.packing.structure), slot

    def bring_gradients(self, boundary: HostTensors) -> tuple[tuple[Tensor | None, ...], DeviceSlot]:
        """Upload the gradients of a stage's output. None stands for a tensor that the loss does not depend on."""
        slot = self._gradients_in.next(boundary.packing.nbytes)
        self.inputs.append(slot)
        return unflatten(self._upload(boundary, slot), boundary.packing.structure), slot

    def end_micro_batch(self) -> None:
        """Note that nothing more will read the micro-batch's activations and gradients that were uploaded."""
        if self.inputs:
            read = self._device.record(Stream.COMPUTE, "inputs that are read")
            for slot in self.inputs:
                slot.released = read
            self.inputs.clear()

    def send(
        self,
        key: HandOverKey[HostTensors],
        hidden: Hidden,
        readers: int,
        buffer_for: Callable[[int], int] = lambda nbytes: 0,
    ) -> None:
        """Copy tensors to the host and post them under `key` for `readers` readers.

        `buffer_for` gives, for their bytes, the bytes of the host buffer if these are more.
        """
        tensors, structure = flatten(hidden)
        packing = Packing.laid_out(tensors, structure)
        sent = self._out.send(tensors, packing, readers, self.inputs, buffer_for(packing.nbytes))
        # Posted when enqueued, not when landed: the reader's stream waits for
        # `landed`, its thread for nothing.
        self._board.post(key, sent)

    def _upload(self, boundary: HostTensors, slot: DeviceSlot) -> tuple[Tensor, ...]:
        device, nbytes = self._device, boundary.packing.nbytes
        if slot.released is not None:
            device.wait(Stream.ACTIVATION_UPLOAD, slot.released, "a free slot for an input")
        device.wait(Stream.ACTIVATION_UPLOAD, boundary.landed, "an input in host memory")
        device.copy(Stream.ACTIVATION_UPLOAD, slot.memory[:nbytes], boundary.memory)
        uploaded = device.record(Stream.ACTIVATION_UPLOAD, "an uploaded input")
        device.wait(Stream.COMPUTE, uploaded, "an uploaded input")
        # As soon as the copy is enqueued: the next writer of the buffer waits for
        # `uploaded`, not for this stage.
        boundary.reader_ends(uploaded, self._pool)
        return slot.views(boundary.packing)
