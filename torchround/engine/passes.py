"""A pass: one batch's trip through the pipeline, as the controller hands it out."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchround.engine.board import HandOver
from torchround.engine.direction_jobs import DirectionJob
from torchround.engine.errors import FaultLocation
from torchround.engine.store.bundles import Bundle
from torchround.engine.tasks import Access
from torchround.engine.worker.activation_transfers import HostTensors, StagingSizes
from torchround.engine.worker.slots import Packing
from torchround.engine.worker.structure import FLAT
from torchround.layer import Batch, aligned
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import (
    Partition,
    Stage,
    StageKind,
    StageTask,
    step_tasks,
)
from torchround.planning.run_question import INTEGER_TENSORS


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

    def version_read(self, bundle: Bundle, layer: int, task: StageTask) -> int:
        """Return the version of a bundle that a stage uploads for `layer`.

        The forward of a step's first round reads the version before in its first `stale_layers` layers. An evaluation
        reads what the host holds between steps: the version before of each bundle that one of those layers uses.
        """
        first = layer if self.training else bundle.layers[0]
        is_early = task.stage.kind is StageKind.FORWARD and task.round == 0
        return self.version - (is_early and first < self.stale_layers)


@dataclass(frozen=True)
class StageJob:
    """A stage task of a pass, as a device gets it.

    `uploads` and `parts` are, by layer and bundle, its accesses to device weights and to gradients.
    """

    task: StageTask
    pass_: Pass
    uploads: dict[tuple[int, int], Access]
    parts: dict[tuple[int, int], Access]

    @property
    def slot(self) -> int:
        """The stage slot of the job."""
        return self.task.slot

    def location(self, actor: str, names: Sequence[str], micro_batch: int | None) -> FaultLocation:
        """Describe the job of a device, `actor`, while it is at a micro-batch. `names` are the layers'."""
        stage = self.task.stage
        return FaultLocation(actor, stage.kind.value, tuple(names[stage.start : stage.stop]), micro_batch)

    @property
    def slots_left(self) -> int:
        """The number of the pass's stage slots after this one."""
        stages, rounds = len(self.pass_.shape.stages), len(self.pass_.shape.rounds)
        return rounds * stages - (self.task.round * stages + self.task.stage_index + 1)


# Posted before the first stage job, so that every device has its buffers by then.
FIRST_SIZES = HandOver[tuple[StagingSizes, ...]]("the first pass")
STAGE_JOB = HandOver[StageJob | DirectionJob]("stage slot {0} to be handed out")


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
    gives_outputs: bool = False

    @staticmethod
    def of(
        tasks: Sequence[StageTask],
        micro_batches: Sequence[Batch],
        training: bool,
        step: int,
        version: int,
        gives_outputs: bool = False,
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
            gives_outputs,
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


def forward_inputs(stages: Sequence[Stage]) -> frozenset[int]:
    """Return the layers at which a forward or fused stage takes over from the previous stage."""
    starts = (stage.start for stage in stages if stage.kind is not StageKind.BACKWARD)
    return frozenset(start for start in starts if start > 0)


def share_tasks(share: StepShare, partition: Partition, num_devices: int, first_slot: int) -> list[StageTask]:
    """List the stage tasks of a machine's share of a step; none if it has no part in it."""
    if not share.rounds:
        return []
    return step_tasks(partition, len(share.micro_batches), len(share.rounds), num_devices, first_slot)
