"""1F1B without a flush: stages take forwards and backwards as they arrive and update on their own.

Where both have arrived, a stage alternates, as 1F1B's order and PACI's algorithm 1 do. PipeDream's asynchronous
1F1B, and PACI (Elam et al., 2026), which bounds how far weights move on between a micro-batch's forward and
backward. Stage i counts from 1 in the formulas, N stages.
"""

from collections.abc import Sequence
from dataclasses import replace

from torchround.pipeline.baselines.bound import (
    BACKWARD,
    FORWARD,
    Action,
    Setting,
    bound_stages,
    bound_tasks,
)
from torchround.pipeline.baselines.flush import actions, alternate
from torchround.pipeline.baselines.measure import Schedule
from torchround.pipeline.timeline import Task


def async_1f1b(setting: Setting) -> Schedule:
    """N micro-batches in the pipeline at once (PipeDream), an update after every backward, no other rule."""
    limits: list[int | None] = [setting.num_devices] + [None] * (setting.num_devices - 1)
    return _continuous("async_1f1b", setting, limits, backwards_per_update=1)


def paci(setting: Setting) -> Schedule:
    """Update after `a` local backwards; stage i admits a forward while `q_i < N + 1 - i` are unresolved.

    Bounds the drift by `ceil((N - i) / a)` (PACI equation 10, algorithm 1).
    """
    limits = [setting.num_devices - device for device in range(setting.num_devices)]
    accumulate = setting.accumulate or setting.num_micro_batches
    return _continuous("paci", setting, limits, accumulate)


def _continuous(
    name: str, setting: Setting, limits: Sequence[int | None], backwards_per_update: int
) -> Schedule:
    stages = bound_stages(setting, 1)

    def tasks(steps: int) -> list[Task]:
        micro_batches = range(steps * setting.num_micro_batches)
        orders = [
            alternate(
                actions(FORWARD, [device], micro_batches),
                actions(BACKWARD, [device], micro_batches),
                setting.num_devices - device,
            )
            for device in range(setting.num_devices)
        ]
        return _admitted(bound_tasks(setting, stages, orders), orders, limits)

    return Schedule(
        name=name,
        num_devices=setting.num_devices,
        partition=[len(stage.layers) for stage in stages],
        tasks=tasks,
        continuous=True,
        ready_first=True,
        tail_steps=1 + setting.num_devices // setting.num_micro_batches,
        backwards_per_update=backwards_per_update,
    )


def _admitted(
    tasks: Sequence[Task], orders: Sequence[Sequence[Action]], limits: Sequence[int | None]
) -> list[Task]:
    """Fewer than `limits[i]` unresolved forwards before the next: it waits for the backward that many back."""
    flat = [action for order in orders for action in order]
    index_of = {action: index for index, action in enumerate(flat)}
    admitted = []
    for action, task in zip(flat, tasks, strict=True):
        limit = limits[task.device]
        if action.kind is FORWARD and limit is not None and action.micro_batch >= limit:
            backward = index_of[Action(BACKWARD, action.stage, action.micro_batch - limit)]
            task = replace(task, after=(*task.after, (backward, 0.0)))
        admitted.append(task)
    return admitted
