"""Orthogonalisation of look-aheads on a device: the update of Muon (Jordan et al. 2024) between two host passes.

The optimizer thread writes the look-ahead into a segment's `direction`. A device takes it matrix by matrix, and the
result lands where the look-ahead was. One matrix computes while the next one comes up and the last one goes down.
"""

from dataclasses import dataclass

from torch import Tensor

from torchround.engine.board import Board
from torchround.engine.device import Device, Mark, Span, Stream
from torchround.engine.store.bundles import Bundle, FlatParameter
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access
from torchround.engine.worker.slots import DeviceSlot, SlotRing
from torchround.optim.rules.muon import orthogonalised, pieces
from torchround.planning.partition import SpanKind


@dataclass(frozen=True)
class DirectionJob:
    """The turn of a device at the matrices of a step: its bundles, in the order in which their gradients land.

    `accesses` are those to the direction of each, whose content becomes the device's index and a span of the computation.
    """

    slot: int
    step: int
    bundles: tuple[Bundle, ...]
    accesses: tuple[Access, ...]


def directed_parameters(bundle: Bundle) -> list[FlatParameter]:
    return [p for segment in bundle.segments if segment.rule.uses_direction for p in segment.parameters]


def directed_bundles(store: HostStore) -> list[Bundle]:
    """List this machine's bundles with such parameters, in the order in which their gradients land."""
    return [bundle for bundle in reversed(store.owned) if directed_parameters(bundle)]


def orthogonalise(
    device: Device, index: int, ring: SlotRing, bundle: Bundle, access: Access, board: Board
) -> Mark:
    """Enqueue the directions of a bundle on device `index`, once its look-aheads are written. Returns a mark at their end."""
    access.begin(board)
    marks: list[Mark] = []
    for segment in bundle.segments:
        if (direction := segment.direction) is None:
            continue
        for parameter in segment.parameters:
            first = parameter.start - segment.start
            for piece in pieces(direction[first : first + parameter.shape.numel()], parameter.shape):
                marks += _enqueue(device, ring.next(piece.numel()), piece)
    event = device.record(Stream.GRADIENT_DOWNLOAD, "landed directions")
    layers = range(bundle.layers[0], bundle.layers[0] + 1)
    access.buffer.content = index, Span(SpanKind.ORTHOGONALISE, marks[0], marks[-1], layers=layers)
    access.end(board, event)
    return marks[-1]


def _enqueue(device: Device, slot: DeviceSlot, piece: Tensor) -> tuple[Mark, Mark]:
    """Enqueue a piece: up, its computation, down into the same host memory. Returns marks around the computation."""
    device.wait(Stream.ACTIVATION_UPLOAD, slot.released, "a free slot for a look-ahead")
    memory = slot.memory[: piece.numel()].view(piece.shape)
    # Before the weights of a next stage, which may fill their own stream already.
    device.copy(Stream.ACTIVATION_UPLOAD, memory, piece)
    device.follow(Stream.COMPUTE, Stream.ACTIVATION_UPLOAD, "an uploaded look-ahead")
    start = device.mark(Stream.COMPUTE)
    device.run(Stream.COMPUTE, lambda: memory.copy_(orthogonalised(memory)), [memory], [memory])
    end = device.mark(Stream.COMPUTE)
    device.follow(Stream.GRADIENT_DOWNLOAD, Stream.COMPUTE, "a direction")
    device.copy(Stream.GRADIENT_DOWNLOAD, piece, memory)
    slot.released = device.record(Stream.GRADIENT_DOWNLOAD, "a sent direction")
    return start, end
