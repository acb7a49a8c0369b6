"""The stages of a pass without gradients that let each layer meet the same device in every pass.

Stage slots are dealt to devices in turn, over the passes too. So a layer stays with a device if the number of stages is a
multiple of the number of devices. Then the device can keep something for it from one pass to the next.
"""

from collections.abc import Callable, Sequence

from torchround.pipeline.memory import weight_space
from torchround.pipeline.partition import Partition, Stage, evaluation_stages


def forward_stages(
    partition: Partition, num_devices: int, bytes_of: Callable[[Stage], int]
) -> tuple[Stage, ...]:
    """Cut the stages of an evaluation further, until their number is a multiple of `num_devices`.

    `bytes_of` counts the weights of a stage. The stages need no more space for weights than `partition` itself. If no
    such cut exists, because there are too few layers, the stages stay as they are.
    """
    uncut = evaluation_stages(partition)
    space = weight_space(partition, num_devices, bytes_of)
    stages = uncut
    while len(stages) % num_devices or not _fit(stages, num_devices, bytes_of, space):
        longer = [index for index, stage in enumerate(stages) if stage.stop - stage.start > 1]
        if not longer:
            return uncut
        largest = max(longer, key=lambda index: bytes_of(stages[index]))
        stages = (*stages[:largest], *_halves(stages[largest], bytes_of), *stages[largest + 1 :])
    return stages


def _halves(stage: Stage, bytes_of: Callable[[Stage], int]) -> tuple[Stage, Stage]:
    """Cut a stage where its two parts are the most alike in bytes."""

    def larger_part(cut: int) -> int:
        return max(bytes_of(part) for part in _parts(stage, cut))

    return _parts(stage, min(range(stage.start + 1, stage.stop), key=larger_part))


def _parts(stage: Stage, cut: int) -> tuple[Stage, Stage]:
    return Stage(stage.kind, stage.start, cut), Stage(stage.kind, cut, stage.stop)


def _fit(stages: Sequence[Stage], num_devices: int, bytes_of: Callable[[Stage], int], space: int) -> bool:
    """Return whether any two stages that follow each other on a device fit side by side, over passes too."""
    following = [*stages, *stages][num_devices : len(stages) + num_devices]
    return all(bytes_of(one) + bytes_of(other) <= space for one, other in zip(stages, following, strict=True))
