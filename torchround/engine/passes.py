"""A pass: one batch's trip through the pipeline, and what its caller can ask of it afterwards."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from torchround.engine.device import Event
from torchround.engine.observer import Observer
from torchround.engine.reserve import Footprint, StagingSizes
from torchround.engine.staging import Boundary, Packing, fill
from torchround.engine.store.host_memory import HostPool
from torchround.layer import MicroBatch
from torchround.pipeline.partition import Partition, StageKind
from torchround.pipeline.schedule import StageTask


@dataclass(frozen=True)
class Pass:
    """What all stage tasks of a pass share.

    `step` counts the training steps before it; `version` is the weight version it reads. `loss_scale`
    multiplies the loss before the backward pass. `handovers` and `kept` are the layers whose input a forward
    or fused stage, a backward stage takes from the host. `sizes` is what its devices need space for, `footprint`
    what decides that.
    """

    index: int
    training: bool
    step: int
    version: int
    loss_scale: float
    num_labels: int
    micro_batches: tuple[Boundary, ...]
    handovers: frozenset[int]
    kept: frozenset[int]
    footprint: Footprint
    sizes: StagingSizes


@dataclass(frozen=True)
class Order:
    """A stage task of a pass.

    `contribution` says, by layer and bundle, which part of the step's gradient it makes. Its transfer windows come at
    waves `wave`, `wave + 1`, .. (`pipeline/shared_links.py`).
    """

    task: StageTask
    work: Pass
    contribution: dict[tuple[int, int], int]
    wave: int


def handovers(partition: Partition) -> frozenset[int]:
    """Layers at which a forward or fused stage takes over from the stage before."""
    starts = (stage.start for stage in partition.stages() if stage.kind is not StageKind.BACKWARD)
    return frozenset(start for start in starts if start > 0)


def kept_boundaries(partition: Partition) -> frozenset[int]:
    """Layers whose input is kept from forward to backward, because a backward stage starts there."""
    starts = (stage.start for stage in partition.stages() if stage.kind is StageKind.BACKWARD)
    return frozenset(start for start in starts if start > 0)


def host_micro_batch(
    micro_batch: MicroBatch,
    pool: HostPool,
    observer: Observer,
    readers: int,
    synchronize: Callable[[Event], None],
) -> Boundary:
    """A micro-batch's integers in one pool buffer, for `readers` devices to upload.

    `synchronize` waits for the device events after which the buffer may be written.
    """
    tensors = micro_batch.tensors()
    packing = Packing.of(tensors)
    buffer = pool.take(packing.nbytes)
    for event in buffer.busy:
        synchronize(event)
    observer.touched(reads=(), writes=[buffer.memory])
    fill(packing.views(buffer.memory), tensors)
    return Boundary(buffer, packing, AlreadyHappened(), readers, micro_batch.facts())


class AlreadyHappened:
    """The event of host memory that the host itself wrote."""

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


def read_loss(boundary: Boundary, pool: HostPool) -> float:
    """The sum of a micro-batch's token losses, as one of the boundary's readers; waits until it is on the host."""
    boundary.landed.synchronize()
    [loss_sum] = boundary.packing.views(boundary.memory)
    value = float(loss_sum)
    boundary.read(AlreadyHappened(), pool)
    return value


def check_micro_batches(micro_batches: Sequence[MicroBatch]) -> str | None:
    """What is wrong with the micro-batches of a pass, or None."""
    if not micro_batches:
        return "a pass needs at least one micro-batch"
    for index, micro_batch in enumerate(micro_batches):
        for name, tensor in zip(
            ("tokens", "labels", "positions", "document_ids"), micro_batch.tensors(), strict=True
        ):
            if tensor.dtype != torch.int64 or tensor.dim() != 2 or tensor.shape != micro_batch.tokens.shape:
                return (
                    f"micro-batch {index}: {name} is {tensor.dtype} {tuple(tensor.shape)}; "
                    f"expected int64 [B, T] like tokens {tuple(micro_batch.tokens.shape)}"
                )
    bounds = {micro_batch.max_documents for micro_batch in micro_batches}
    if len(bounds) > 1:
        return f"max_documents is a fact of the whole batch, but its micro-batches have {sorted(map(str, bounds))}"
    return None
