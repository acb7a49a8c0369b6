"""A pass: one batch's trip through the pipeline, as the controller hands it out, and the buffers that it needs.

Buffers are reserved before the first stage job of a pass is handed out. A pool that grew when it ran dry
would page-lock memory in the middle of a step, whenever devices progress in an order that they had not taken
before. `pipeline/host_buffers.py` counts for the worst order.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from torchround.engine.board import HandOver
from torchround.engine.device import Device
from torchround.engine.kept_layers import KeptLayers
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.worker.activation_transfers import HostTensors, StagingSizes
from torchround.engine.worker.bundle_transfers import upload_use
from torchround.engine.worker.slots import Packing, aligned
from torchround.engine.worker.structure import FLAT
from torchround.layer import Batch, LayeredModel
from torchround.pipeline.host_buffers import HeldPass, kept_cuts, pass_buffers, whole_pages
from torchround.pipeline.machine_shares import StepShare
from torchround.pipeline.memory import READER_BUFFER_BYTES, READER_BUFFERS
from torchround.pipeline.partition import (
    Partition,
    Stage,
    StageKind,
    StageTask,
    evaluation_tasks,
    step_tasks,
)
from torchround.pipeline.run_question import INTEGER_TENSORS


@dataclass(frozen=True)
class Pass:
    """The facts that all stage jobs of a pass share.

    `step` counts the training steps before it. `version` is the weight version it reads, except what
    `version_read` says of `stale_layers`. `loss_factor` multiplies each token's loss before the backward pass:
    it is the loss scale divided by `num_labels`.
    `forward_inputs` are the layers whose input a forward or fused stage takes from the host,
    `backward_inputs` the layers whose input a backward stage takes. `sizes` is the staging space that its
    devices need; `shape` decides that. `share` is this machine's share of a training step. A pass that
    `gives_outputs` returns what the last layer returns, in place of losses.
    """

    index: int
    training: bool
    step: int
    version: int
    loss_factor: float
    num_labels: int
    micro_batches: tuple[HostTensors, ...]
    forward_inputs: frozenset[int]
    backward_inputs: frozenset[int]
    shape: "PassShape"
    sizes: StagingSizes
    share: StepShare | None = None
    stale_layers: int = 0
    gives_outputs: bool = False

    def version_read(self, bundle: Bundle, layer: int, kind: StageKind) -> int:
        """Return the version of a bundle that a stage uploads for `layer`.

        A step's forward reads the version before in its first `stale_layers` layers. An evaluation reads what the
        host holds between steps: the version before of each bundle that one of those layers uses.
        """
        first = layer if self.training else bundle.layers[0]
        return self.version - (kind is StageKind.FORWARD and first < self.stale_layers)


@dataclass(frozen=True)
class StageJob:
    """A stage task of a pass, as a device gets it.

    `part_numbers` gives, by layer and bundle, which part of the step's gradient it makes. Its transfer
    windows are `window`, `window + 1`, .. in the run's order (`pipeline/shared_links.py`).
    """

    task: StageTask
    pass_: Pass
    part_numbers: dict[tuple[int, int], int]
    window: int

    @property
    def slots_left(self) -> int:
        """The number of the pass's stage slots after this one."""
        stages, rounds = len(self.pass_.shape.stages), len(self.pass_.shape.rounds)
        return rounds * stages - (self.task.round * stages + self.task.stage_index + 1)


# Posted before the first stage job, so that every device has its buffers by then.
FIRST_SIZES = HandOver[tuple[StagingSizes, ...]]("the first pass")
STAGE_JOB = HandOver[StageJob]("stage slot {0} to be handed out")
TRAINING_PASS = HandOver[Pass]("step {0} to be dispatched")


