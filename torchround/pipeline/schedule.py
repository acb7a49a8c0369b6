"""Partition x rounds x devices -> ordered stage tasks: the very tasks the engine runs and the simulator times.

RoundPipe section 3.2: stage slot `i` of the endless dispatch sequence runs on device `(first_slot + i) mod N`;
the next round, and the next step, continue where the last one stopped.
"""

from dataclasses import dataclass

from torchround.pipeline.partition import Partition, Stage, StageKind


@dataclass(frozen=True)
class StageTask:
    """One stage of one round on one device.

    `slot` counts from the start of the run; `stage_index` is the position in `Partition.stages()`;
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
    starts = [part * base + min(part, longer) for part in range(parts + 1)]
    return [range(starts[part], starts[part + 1]) for part in range(parts)]


def step_tasks(
    partition: Partition, num_micro_batches: int, rounds: int, num_devices: int, first_slot: int = 0
) -> list[StageTask]:
    """The stage tasks of one training step, in dispatch order.

    Rounds whose micro-batches do not divide evenly give the first rounds one more.
    """
    stages = partition.stages()
    slots = [
        (round_index, micro_batches, stage_index, stage)
        for round_index, micro_batches in enumerate(split_evenly(num_micro_batches, rounds))
        for stage_index, stage in enumerate(stages)
    ]
    return [
        StageTask(slot, slot % num_devices, round_index, stage_index, stage, micro_batches)
        for slot, (round_index, micro_batches, stage_index, stage) in enumerate(slots, start=first_slot)
    ]


def evaluation_tasks(
    partition: Partition, num_micro_batches: int, num_devices: int, first_slot: int = 0
) -> list[StageTask]:
    """The stage tasks of a forward-only pass: the forward stages, then the fused range without its backward."""
    stages = [
        Stage(StageKind.FORWARD, stage.start, stage.stop)
        for stage in partition.stages()
        if stage.kind is not StageKind.BACKWARD
    ]
    return [
        StageTask(slot, slot % num_devices, 0, index, stage, range(num_micro_batches))
        for slot, (index, stage) in enumerate(enumerate(stages), start=first_slot)
    ]
