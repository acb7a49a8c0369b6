"""What passes will need, taken before they are handed out: host buffers for the pool, staging space on devices.

A pool that grew when it ran dry would page-lock memory in the middle of a step, whenever the devices happen to get
on in an order that they did not take before. `pipeline/host_buffers.py` counts for the worst order.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchround.engine.staging import Packing, aligned
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.layer import LayeredModel, MicroBatch
from torchround.pipeline.host_buffers import HeldPass, most_buffers
from torchround.pipeline.partition import Stage
from torchround.pipeline.schedule import StageTask

LOSS_BYTES = 4


@dataclass(frozen=True)
class Footprint:
    """All of a pass that decides which buffers it needs. `shapes` are the micro-batches' `[B, T]`.

    `step` and `version` only count in relation to those of the pass before it.
    """

    training: bool
    stages: tuple[Stage, ...]
    rounds: tuple[range, ...]
    shapes: tuple[torch.Size, ...]
    integer_bytes: tuple[int, ...]
    step: int = field(compare=False)
    version: int = field(compare=False)

    @staticmethod
    def of(
        tasks: Sequence[StageTask],
        micro_batches: Sequence[MicroBatch],
        training: bool,
        step: int,
        version: int,
    ) -> "Footprint":
        return Footprint(
            training,
            tuple(task.stage for task in tasks if task.round == 0),
            tuple(task.micro_batches for task in tasks if task.stage_index == 0),
            tuple(micro_batch.tokens.shape for micro_batch in micro_batches),
            tuple(Packing.of(micro_batch.tensors()).nbytes for micro_batch in micro_batches),
            step,
            version,
        )

    def runs_beside(self, before: "Footprint") -> bool:
        """Whether the weights it reads are there before the pass before it has ended."""
        return not before.training or self.version <= before.step


@dataclass(frozen=True)
class StagingSizes:
    """Bytes of the largest boundary and of the largest micro-batch's integers, and micro-batches in a round."""

    boundary_bytes: int
    integer_bytes: int
    micro_batches: int
    training: bool


class Reserve:
    """Fills the pool for a store's gradients at once, and for each pass before it is handed out."""

    def __init__(self, model: LayeredModel, store: HostStore, pool: HostPool, num_devices: int) -> None:
        self._model = model
        self._store = store
        self._pool = pool
        self._num_devices = num_devices
        # Gradients that add up on the host: one buffer for each use of a bundle (ordering rule 4).
        self._parts = Counter(
            bundle.numel * store.gradient_dtype.itemsize
            for bundle in store.trained
            if bundle.adds_up
            for _ in bundle.layers
        )
        self._covered: dict[tuple[Footprint, Footprint, bool], StagingSizes] = {}
        pool.reserve(self._parts)

    def cover(self, this: Footprint, before: Footprint | None) -> StagingSizes:
        """Reserve for a pass and the one before it; for the first one, and another like it after it.

        Where the devices have to wait for that one's update, stages of frozen layers at the start of a pass do not.
        """
        if before is None:
            next_step = this.step + 1
            before, this = (
                this,
                replace(this, step=next_step, version=self._store.policy.version_read(next_step)),
            )
        key = this, before, this.runs_beside(before)
        if key not in self._covered:
            ahead = len(this.stages) if this.runs_beside(before) else self._frozen(this)
            self._pool.reserve(self._needed(this, before, ahead))
            self._covered[key] = self._sizes(this)
        return self._covered[key]

    def _sizes(self, this: Footprint) -> StagingSizes:
        cuts = {stage.start for stage in this.stages} - {0}
        shapes = set(this.shapes)
        return StagingSizes(
            boundary_bytes=max((self._bytes(cut, shape) for cut in cuts for shape in shapes), default=0),
            integer_bytes=max(this.integer_bytes),
            micro_batches=max(len(part) for part in this.rounds),
            training=this.training,
        )

    def _needed(self, this: Footprint, before: Footprint, ahead: int) -> Mapping[int, int]:
        shapes = tuple(dict.fromkeys((*before.shapes, *this.shapes)))
        passes = [_held(before, shapes, 0), _held(this, shapes, ahead)]
        needed = most_buffers(passes, self._num_devices, lambda cut, size: self._bytes(cut, shapes[size]))
        needed.update(before.integer_bytes + this.integer_bytes)
        needed[LOSS_BYTES] += len(before.shapes) + len(this.shapes)
        return needed + self._parts

    def _bytes(self, cut: int, shape: torch.Size) -> int:
        """Of the input of layer `cut`; 0 where the layer before it does not tell."""
        work = getattr(self._model.layers[cut - 1], "work", None)
        return 0 if work is None else aligned(work(*shape, self._store.dtype.itemsize).boundary_bytes)

    def _frozen(self, this: Footprint) -> int:
        """Stages at the start of a pass that read no weights that are ever updated."""
        for index, stage in enumerate(this.stages):
            bundles = {
                b for layer in range(stage.start, stage.stop) for b in self._store.layer_bundles(layer)
            }
            if any(self._store.bundles[bundle].trainable for bundle in bundles):
                return index
        return len(this.stages)


def _held(footprint: Footprint, shapes: Sequence[torch.Size], ahead: int) -> HeldPass:
    rounds = tuple(Counter(shapes.index(footprint.shapes[m]) for m in part) for part in footprint.rounds)
    return HeldPass(footprint.stages, rounds, ahead)
