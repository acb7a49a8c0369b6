"""Orthogonalisation of look-aheads on a device: the update of Muon (Jordan et al. 2024) between two host passes.

The optimizer thread writes the look-ahead into a segment's `direction`. A device takes it matrix by matrix, and the
result lands where the look-ahead was. One matrix computes while the next one comes up and the last one goes down. Only
large symmetric products round differently than in `torch.optim.Muon`: they are computed in bands of rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torchround.engine.board import Board
from torchround.engine.device import Device, Mark, Span, Stream
from torchround.engine.store.bundles import Bundle, FlatParameter
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access
from torchround.engine.worker.slots import DeviceSlot, SlotRing
from torchround.planning.partition import SpanKind
from torchround.planning.update_costs import piece_elements, row_bands

# The polynomial of one step, a X + b (X X^T) X + c (X X^T)^2 X (kellerjordan.github.io/posts/muon).
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
# A matrix of zeros is divided by this in place of its norm.
LEAST_NORM = 1e-7


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


def orthogonalised(matrices: Tensor) -> Tensor:
    """Compute bf16 matrices whose singular values are all near 1, with the same singular vectors.

    `matrices` are `[n, rows, columns]`, or a single one. Each is divided by its Frobenius norm and goes through five
    Newton-Schulz steps. Tall ones are transposed before and after, so that the products are of the shorter side.
    """
    if matrices.ndim == 3 and matrices.device.type == "cpu":
        # One by one: a batched product may add in another order, and then experts would not equal single matrices.
        return torch.stack([orthogonalised(matrix) for matrix in matrices])
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    matrix = matrices.bfloat16()
    matrix = matrix.mT if is_tall else matrix
    norm = matrix.norm() if matrix.ndim == 2 else matrix.flatten(1).norm(dim=1)[:, None, None]
    matrix = iterated(matrix / norm.clamp(min=LEAST_NORM))
    return matrix.mT if is_tall else matrix


def iterated(matrix: Tensor) -> Tensor:
    """Apply the five steps to a matrix `[rows, columns]` of norm 1, or a batch of them, in its own dtype.

    Two of a step's three products are symmetric: of many rows only the bands under the diagonal are computed.
    """
    a, b, c = COEFFICIENTS
    is_batch = matrix.ndim == 3
    multiply, multiply_add = (torch.bmm, torch.baddbmm) if is_batch else (torch.mm, torch.addmm)
    rows = matrix.shape[-2]
    gram, polynomial = (matrix.new_empty(*matrix.shape[:-1], rows) for _ in range(2))
    for _ in range(STEPS):
        for start, stop in row_bands(rows):
            band = gram[..., start:stop, :stop]
            multiply(matrix[..., start:stop, :], matrix[..., :stop, :].mT, out=band)
            gram[..., :start, start:stop] = band[..., :start].mT
        for start, stop in row_bands(rows):
            band, rows_of_gram = polynomial[..., start:stop, :stop], gram[..., start:stop, :]
            multiply_add(rows_of_gram[..., :stop], rows_of_gram, gram[..., :stop], beta=b, alpha=c, out=band)
            polynomial[..., :start, start:stop] = band[..., :start].mT
        matrix = multiply_add(matrix, polynomial, matrix, beta=a)
    return matrix


def pieces(flat: Tensor, shape: Sequence[int]) -> Iterator[Tensor]:
    """Cut a parameter of `shape`, a matrix or a stack of them, in flat memory into pieces `[n, rows, columns]`."""
    for piece in flat.split(piece_elements(shape)):
        yield piece.view(-1, *shape[-2:])


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
    device.run(Stream.COMPUTE, partial(_replace, memory), [memory], [memory])
    end = device.mark(Stream.COMPUTE)
    device.follow(Stream.GRADIENT_DOWNLOAD, Stream.COMPUTE, "a direction")
    device.copy(Stream.GRADIENT_DOWNLOAD, piece, memory)
    slot.released = device.record(Stream.GRADIENT_DOWNLOAD, "a sent direction")
    return start, end


def _replace(matrices: Tensor) -> None:
    matrices.copy_(orthogonalised(matrices))