@dataclass(frozen=True)
class PassShape:
    """Everything about a pass that decides which buffers it needs. `shapes` are the micro-batches' `[B, T]`.

    `step` and `version` count only in relation to those of the previous pass.
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
        micro_batches: Sequence[Batch],
        training: bool,
        step: int,
        version: int,
    ) -> "PassShape":
        """Return the shape of a pass that consists of `tasks`."""
        return PassShape(
            training,
            tuple(task.stage for task in tasks if task.round == 0),
            tuple(task.micro_batches for task in tasks if task.stage_index == 0),
            tuple(micro_batch.shape for micro_batch in micro_batches),
            tuple(Packing.laid_out(micro_batch.tensors(), FLAT).nbytes for micro_batch in micro_batches),
            step,
            version,
        )

    @staticmethod
    def planned(
        tasks: Sequence[StageTask], shapes: Sequence[tuple[int, int]], training: bool, step: int, version: int
    ) -> "PassShape":
        """Return the shape of a pass whose micro-batches have these `[B, T]`."""
        return PassShape(
            training,
            tuple(task.stage for task in tasks if task.round == 0),
            tuple(task.micro_batches for task in tasks if task.stage_index == 0),
            tuple(torch.Size(shape) for shape in shapes),
            tuple(INTEGER_TENSORS * aligned(8 * batch * tokens) for batch, tokens in shapes),
            step,
            version,
        )

    def runs_beside(self, before: "PassShape") -> bool:
        """Tell whether the weights that it reads are complete before the previous pass has ended."""
        # An evaluation changes no weights. A training pass `before` makes version `before.step + 1`.
        return not before.training or self.version <= before.step


def forward_inputs(partition: Partition) -> frozenset[int]:
    """Return the layers at which a forward or fused stage takes over from the previous stage."""
    starts = (stage.start for stage in partition.stages() if stage.kind is not StageKind.BACKWARD)
    return frozenset(start for start in starts if start > 0)


def backward_inputs(partition: Partition, stale_layers: int = 0) -> frozenset[int]:
    """Return the layers whose input is kept from forward to backward: a backward stage, or a restart, begins there.

    The input of the fused stage is not among them, because its forward and backward read it together.
    """
    return kept_cuts(partition.stages(), stale_layers)


def restarted_layers(stage: Stage, stale_layers: int) -> range:
    """Return the layers inside a backward stage that begin anew at the input that their forward had.

    The layer below has changed since that forward, so recomputing its output would give another input.
    """
    if stage.kind is not StageKind.BACKWARD:
        return range(0)
    return range(stage.start + 1, max(min(stage.stop, stale_layers + 1), stage.start + 1))


def uploads(store: HostStore, pass_: Pass, tasks: Sequence[StageTask]) -> Iterator[tuple[int, int, int]]:
    """Yield bundle, version and use of each upload that rule 1 has to wait for. Frozen weights are never overwritten."""
    for task in tasks:
        for layer in range(task.stage.start, task.stage.stop):
            for bundle in (store.bundles[index] for index in store.layer_bundles(layer)):
                if bundle.trainable:
                    version = pass_.version_read(bundle, layer, task.stage.kind)
                    yield bundle.index, version, upload_use(task.slot, layer)


def share_tasks(share: StepShare, partition: Partition, num_devices: int, first_slot: int) -> list[StageTask]:
    """List the stage tasks of a machine's share of a step; none if it has no part in it."""
    if not share.rounds:
        return []
    return step_tasks(partition, len(share.micro_batches), len(share.rounds), num_devices, first_slot)


def part_numbers(store: HostStore, task: StageTask, share: StepShare | None) -> dict[tuple[int, int], int]:
    """Return, by layer and bundle, which part of a step's gradient sum the task makes.

    Parts count by round, then from the deepest layer that uses the bundle: the order in which they are made. Rounds
    count over all machines, as the step's `share` numbers them.
    """
    if share is None or task.stage.kind is StageKind.FORWARD:
        return {}
    round_index = share.rounds[task.round]
    parts = {}
    for layer in range(task.stage.start, task.stage.stop):
        for index in store.layer_bundles(layer):
            users = store.bundles[index].layers
            parts[layer, index] = round_index * len(users) + users[::-1].index(layer)
    return parts


NO_SIZES = StagingSizes(boundary_bytes=0, integer_bytes=0, micro_batches=0, training=False)


