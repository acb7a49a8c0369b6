"""RoundPipe itself beside the baselines: `sync` from idle devices, `async` in its steady state."""

from collections.abc import Callable
from typing import Any

from torchround.pipeline.baselines.bound import Setting
from torchround.pipeline.baselines.measure import Schedule
from torchround.pipeline.dispatch import dispatch_tasks
from torchround.pipeline.partition import Partition
from torchround.pipeline.plan import make_plan
from torchround.pipeline.simulate import simulate
from torchround.pipeline.timeline import Task


def roundpipe_sync(setting: Setting) -> Schedule:
    """Every step reads the weights that the step before made, so it starts from idle devices."""
    partition, rounds = _choose(setting, "sync")
    tasks = _tasks(setting, partition, rounds, "sync")
    both = simulate(tasks(2), setting.num_devices).step_ends_s()
    one = simulate(tasks(1), setting.num_devices).makespan_s
    return Schedule(
        name="roundpipe_sync",
        num_devices=setting.num_devices,
        partition=_as_json(partition, rounds),
        tasks=tasks,
        update_s=max(0.0, both[1] - both[0] - one),
    )


def roundpipe_async(setting: Setting) -> Schedule:
    """Weights one step old (section 3.2): step t + 2 waits for step t's update, steps flow into each other."""
    partition, rounds = _choose(setting, "async")
    return Schedule(
        name="roundpipe_async",
        num_devices=setting.num_devices,
        partition=_as_json(partition, rounds),
        tasks=_tasks(setting, partition, rounds, "async"),
        continuous=True,
    )


def _choose(setting: Setting, update: str) -> tuple[Partition, int]:
    """The given partition, in rounds of N micro-batches as in the paper unless told otherwise; or a plan."""
    if setting.partition is not None:
        rounds = setting.rounds or max(1, setting.num_micro_batches // setting.num_devices)
        return setting.partition, rounds
    plan = make_plan(
        setting.costs,
        setting.num_devices,
        setting.num_micro_batches,
        update,
        setting.rounds or "auto",
        setting.limits,
    )
    return plan.partition, plan.rounds


def _tasks(setting: Setting, partition: Partition, rounds: int, update: str) -> Callable[[int], list[Task]]:
    def tasks(steps: int) -> list[Task]:
        return dispatch_tasks(
            partition,
            setting.costs,
            setting.num_devices,
            setting.num_micro_batches,
            rounds,
            recompute=setting.limits.recompute,
            update=update,
            steps=steps,
        )

    return tasks


def _as_json(partition: Partition, rounds: int) -> dict[str, Any]:
    return {
        "forward": list(partition.forward),
        "fused": partition.fused,
        "backward": list(partition.backward),
        "rounds": rounds,
    }
