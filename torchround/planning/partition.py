"""A partition of the layers into stages, and the order in which devices run the stages (RoundPipe section 3.2).

Forward and backward are split independently: the forward ranges and the fused range cover all layers once,
the fused range and the backward ranges cover them once more, from the deepest layer to the first. Stage slot
`i` of the endless dispatch sequence runs on device `i mod N`; the next round, and the next step, continue
after the last slot. The engine runs these very tasks and the simulator times them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import accumulate, pairwise, product
from operator import sub

# For each layer the names of the parts whose results it keeps (`torchround/keeping.py`); empty if none keeps anything.
KeptNames = tuple[tuple[str, ...], ...]


class StageKind(str, Enum):
    """The work of a stage: forward alone, forward and backward in one, or recomputation and backward."""

    FORWARD = "forward"
    FUSED = "fused"
    BACKWARD = "backward"


class SpanKind(str, Enum):
    """The kind of a span of time of a device or the host, in a run or a simulated one.

    BACKWARD is the whole backward, or the input's gradient alone in schedules with WEIGHT_GRADIENT. FUSED is forward and
    backward in one. OFFLOAD and RELOAD are copies of activations, WEIGHTS and GRADIENTS a stage's up to a device and down.
    ORTHOGONALISE is work of a device for the update.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"
    FUSED = "fused"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    UPDATE = "update"
    ORTHOGONALISE = "orthogonalise"


@dataclass(frozen=True)
class Stage:
    """A range of layers `start <= l < stop` that one device runs for all micro-batches of a round."""

    kind: StageKind
    start: int
    stop: int


class PlanError(ValueError):
    """An impossible plan: ranges that miss a layer, arguments out of range, or text that is not a plan."""


@dataclass(frozen=True)
class Partition:
    """The layer counts of all stages, in dispatch order.

    - `forward`: layers of each forward stage, from layer 0 on.
    - `fused`: layers of the fused stage, which ends at layer L.
    - `backward`: layers of each backward stage, from the fused stage down to layer 0.

    `sum(forward) + fused = sum(backward) + fused = L`.
    """

    forward: tuple[int, ...]
    fused: int
    backward: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = (*self.forward, self.fused, *self.backward)
        if min(counts) < 1:
            raise PlanError(f"every stage needs at least one layer, got {self}")
        if sum(self.forward) != sum(self.backward):
            raise PlanError(
                f"forward stages hold {sum(self.forward)} layers before the fused stage, "
                f"backward stages {sum(self.backward)}; they must be equal"
            )

    @property
    def num_layers(self) -> int:
        return sum(self.forward) + self.fused

    @property
    def num_stages(self) -> int:
        return len(self.forward) + 1 + len(self.backward)

    def joined(self, index: int) -> "Partition":
        """Return the partition with backward stages `index` and `index + 1` as one."""
        backward = self.backward
        both = sum(backward[index : index + 2])
        return replace(self, backward=(*backward[:index], both, *backward[index + 2 :]))

    def stages(self) -> tuple[Stage, ...]:
        """List all stages in dispatch order: forward, fused, backward."""
        return self._stages

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """The first layer and the end of each stage in dispatch order."""
        starts = [0, *accumulate(self.forward)]
        # Backward stages go from the fused stage down to layer 0.
        cuts = [starts[-1] + self.fused, *accumulate(self.backward, sub, initial=starts[-1])]
        return [*pairwise(starts), *zip(cuts[1:], cuts, strict=False)]

    @cached_property
    def _stages(self) -> tuple[Stage, ...]:
        kinds = [StageKind.FORWARD] * len(self.forward) + [StageKind.FUSED]
        kinds += [StageKind.BACKWARD] * len(self.backward)
        return tuple(Stage(kind, *layers) for kind, layers in zip(kinds, self.ranges, strict=True))

    @staticmethod
    def from_lists(forward: Sequence[int], fused: int, backward: Sequence[int]) -> "Partition":
        return Partition(tuple(forward), fused, tuple(backward))


@dataclass(frozen=True)
class StageTask:
    """The run of one stage of one round on one device.

    `slot` counts from the start of the run. `stage_index` is the position in `Partition.stages()`.
    `micro_batches` are indices within the step.
    """

    slot: int
    device: int
    round: int
    stage_index: int
    stage: Stage
    micro_batches: range


def split_evenly(total: int, parts: int) -> list[range]:
    """Cut `range(total)` into `parts` runs, the first ones longer by one (PACI appendix B)."""
    if not 1 <= parts <= total:
        raise ValueError(f"cannot cut {total} items into {parts} non-empty parts")
    base, longer = divmod(total, parts)
    # Longer runs come first, so the run that starts last, which a step's end waits for, is never the longest.
    starts = [part * base + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def step_tasks(
    partition: Partition, num_micro_batches: int, rounds: int, num_devices: int, first_slot: int = 0
) -> list[StageTask]:
    """List the stage tasks of a training step in dispatch order. If uneven, the first rounds get one micro-batch more."""
    rounds_of_step = enumerate(split_evenly(num_micro_batches, rounds))
    slots = product(rounds_of_step, enumerate(partition.stages()))
    return [
        StageTask(slot, slot % num_devices, round_index, stage_index, stage, micro_batches)
        for slot, ((round_index, micro_batches), (stage_index, stage)) in enumerate(slots, first_slot)
    ]


def slots_before_late_jobs(num_forward: int, num_slots: int, num_devices: int) -> int:
    """Return how many of a step's slots come before the jobs for the update of the step before (`async`).

    `num_forward` counts the slots before the step's first backward, `num_slots` all of them.
    """
    # When the gradients are complete, the other N - 1 devices still run a stage of this step each. A job before that
    # stage would wait for them. A device with two such stages before its job could not let the gradients of the first
    # one land: that memory is free after the update, which needs the job.
    return min(max(num_forward, num_devices - 1), num_slots)


def evaluation_stages(partition: Partition) -> tuple[Stage, ...]:
    """Return the stages of a pass without gradients: the forward stages, then the fused range as a forward stage."""
    # The ranges of the training stages, so that evaluation needs no larger slots on a device.
    return tuple(
        Stage(StageKind.FORWARD, stage.start, stage.stop)
        for stage in partition.stages()
        if stage.kind is not StageKind.BACKWARD
    )


def evaluation_tasks(
    partition: Partition,
    num_micro_batches: int,
    num_devices: int,
    first_slot: int = 0,
    stages: Sequence[Stage] | None = None,
) -> list[StageTask]:
    """List the stage tasks of a pass without gradients, which has these `stages`, otherwise `evaluation_stages`."""
    stages = evaluation_stages(partition) if stages is None else stages
    return [
        StageTask(slot, slot % num_devices, 0, slot - first_slot, stage, range(num_micro_batches))
        for slot, stage in enumerate(stages, first_slot)
    ]
