"""The buffers that the passes of an engine need on the host, reserved before they are used.

A pool that grew when it ran dry would page-lock memory in the middle of a step, whenever devices progress in an order
that they had not taken before. `planning/host_buffers.py` counts for the worst order.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from torchround.engine.boundary_sizes import BoundarySizes
from torchround.engine.device import Device
from torchround.engine.kept_layers import KeptLayers
from torchround.engine.passes import PassShape
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.activation_transfers import StagingSizes
from torchround.planning.host_buffers import LOSS_BYTES, HeldPass, most_buffers, restarted_layers, whole_pages
from torchround.planning.memory import READER_BUFFER_BYTES, READER_BUFFERS
from torchround.planning.partition import Partition, StageKind, evaluation_tasks, step_tasks

NO_SIZES = StagingSizes(boundary_bytes=0, integer_bytes=0, micro_batches=0, training=False)


class BufferReservation:
    """The host buffers that a store and each pass need, reserved in the pool before they are used."""

    def __init__(
        self,
        sizes: BoundarySizes,
        num_layers: int,
        store: HostStore,
        pool: HostPool,
        devices: Sequence[Device],
        kept: KeptLayers,
        for_gradients: Counter[int],
        accumulates: bool = False,
    ) -> None:
        self._boundaries = sizes
        self._num_layers = num_layers
        self._store = store
        self._pool = pool
        self._kept = kept
        self._num_devices = len(devices)
        self._accumulates = accumulates
        self._always = for_gradients.copy()
        # The rings through which weights in files go up to devices that need page-locked memory.
        if any(bundle.mapped for bundle in store.bundles):
            self._always[READER_BUFFER_BYTES] += READER_BUFFERS * sum(dev.pins_host_memory for dev in devices)
        self._reserved: dict[tuple[PassShape, PassShape, bool, int], StagingSizes] = {}
        self._shapes: set[torch.Size] = set()
        self._integer_bytes: dict[torch.Size, int] = {}
        pool.reserve(self._always)

    def reserve_for(self, this: PassShape, before: PassShape | None) -> StagingSizes:
        """Reserve the buffers of a pass and the previous one, which may be under way together.

        Without a previous pass, reserves for this one and another like it after it. If the devices have to
        wait for the previous pass's update, only stages of frozen layers at the start of this pass overlap
        with it.
        """
        if not this.rounds:
            return NO_SIZES  # a machine without a part in this step: no device hears of it
        if before is not None and not before.rounds:
            before = None
        # The second pass is made up here rather than met later, where it would page-lock
        # memory in the middle of a run.
        if before is None:
            # Another call of the same step does not even wait for an update, so it runs further ahead.
            next_step = this.step + (not self._accumulates)
            before, this = (
                this,
                replace(this, step=next_step, version=self._store.oldest_version_read(next_step, True)),
            )
        # Steps of a run have few shapes, so buffers for most passes are reserved
        # already and this costs a look-up.
        key = this, before, this.runs_beside(before), self._boundaries.measured
        if key not in self._reserved:
            self._stand_in_for_shorter(this)
            ahead = len(this.stages) if this.runs_beside(before) else self._frozen_stages(this)
            self._pool.reserve(self._needed(this, before, ahead))
            self._reserved[key] = self._sizes(this)
        return self._reserved[key]

    def reserve_run(
        self,
        shapes: Sequence[tuple[int, int]],
        partition: Partition,
        rounds: int,
        step: int,
        validates: bool,
    ) -> tuple[StagingSizes, ...]:
        """Reserve the buffers of all passes from training step `step` on.

        Steps have micro-batches of these `[B, T]`. If the run `validates`, evaluations of as many come between.
        Returns the staging space that devices need. Raises `HostMemoryError`.
        """
        count = len(shapes)
        tasks = step_tasks(partition, count, min(rounds, count), self._num_devices)
        version = self._store.oldest_version_read(step, training=True)
        training = PassShape.planned(tasks, shapes, True, step, version)
        sizes = self.reserve_for(training, None)
        if not validates:
            return (sizes,)
        tasks = evaluation_tasks(partition, count, self._num_devices)
        version = self._store.oldest_version_read(step + 1, training=False)
        evaluation = PassShape.planned(tasks, shapes, False, step + 1, version)
        between = self.reserve_for(evaluation, training)
        self.reserve_for(evaluation, evaluation)
        self.reserve_for(training, evaluation)
        return sizes, between

    def knows_all(self, shape: PassShape) -> bool:
        """Tell whether all sizes of a pass are known, or will not come."""
        last = {self._num_layers} if shape.gives_outputs else set()
        restarts = [restarted_layers(stage, self._store.stale_layers) for stage in shape.stages]
        cuts = {stage.start for stage in shape.stages}.union(*restarts) - {0} | last
        return all(self._boundaries.knows(cut, one) for cut in cuts for one in set(shape.shapes))

    def _stand_in_for_shorter(self, this: PassShape) -> None:
        """Let a shorter batch, such as the last one of limited data, use the buffers of longer ones."""
        longest = max(self._shapes, default=None)
        layers = range(1, self._num_layers)
        for shape, integer_bytes in zip(this.shapes, this.integer_bytes, strict=True):
            if (
                longest is not None
                and shape not in self._shapes
                and shape[1:] == longest[1:]
                and shape < longest
            ):
                self._pool.stand_in(integer_bytes, self._integer_bytes[longest])
                for cut in layers:
                    if shorter_bytes := self._boundaries.of(cut, shape):
                        self._pool.stand_in(shorter_bytes, self._boundaries.of(cut, longest))
                for layer in self._kept.layers:
                    self._pool.stand_in(self._kept_bytes(layer, shape), self._kept_bytes(layer, longest))
        self._shapes.update(this.shapes)
        self._integer_bytes.update(zip(this.shapes, this.integer_bytes, strict=True))

    def _sizes(self, this: PassShape) -> StagingSizes:
        # Layer 0 reads the micro-batch alone, so no boundary lies before it.
        restarts = [restarted_layers(stage, self._store.stale_layers) for stage in this.stages]
        cuts = {stage.start for stage in this.stages}.union(*restarts) - {0}
        shapes = set(this.shapes)
        # What the layers of each backward stage keep; an evaluation has none.
        kept = [
            [self._kept_bytes(layer, shape) for layer in range(stage.start, stage.stop)]
            for stage in this.stages
            if stage.kind is StageKind.BACKWARD
            for shape in shapes
        ]
        return StagingSizes(
            boundary_bytes=max(
                (self._boundaries.of(cut, shape) for cut in cuts for shape in shapes), default=0
            ),
            integer_bytes=max(this.integer_bytes),
            micro_batches=max(len(part) for part in this.rounds),
            training=this.training,
            kept_out_bytes=max((max(of_stage) for of_stage in kept), default=0),
            kept_in_bytes=max((sum(of_stage) for of_stage in kept), default=0),
            restarts=max(map(len, restarts)),
            output_bytes=max(map(self._output_bytes(this), shapes)),
        )

    def _needed(self, this: PassShape, before: PassShape, ahead: int) -> Mapping[int, int]:
        """Count buffers by size. `ahead` is the number of stages of this pass that may run beside the previous one."""
        shapes = tuple(dict.fromkeys((*before.shapes, *this.shapes)))
        needed = most_buffers(
            [self._held(before, shapes, 0), self._held(this, shapes, ahead)],
            self._num_devices,
            # In whole pages before they are counted: two boundaries of about a size can use one buffer in turn.
            lambda cut, size: whole_pages(self._boundaries.of(cut, shapes[size])),
            lambda layer, size: whole_pages(self._kept_bytes(layer, shapes[size])),
        )
        # All integers, losses and outputs of a pass are on the host at once.
        for held in (before, this):
            needed.update(held.integer_bytes)
            needed[LOSS_BYTES] += len(held.shapes)
            needed.update(map(self._output_bytes(held), held.shapes))
        del needed[0]
        return needed + self._always

    def _output_bytes(self, this: PassShape) -> Callable[[torch.Size], int]:
        """Return the bytes of an output by the shape of its micro-batch: 0 if the pass gives losses."""
        if not this.gives_outputs:
            return lambda shape: 0
        return lambda shape: whole_pages(self._boundaries.of(self._num_layers, shape))

    def _kept_bytes(self, layer: int, shape: torch.Size) -> int:
        """Return the bytes that a layer keeps; 0 if it keeps nothing, or does not declare its work."""
        return (self._kept.nbytes(layer, shape) or 0) if layer in self._kept.layers else 0

    def _held(self, shape: PassShape, shapes: Sequence[torch.Size], ahead: int) -> HeldPass:
        rounds = tuple(tuple(shapes.index(shape.shapes[m]) for m in part) for part in shape.rounds)
        return HeldPass(shape.stages, rounds, ahead, self._store.stale_layers)

    def _frozen_stages(self, this: PassShape) -> int:
        """Count the stages at the start of a pass that read no weights that are ever updated."""
        for index, stage in enumerate(this.stages):
            bundles = {
                b for layer in range(stage.start, stage.stop) for b in self._store.layer_bundles(layer)
            }
            if any(self._store.bundles[bundle].trainable for bundle in bundles):
                return index
        return len(this.stages)