class BufferReservation:
    """The host buffers that a store and each pass need, reserved in the pool before they are used."""

    def __init__(
        self,
        model: LayeredModel,
        store: HostStore,
        pool: HostPool,
        devices: Sequence[Device],
        kept: KeptLayers,
        for_gradients: Counter[int],
        accumulates: bool = False,
    ) -> None:
        self._model = model
        self._store = store
        self._pool = pool
        self._kept = kept
        self._num_devices = len(devices)
        self._accumulates = accumulates
        self._always = for_gradients.copy()
        # The rings through which weights in files go up to devices that need page-locked memory.
        if any(bundle.mapped for bundle in store.bundles):
            self._always[READER_BUFFER_BYTES] += READER_BUFFERS * sum(dev.pins_host_memory for dev in devices)
        self._reserved: dict[tuple[PassShape, PassShape, bool], StagingSizes] = {}
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
        key = this, before, this.runs_beside(before)
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

    def _stand_in_for_shorter(self, this: PassShape) -> None:
        """Let a shorter batch, such as the last one of limited data, use the buffers of longer ones."""
        longest = max(self._shapes, default=None)
        layers = range(1, len(self._model.layers))
        for shape, integer_bytes in zip(this.shapes, this.integer_bytes, strict=True):
            if (
                longest is not None
                and shape not in self._shapes
                and shape[1:] == longest[1:]
                and shape < longest
            ):
                self._pool.stand_in(integer_bytes, self._integer_bytes[longest])
                for cut in layers:
                    self._pool.stand_in(self._bytes(cut, shape), self._bytes(cut, longest))
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
            boundary_bytes=max((self._bytes(cut, shape) for cut in cuts for shape in shapes), default=0),
            integer_bytes=max(this.integer_bytes),
            micro_batches=max(len(part) for part in this.rounds),
            training=this.training,
            kept_out_bytes=max((max(of_stage) for of_stage in kept), default=0),
            kept_in_bytes=max((sum(of_stage) for of_stage in kept), default=0),
            restarts=max(map(len, restarts)),
        )

    def _needed(self, this: PassShape, before: PassShape, ahead: int) -> Mapping[int, int]:
        """Count buffers by size. `ahead` is the number of stages of this pass that may run beside the previous one."""
        shapes = tuple(dict.fromkeys((*before.shapes, *this.shapes)))
        integers = dict(
            zip(before.shapes + this.shapes, before.integer_bytes + this.integer_bytes, strict=True)
        )
        needed = pass_buffers(
            self._held(before, shapes, 0),
            self._held(this, shapes, ahead),
            self._num_devices,
            # In whole pages before they are counted: two boundaries of about a size can use one buffer in turn.
            boundary_bytes=lambda cut, size: whole_pages(self._bytes(cut, shapes[size])),
            integer_bytes=lambda size: integers[shapes[size]],
            kept_bytes=lambda layer, size: whole_pages(self._kept_bytes(layer, shapes[size])),
        )
        return needed + self._always

    def _bytes(self, cut: int, shape: torch.Size) -> int:
        """Return the bytes of the input of layer `cut`; 0 if nothing tells."""
        if self._model.boundary_bytes is not None:
            return self._model.boundary_bytes(cut - 1, shape) or 0
        work = getattr(self._model.layers[cut - 1], "work", None)
        return 0 if work is None else aligned(work(*shape, self._store.dtype.itemsize).boundary_bytes)

    def _kept_bytes(self, layer: int, shape: torch.Size) -> int:
        """Return the bytes that a layer keeps; 0 if it keeps nothing, or does not declare its work."""
        return (self._kept.nbytes(layer, shape) or 0) if layer in self._kept.layers else 0

    def _held(self, shape: PassShape, shapes: Sequence[torch.Size], ahead: int) -> HeldPass:
        rounds = tuple(Counter(shapes.index(shape.shapes[m]) for m in part) for part in shape.rounds)
        return HeldPass(shape.stages, rounds, ahead, self._kept.layers, self._store.stale_layers)

    def _frozen_stages(self, this: PassShape) -> int:
        """Count the stages at the start of a pass that read no weights that are ever updated."""
        for index, stage in enumerate(this.stages):
            bundles = {
                b for layer in range(stage.start, stage.stop) for b in self._store.layer_bundles(layer)
            }
            if any(self._store.bundles[bundle].trainable for bundle in bundles):
                return index
        return len(this.stages)
