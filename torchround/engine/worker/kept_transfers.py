"""Kept activations on their way: from a layer's forward stage to the host, and from there to its backward stage.

A layer keeps the results of the parts that are named for it (`torchround/keeping.py`). Its forward stage records
them and sends them to the host; its backward stage brings them up ahead of their use, and its recomputation takes
them instead of running those parts again. All that a layer keeps of a micro-batch travels as one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchround.engine.board import Board, HandOver, WaitForHandOver
from torchround.engine.device import Device, Event, Stream
from torchround.engine.kept_layers import KeptLayers
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.activation_transfers import HostTensors, Outbox, StagingSizes
from torchround.engine.worker.compute import LayerCall
from torchround.engine.worker.slots import FLAT, DeviceSlot, Packing, SlotRing
from torchround.keeping import recording, replaying
from torchround.layer import Batch, Hidden

# None if the layer recorded nothing, or more than was counted for it: it is then recomputed.
KEPT = HandOver[HostTensors | None]("the kept activations of layer {1} for micro-batch {2} of pass {0}")


@dataclass(frozen=True)
class KeptOnDevice:
    """The kept activations of a stage for one micro-batch, by layer; valid on a stream that waits for `uploaded`."""

    tensors: dict[int, list[Tensor]]
    slot: DeviceSlot | None = None
    uploaded: Event | None = None


class KeptTransfers:
    """The transfers of one device's kept activations.

    What was brought up is valid until `end_micro_batch`, on the compute stream.
    """

    def __init__(self, device: Device, board: Board, pool: HostPool, kept: KeptLayers) -> None:
        self._device = device
        self._board = board
        self._pool = pool
        self._kept = kept
        self._out = Outbox(device, pool)
        self._in = SlotRing(device)
        self._recorded: dict[int, list[Tensor]] = {}
        self._ahead: tuple[tuple[int, int, range], KeptOnDevice] | None = None
        self._in_use: list[DeviceSlot] = []
        self._joined: dict[tuple[Packing, ...], Packing] = {}

    def prepare(self, sizes: StagingSizes) -> None:
        """Allocate now everything that passes of these sizes need."""
        if sizes.kept_out_bytes:
            self._out.reserve(sizes.kept_out_bytes)
            self._in.reserve(sizes.kept_in_bytes)

    def keeping(self, layers: range) -> list[int]:
        """List those of the layers that keep anything."""
        return [layer for layer in layers if self._kept.names_of(layer)]

    # The forward stage.

    def recorded(self, layer: int, call: LayerCall) -> LayerCall:
        """Return the layer's call, which records what the layer keeps for the next `send`."""
        return partial(_record_and_run, self._kept.names_of(layer), call, self._recorded, layer)

    def send(
        self, pass_index: int, layer: int, m: int, shape: torch.Size, reads: Sequence[DeviceSlot]
    ) -> None:
        """Copy what the layer recorded of micro-batch `m`, of `shape` `[B, T]`, to the host, and post it.

        `reads` are slots of which the recorded tensors may be parts.
        """
        tensors = tuple(self._recorded.pop(layer))
        counted_bytes = self._kept.nbytes(layer, shape)
        packing = Packing.laid_out(tensors, FLAT)
        nbytes = packing.nbytes
        kept: HostTensors | None = None
        if counted_bytes is not None and (nbytes > counted_bytes or (counted_bytes and not tensors)):
            self._kept.warn(layer, nbytes, counted_bytes)
        elif tensors:
            kept = self._out.send(tensors, packing, 1, reads, buffer_bytes=counted_bytes or 0)
        elif counted_bytes is None:
            self._kept.refuse_none(layer)
        self._board.post(KEPT(pass_index, layer, m), kept)

    # The backward stage.

    def bring(self, pass_index: int, layers: range, m: int, wait: WaitForHandOver) -> KeptOnDevice:
        """Let the compute stream wait for what the layers keep of micro-batch `m`, brought up unless that is done."""
        key = (pass_index, m, layers)
        if self._ahead is not None and self._ahead[0] == key:
            staged, self._ahead = self._ahead[1], None
        else:
            staged = self._upload({layer: wait(KEPT(pass_index, layer, m)) for layer in self.keeping(layers)})
        if staged.slot is not None and staged.uploaded is not None:
            self._device.wait(Stream.COMPUTE, staged.uploaded, "uploaded kept activations")
            self._in_use.append(staged.slot)
        return staged

    def bring_ahead(self, pass_index: int, layers: range, m: int) -> None:
        """Begin to bring up what the layers keep of the next micro-batch, unless it is still to be sent.

        Call this after the gradient of the present micro-batch is brought up. These copies wait until the micro-batch
        before has left their slot, and would hold up a gradient in the queue behind them.
        """
        keys = {layer: KEPT(pass_index, layer, m) for layer in self.keeping(layers)}
        # Never waits: other devices may need what this thread sends first.
        if keys and all(self._board.ready(key) for key in keys.values()):
            staged = self._upload({layer: self._board.wait(key) for layer, key in keys.items()})
            self._ahead = (pass_index, m, layers), staged

    def replayed(self, layer: int, call: LayerCall, staged: KeptOnDevice) -> LayerCall:
        """Return the layer's call, which takes what the layer kept instead of running those parts."""
        tensors = staged.tensors.get(layer)
        return (
            call if tensors is None else partial(_replay_and_run, self._kept.names_of(layer), call, tensors)
        )

    def end_micro_batch(self) -> None:
        """Note that nothing more will read what was brought up for the micro-batch."""
        if self._in_use:
            read = self._device.record(Stream.COMPUTE, "kept activations that are read")
            for slot in self._in_use:
                slot.released = read
            self._in_use.clear()

    def _upload(self, found: dict[int, HostTensors | None]) -> KeptOnDevice:
        """Copy all that a stage's layers keep of a micro-batch into one slot."""
        device = self._device
        kept = {layer: value for layer, value in found.items() if value is not None}
        if not kept:
            return KeptOnDevice({})
        packings = tuple(value.packing for value in kept.values())
        joined = self._joined.setdefault(packings, Packing.joined(packings))
        slot = self._in.next(joined.nbytes)
        if slot.released is not None:
            device.wait(Stream.ACTIVATION_UPLOAD, slot.released, "a free slot for kept activations")
        start = 0
        for value in kept.values():
            device.wait(Stream.ACTIVATION_UPLOAD, value.landed, "kept activations in host memory")
            stop = start + value.packing.nbytes
            source = value.memory[: value.packing.nbytes]
            device.copy(Stream.ACTIVATION_UPLOAD, slot.memory[start:stop], source)
            start = stop
        uploaded = device.record(Stream.ACTIVATION_UPLOAD, "uploaded kept activations")
        for value in kept.values():
            value.reader_ends(uploaded, self._pool)
        views = iter(slot.views(joined))
        tensors = {layer: [next(views) for _ in value.packing.tensors] for layer, value in kept.items()}
        return KeptOnDevice(tensors, slot, uploaded)


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
