"""Schedules that keep weights in host memory: Mobius, whose stages are bound to devices, and RoundPipe.

Mobius (Feng et al., 2023) is Looped BFS: a chunk's weights go up before it runs and its gradients come down
after. A device has room for two chunks' weights, so one uploads while the other computes. Layer inputs wait
on the host for the backward.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torchround.pipeline.baselines.device_bound import (
    BACKWARD,
    Action,
    BoundStage,
    SimulationSetup,
    bound_stages,
    bound_tasks,
    chunks_of,
)
from torchround.pipeline.baselines.schedule_report import Schedule
from torchround.pipeline.baselines.whole_backward import breadth_first_orders, flushed
from torchround.pipeline.partition import Partition
from torchround.pipeline.planner import make_plan
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.simulation.simulator import simulate
from torchround.pipeline.timeline import Task, TaskKind


def mobius(setup: SimulationSetup) -> Schedule:
    """Run Looped BFS with swapped weights; it always recomputes, because its activations have no place to stay."""
    setup = replace(setup, recompute=True)
    stages, orders = bound_stages(setup, chunks_of(setup)), breadth_first_orders(setup)
    schedule = flushed("mobius", setup, stages, orders)
    return replace(schedule, tasks=lambda steps: _swapped_tasks(setup, stages, orders))


def _swapped_tasks(
    setup: SimulationSetup, stages: Sequence[BoundStage], orders: Sequence[Sequence[Action]]
) -> list[Task]:
    tasks = [_on_host(task) for task in bound_tasks(setup, stages, orders)]
    first = 0
    for order in orders:
        _swap(tasks, _stays(order, first), stages, setup)
        first += len(order)
    return tasks


def _on_host(task: Task) -> Task:
    """Move layer inputs down after the forward and up before the backward, instead of keeping them on the device."""
    held = task.frees_bytes if task.kind is BACKWARD else task.holds_bytes
    scratch, moved = task.scratch_bytes + held, task.moves_bytes + held
    return replace(task, holds_bytes=0, frees_bytes=0, scratch_bytes=scratch, moves_bytes=moved)


def _stays(order: Sequence[Action], first: int) -> list[tuple[int, list[int]]]:
    """Group an order into stays: a stage whose weights stay on its device, and the tasks that use them in a row."""
    stays: list[tuple[int, list[int]]] = []
    for index, action in enumerate(order, start=first):
        if not stays or stays[-1][0] != action.stage:
            stays.append((action.stage, []))
        stays[-1][1].append(index)
    return stays


def _swap(
    tasks: list[Task],
    stays: Sequence[tuple[int, list[int]]],
    stages: Sequence[BoundStage],
    setup: SimulationSetup,
) -> None:
    """Add an upload for each stay, and a download of gradients after each backward stay."""
    rate = setup.pcie_bytes_per_s
    for position, (stage_index, users) in enumerate(stays):
        stage, first, last = stages[stage_index], users[0], users[-1]
        # A device has room for two chunks' weights, so an upload
        # waits for the end of the stay before the previous one.
        room = ((stays[position - 2][1][-1], 0.0),) if position >= 2 else ()
        upload = replace(
            tasks[first],
            kind=TaskKind.WEIGHTS,
            stream="upload",
            duration_s=stage.weight_bytes / rate if rate else 0.0,
            after=room,
            scratch_bytes=0,
            moves_bytes=stage.weight_bytes,
        )
        tasks.append(upload)
        starter = tasks[first]
        tasks[first] = replace(starter, after=(*starter.after, (len(tasks) - 1, 0.0)))
        if tasks[last].kind is BACKWARD:
            download = replace(
                upload,
                kind=TaskKind.GRADIENTS,
                stream="download",
                duration_s=stage.gradient_bytes / rate if rate else 0.0,
                after=((last, 0.0),),
                moves_bytes=stage.gradient_bytes,
            )
            tasks.append(download)


def roundpipe_sync(setup: SimulationSetup) -> Schedule:
    """Run steps that each read the weights of the step before, and so start from idle devices."""
    partition, rounds = _choose(setup, "sync")
    tasks = _tasks(setup, partition, rounds, "sync")
    # The second of two steps waits for the first one's update, a
    # lone step for none: the difference is the exposed update.
    both = simulate(tasks(2), setup.num_devices).step_ends_s()
    one = simulate(tasks(1), setup.num_devices).makespan_s
    return Schedule(
        name="roundpipe_sync",
        num_devices=setup.num_devices,
        partition=_as_json(partition, rounds),
        tasks=tasks,
        update_s=max(0.0, both[1] - both[0] - one),
    )


def roundpipe_async(setup: SimulationSetup) -> Schedule:
    """Run steps with weights one step old (section 3.2): step t + 2 waits for step t's update, without a flush."""
    partition, rounds = _choose(setup, "async")
    return Schedule(
        name="roundpipe_async",
        num_devices=setup.num_devices,
        partition=_as_json(partition, rounds),
        tasks=_tasks(setup, partition, rounds, "async"),
        continuous=True,
    )


def _choose(setup: SimulationSetup, update: str) -> tuple[Partition, int]:
    """Return the given partition, by default in rounds of N micro-batches as in the paper; otherwise a plan's."""
    if setup.partition is not None:
        rounds = setup.rounds or max(1, setup.num_micro_batches // setup.num_devices)
        return setup.partition, rounds
    plan = make_plan(
        setup.costs,
        setup.num_devices,
        setup.num_micro_batches,
        update,
        setup.rounds or "auto",
        setup.limits,
    )
    return plan.partition, plan.rounds


def _tasks(
    setup: SimulationSetup, partition: Partition, rounds: int, update: str
) -> Callable[[int], list[Task]]:
    def tasks(steps: int) -> list[Task]:
        return dispatch_tasks(
            partition,
            setup.costs,
            setup.num_devices,
            setup.num_micro_batches,
            rounds,
            recompute=setup.limits.recompute,
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
