"""Activations on their way: from the host to a device's slots, and from the device back to the host.

A boundary activation is kept in a pool buffer on the host, from the stage that made it to the last stage that
reads it. A layer may keep the results of parts of it too (`torchround/keeping.py`). Its forward stage records them and
sends them to the host. Its backward stage brings them up ahead of their use, and its recomputation takes them instead of
running those parts again. All that a layer keeps of a micro-batch travels as one.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from torchround.engine.board import Board, Value, WaitForValue
from torchround.engine.buffer_reservation import StagingSizes, ValueSizes
from torchround.engine.device import Device, Event, Stream
from torchround.engine.passes import HostTensors, Pass
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.compute import LayerCall
from torchround.engine.worker.slots import FLAT, DeviceSlot, Packing, SlotRing, fill, flatten, unflatten
from torchround.keeping import recording, replaying
from torchround.layer import Batch, Hidden, aligned
from torchround.planning.host_buffers import LOSS_BYTES

# Kept activations of a stage for one micro-batch, by layer, and the slot that holds them after the event.
BroughtUp = tuple[dict[int, list[Tensor]], DeviceSlot, Event]


class ActivationTransfers:
    """The transfers of one device's activations.

    What is brought up is valid until `end_micro_batch`, on the compute stream. `inputs` are the slots that hold it.
    """

    def __init__(self, device: Device, board: Board, pool: HostPool, sizes: ValueSizes) -> None:
        self._device = device
        self._board = board
        self._pool = pool
        self._sizes = sizes
        self._hidden_in, self._gradients_in, self._kept_in = (SlotRing(device) for _ in range(3))
        self._out, self._kept_out = SlotRing(device), SlotRing(device)
        # By position in the round: space for a micro-batch's integers, and the
        # micro-batch whose integers it holds.
        self._integers = SlotRing(device, depth=0)
        self._micro_batches: dict[int, tuple[HostTensors, Batch]] = {}
        # Room for two micro-batches: one computes while the inputs of the next one arrive.
        self._restarts_in = SlotRing(device, depth=0)
        self._stage_end: Event | None = None
        self._recorded: dict[int, list[Tensor]] = {}  # by layer, for `send_kept`
        self._ahead: BroughtUp | None = None  # of the next micro-batch
        self.inputs: list[DeviceSlot] = []

    def prepare(self, sizes: StagingSizes) -> None:
        """Allocate now everything that passes of these sizes need, instead of each buffer at its first use."""
        for position in range(sizes.micro_batches):
            self._integers.at(position, sizes.integer_bytes)
        for position in range(2 * sizes.restarts):
            self._restarts_in.at(position, sizes.boundary_bytes)
        if sizes.boundary_bytes:
            self._hidden_in.reserve(sizes.boundary_bytes)
            if sizes.training:
                self._gradients_in.reserve(sizes.boundary_bytes)
        self._out.reserve(max(sizes.boundary_bytes, sizes.output_bytes, aligned(LOSS_BYTES)))
        if sizes.kept_out_bytes:
            self._kept_out.reserve(sizes.kept_out_bytes)
            self._kept_in.reserve(sizes.kept_in_bytes)

    # Up.

    def bring_micro_batch(self, integers: HostTensors, position: int) -> tuple[Batch, DeviceSlot]:
        """Upload a micro-batch's integers, once per round: later stages of the round on this device find them there.

        `position` is the micro-batch's position in its round.
        """
        slot = self._integers.at(position, integers.packing.nbytes)
        cached = self._micro_batches.get(position)
        if cached is not None and cached[0] is integers:
            return cached[1], slot
        # Only stages of earlier rounds read the micro-batch that was here, and all of those are enqueued.
        slot.released = self._stage_end
        assert integers.rebuild is not None, "only a micro-batch's tensors are uploaded here"
        self._device.wait(Stream.COMPUTE, self._upload([integers], slot), "an uploaded input")
        micro_batch = integers.rebuild(slot.views(integers.packing))
        self._micro_batches[position] = (integers, micro_batch)
        return micro_batch, slot

    def end_stage(self) -> None:
        """Note that all computation of a stage is enqueued."""
        self._stage_end = self._device.record(Stream.COMPUTE, "the end of a stage")

    def bring_hidden(self, boundary: HostTensors, restarts: bool = False) -> tuple[Hidden, DeviceSlot]:
        """Upload the input of a stage, or, with `restarts`, the input of a layer inside it that begins anew."""
        return self._bring(boundary, self._restarts_in if restarts else self._hidden_in)

    def bring_gradients(self, gradients: HostTensors) -> tuple[tuple[Tensor | None, ...], DeviceSlot]:
        """Upload the gradients of a stage's output. None stands for a tensor that the loss does not depend on."""
        return self._bring(gradients, self._gradients_in)

    def _bring(self, boundary: HostTensors, ring: SlotRing) -> tuple[Hidden, DeviceSlot]:
        packing = boundary.packing
        slot = ring.next(packing.nbytes)
        self.inputs.append(slot)
        self._device.wait(Stream.COMPUTE, self._upload([boundary], slot), "an uploaded input")
        return unflatten(slot.views(packing), packing.structure), slot

    def end_micro_batch(self) -> None:
        """Note that nothing more will read what was brought up for the micro-batch."""
        if self.inputs:
            read = self._device.record(Stream.COMPUTE, "inputs that are read")
            for slot in self.inputs:
                slot.released = read
            self.inputs.clear()

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
        # As soon as the copies are enqueued: the next writer of a buffer waits for
        # `uploaded`, not for this stage.
        for value in values:
            value.reader_ends(uploaded, self._pool)
        return uploaded

    # Down.

    def send(
        self,
        value: Value[HostTensors],
        hidden: Hidden,
        readers: int,
        cut: int = 0,
        shape: torch.Size | None = None,
    ) -> None:
        """Copy tensors to the host and post them for `readers` readers.

        If they are the input of layer `cut` for a micro-batch of `shape`, or its gradient, their bytes are measured.
        """
        tensors, structure = flatten(hidden)
        packing = Packing.laid_out(tensors, structure)
        buffer_bytes = self._sizes.met(cut, shape, packing.nbytes) if shape else packing.nbytes
        # Posted when enqueued, not when landed: the reader's stream waits for
        # `landed`, its thread for nothing.
        self._board.post(value, self._send(self._out, tensors, packing, readers, buffer_bytes))

    def send_kept(self, value: Value[HostTensors | None], layer: int, shape: torch.Size) -> None:
        """Copy what the layer recorded of a micro-batch of `shape` `[B, T]` to the host, and post it."""
        tensors = tuple(self._recorded.pop(layer))
        packing = Packing.laid_out(tensors, FLAT)
        buffer_bytes = self._sizes.buffer_for_kept(layer, shape, packing)
        kept: HostTensors | None = None
        if buffer_bytes is not None:
            kept = self._send(self._kept_out, tensors, packing, 1, buffer_bytes)
        self._board.post(value, kept)

    def _send(
        self, ring: SlotRing, tensors: tuple[Tensor, ...], packing: Packing, readers: int, buffer_bytes: int
    ) -> HostTensors:
        """Copy tensors through a ring into a buffer of the pool of at least `buffer_bytes`."""
        device = self._device
        slot = ring.next(packing.nbytes)
        if slot.released is not None:
            device.wait(Stream.COMPUTE, slot.released, "a free slot to pack into")
        # Packed into a slot on the compute stream: the tensors belong to PyTorch's allocator, which may give
        # their memory to the next computation while a copy on another stream still reads it.
        device.run(
            Stream.COMPUTE,
            partial(fill, slot.views(packing), tensors),
            reads=[each.memory for each in self.inputs if each.holds_any(tensors)],
            writes=[slot.memory],
        )
        device.follow(Stream.ACTIVATION_DOWNLOAD, Stream.COMPUTE, "packed tensors")
        buffer = self._pool.take(max(packing.nbytes, buffer_bytes))
        # Devices that used the buffer for something else may still read it.
        for event in buffer.busy:
            device.wait(Stream.ACTIVATION_DOWNLOAD, event, "a free host buffer")
        source = slot.memory[: packing.nbytes]
        device.copy(Stream.ACTIVATION_DOWNLOAD, buffer.memory[: packing.nbytes], source)
        landed = slot.released = device.record(Stream.ACTIVATION_DOWNLOAD, "sent tensors")
        return HostTensors(buffer, packing, landed, readers)

    # Kept activations on their way to and from a layer's call.

    def keeping(self, layers: range) -> list[int]:
        """List those of the layers that keep anything."""
        return [layer for layer in layers if layer in self._sizes.keeping]

    def recorded(self, layer: int, call: LayerCall) -> LayerCall:
        """Return the layer's call, which records what the layer keeps for the next `send_kept`."""
        return partial(_record_and_run, self._sizes.kept_names(layer), call, self._recorded, layer)

    def replayed(self, layer: int, call: LayerCall, kept: dict[int, list[Tensor]]) -> LayerCall:
        """Return the layer's call, which takes what the layer kept instead of running those parts."""
        if layer not in kept:
            return call
        return partial(_replay_and_run, self._sizes.kept_names(layer), call, kept[layer])

    def bring_kept(
        self, pass_: Pass, layers: range, m: int, wait: WaitForValue
    ) -> tuple[dict[int, list[Tensor]], list[Tensor]]:
        """Bring up what the layers keep of micro-batch `m`, unless that is done. Also return the memory that holds it."""
        brought, self._ahead = self._ahead, None
        if brought is None:
            brought = self._upload_kept({i: wait(pass_.kept.at(i, m)) for i in self.keeping(layers)})
        if brought is None:
            return {}, []
        tensors, slot, uploaded = brought
        self._device.wait(Stream.COMPUTE, uploaded, "an uploaded input")
        self.inputs.append(slot)
        return tensors, [slot.memory]

    def bring_kept_ahead(self, pass_: Pass, layers: range, m: int) -> None:
        """Begin to bring up what the layers keep of the next micro-batch, unless it is still to be sent.

        Call this after the gradient of the present micro-batch is brought up. These copies wait until the micro-batch
        before has left their slot, and would hold up a gradient in the queue behind them.
        """
        values = {layer: pass_.kept.at(layer, m) for layer in self.keeping(layers)}
        # Never waits: other devices may need what this thread sends first.
        if all(value.happened for value in values.values()):
            self._ahead = self._upload_kept({i: self._board.wait(value) for i, value in values.items()})

    def _upload_kept(self, found: dict[int, HostTensors | None]) -> BroughtUp | None:
        """Copy all that a stage's layers keep of a micro-batch into one slot. None if that is nothing."""
        kept = {layer: value for layer, value in found.items() if value is not None}
        if not kept:
            return None
        joined = Packing.joined([value.packing for value in kept.values()])
        slot = self._kept_in.next(joined.nbytes)
        uploaded = self._upload(list(kept.values()), slot)
        views = iter(slot.views(joined))
        return {i: [next(views) for _ in value.packing.tensors] for i, value in kept.items()}, slot, uploaded


# Functions with arguments rather than ones that take tensors from around them: after a fault the variables of the
# traceback's frames are cleared (`lifecycle.py`), but tensors that are taken so would stay.


def _record_and_run(
    names: tuple[str, ...],
    call: LayerCall,
    recorded: dict[int, list[Tensor]],
    layer: int,
    hidden: Hidden | None,
    micro_batch: Batch,
) -> Hidden:
    """Run a layer, and leave in `recorded` what it keeps."""
    with recording(names) as record:
        output = call(hidden, micro_batch)
    recorded[layer] = record.tensors
    return output


def _replay_and_run(
    names: tuple[str, ...],
    call: LayerCall,
    tensors: Sequence[Tensor],
    hidden: Hidden | None,
    micro_batch: Batch,
) -> Hidden:
    """Run a layer with what it kept in place of the parts that made it."""
    with replaying(names, tensors):
        return call(hidden, micro_batch)
