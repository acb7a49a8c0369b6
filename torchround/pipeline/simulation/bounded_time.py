"""The exact time of a step in `bounded`: each layer's update begins once the layer's own gradient is complete.

The forward of step t + 1 reads layers below K one version older, so it need not wait for their updates. Each other
stage waits for the updates of its own layers alone. The host updates one layer after the other, from the deepest one on.
The recurrence is the one of `step_time.py`; a test compares it with the event simulator.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.pipeline.partition import Partition, StageKind
from torchround.pipeline.simulation.step_time import (
    LayerSums,
    StageTimes,
    run_slots,
    steady_state_seconds,
)


@dataclass(frozen=True)
class UpdateWait:
    """The update that a stage waits for: `after_s` after the host begins with gradient stage `source`, `steps` before.

    Gradient stages are the fused and the backward ones, counted in dispatch order.
    """

    source: int
    after_s: float
    steps: int


def bounded_step_seconds(
    sums: LayerSums, partition: Partition, stale_layers: int, num_devices: int, num_micro_batches: int
) -> float:
    """Compute the seconds per training step in the steady state, with one round per step.

    `stale_layers` is K; it counts as at most the first layer of the fused stage.
    """
    stale_layers = min(stale_layers, partition.num_layers - partition.fused)
    times = sums.times(partition.forward, partition.fused, partition.backward, stale_layers)
    waits = update_waits(partition, sums, stale_layers)
    gradient_stages = [stage for stage in partition.stages() if stage.kind is not StageKind.FORWARD]
    update_s = [sums.updated_s[stage.stop] - sums.updated_s[stage.start] for stage in gradient_stages]

    def next_state(state: Sequence[float]) -> list[float]:
        return _next_state(times, waits, update_s, num_devices, num_micro_batches, state)

    # When each device becomes free, and when the host began with each gradient stage of the last two steps.
    return steady_state_seconds(next_state, num_devices + 2 * len(update_s), 0)


def update_waits(partition: Partition, sums: LayerSums, stale_layers: int) -> list[UpdateWait]:
    """List the update that each stage waits for."""
    stages, updated_s = partition.stages(), sums.updated_s
    gradient_stages = [stage for stage in stages if stage.kind is not StageKind.FORWARD]
    waits = []
    for stage in stages:
        start, steps = stage.start, 1
        if stage.kind is StageKind.FORWARD:
            # What the stage reads in the newest version, or the version before if it reads nothing newer.
            start, steps = (start, 2) if stage.stop <= stale_layers else (max(start, stale_layers), 1)
        # The layer that is updated last: shared weights are updated with the first layer that uses them.
        layer = min(sums.completed_with[start : stage.stop])
        source = next(index for index, other in enumerate(gradient_stages) if other.start <= layer)
        waits.append(UpdateWait(source, updated_s[gradient_stages[source].stop] - updated_s[layer], steps))
    return waits


def _next_state(
    times: StageTimes,
    waits: Sequence[UpdateWait],
    update_s: Sequence[float],
    num_devices: int,
    num_micro_batches: int,
    state: Sequence[float],
) -> list[float]:
    """Run one step; the state is as in `bounded_step_seconds`."""
    number = len(update_s)
    free, last, before = state[:num_devices], state[num_devices:-number], state[-number:]
    ready_s = [(last if wait.steps == 1 else before)[wait.source] + wait.after_s for wait in waits]
    after = list(free)
    ends = run_slots(times, [num_micro_batches], after, ready_s)
    updates: list[float] = []
    done_s = (
        last[-1] + update_s[-1]
    )  # one thread updates, so a step's updates follow those of the step before
    for end_s, seconds in zip(ends[-number:], update_s, strict=True):
        updates.append(max(end_s, done_s))
        done_s = updates[-1] + seconds
    return [*after, *updates, *last]
