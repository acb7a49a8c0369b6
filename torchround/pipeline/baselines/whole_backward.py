"""Schedules with bound stages whose backward is one task, with a flush and without.

With a flush each step starts and ends with an empty pipeline: GPipe (Huang et al., 2019), 1F1B
(PipeDream-flush), interleaved 1F1B (Megatron-LM) and Looped BFS (Lamy-Poirier, 2023). Without one, stages
take forwards and backwards as they arrive and update on their own: PipeDream's asynchronous 1F1B, and PACI
(Elam et al., 2026), which bounds how far weights move on between a micro-batch's forward and backward.

p devices, m micro-batches, v chunks per device, f and b a stage's forward and backward. In PACI's formulas
stage i counts from 1, and there are N stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain

from torchround.pipeline.baselines.device_bound import (
    BACKWARD,
    FORWARD,
    Action,
    BoundStage,
    SimulationSetup,
    bound_stages,
    bound_tasks,
    chunks_of,
)
from torchround.pipeline.baselines.schedule_report import Schedule
from torchround.pipeline.partition import split_evenly
from torchround.pipeline.timeline import Task, TaskKind


def gpipe(setup: SimulationSetup) -> Schedule:
    """Run all forwards, then all backwards: `T = (m + p - 1)(f + b)`, m micro-batches in flight on each device."""
    micro_batches = range(setup.num_micro_batches)
    orders = [
        actions(FORWARD, [device], micro_batches) + actions(BACKWARD, [device], micro_batches)
        for device in range(setup.num_devices)
    ]
    return flushed("gpipe", setup, bound_stages(setup, 1), orders)


def one_f_one_b(setup: SimulationSetup) -> Schedule:
    """Run p - i forwards on device i, then backward and forward in turn: GPipe's time, p - i in flight."""
    micro_batches = range(setup.num_micro_batches)
    orders = [
        alternate(
            actions(FORWARD, [device], micro_batches),
            actions(BACKWARD, [device], micro_batches),
            setup.num_devices - device,
        )
        for device in range(setup.num_devices)
    ]
    return flushed("1f1b", setup, bound_stages(setup, 1), orders)


def interleaved_1f1b(setup: SimulationSetup) -> Schedule:
    """Run 1F1B over v chunks per device, in groups of about p micro-batches: bubble `(p - 1)(f + b)` of a chunk.

    Device i runs `g (v - 1) + 2 (p - 1 - i)` forwards before its first pair of a forward and a backward.
    """
    p, m, chunks = setup.num_devices, setup.num_micro_batches, chunks_of(setup)
    # Groups of about p: with fewer micro-batches a device would wait for its next chunk's input.
    groups = split_evenly(m, max(1, m // p))
    orders = []
    for device in range(p):
        forwards = looped(FORWARD, groups, chunks, device, p)
        backwards = looped(BACKWARD, groups, chunks, device, p)
        warm_up = len(groups[0]) * (chunks - 1) + 2 * (p - 1 - device) + 1
        orders.append(alternate(forwards, backwards, warm_up))
    return flushed("interleaved_1f1b", setup, bound_stages(setup, chunks), orders)


def looped_bfs(setup: SimulationSetup) -> Schedule:
    """Run all micro-batches of a chunk before the next chunk; the backward in the reverse order."""
    stages = bound_stages(setup, chunks_of(setup))
    return flushed("looped_bfs", setup, stages, breadth_first_orders(setup))


def flushed(
    name: str, setup: SimulationSetup, stages: Sequence[BoundStage], orders: Sequence[Sequence[Action]]
) -> Schedule:
    """Make a schedule of one step of these orders."""
    return Schedule(
        name=name,
        num_devices=setup.num_devices,
        partition=[len(stage.layers) for stage in stages],
        tasks=lambda steps: bound_tasks(setup, stages, orders),
        warm_up=tuple(setup.num_devices - device for device in range(setup.num_devices)),
    )


def actions(kind: TaskKind, stages: Iterable[int], micro_batches: Sequence[int]) -> list[Action]:
    """List all micro-batches of one stage, then of the next."""
    return [Action(kind, stage, micro_batch) for stage in stages for micro_batch in micro_batches]


def looped(
    kind: TaskKind, groups: Iterable[Sequence[int]], chunks: int, device: int, num_devices: int
) -> list[Action]:
    """List the actions group by group through the device's chunks, deepest chunk first for a backward."""
    stages = range(device, num_devices * chunks, num_devices)
    ordered = stages if kind is FORWARD else stages[::-1]
    return list(chain.from_iterable(actions(kind, ordered, group) for group in groups))


def alternate(forwards: list[Action], backwards: list[Action], warm_up: int) -> list[Action]:
    """List `warm_up` forwards, then a backward and a forward in turn, then the remaining backwards."""
    order = forwards[:warm_up]
    for index, backward in enumerate(backwards):
        order.append(backward)
        order += forwards[warm_up + index : warm_up + index + 1]
    return order


def breadth_first_orders(setup: SimulationSetup) -> list[list[Action]]:
    """List each device's actions: chunk by chunk forward, then chunk by chunk backward, all micro-batches each time."""
    chunks, p = chunks_of(setup), setup.num_devices
    micro_batches = range(setup.num_micro_batches)
    return [
        looped(FORWARD, [micro_batches], chunks, device, p)
        + looped(BACKWARD, [micro_batches[::-1]], chunks, device, p)
        for device in range(p)
    ]


def async_1f1b(setup: SimulationSetup) -> Schedule:
    """Admit N micro-batches to the pipeline (PipeDream) and update after each backward, without another rule."""
    limits: list[int | None] = [setup.num_devices] + [None] * (setup.num_devices - 1)
    return _continuous("async_1f1b", setup, limits, backwards_per_update=1)


def paci(setup: SimulationSetup) -> Schedule:
    """Update after `a` local backwards; stage i admits a forward while `q_i < N + 1 - i` are unresolved.

    This bounds the drift by `ceil((N - i) / a)` (PACI equation 10, algorithm 1).
    """
    limits = [setup.num_devices - device for device in range(setup.num_devices)]
    accumulate = setup.accumulate or setup.num_micro_batches
    return _continuous("paci", setup, limits, accumulate)


def _continuous(
    name: str, setup: SimulationSetup, limits: Sequence[int | None], backwards_per_update: int
) -> Schedule:
    stages = bound_stages(setup, 1)

    def tasks(steps: int) -> list[Task]:
        micro_batches = range(steps * setup.num_micro_batches)
        # A stage that has both alternates, as 1F1B's order and
        # PACI's algorithm 1 do: the order is the priority.
        orders = [
            alternate(
                actions(FORWARD, [device], micro_batches),
                actions(BACKWARD, [device], micro_batches),
                setup.num_devices - device,
            )
            for device in range(setup.num_devices)
        ]
        return _admitted(bound_tasks(setup, stages, orders), orders, limits)

    return Schedule(
        name=name,
        num_devices=setup.num_devices,
        partition=[len(stage.layers) for stage in stages],
        tasks=tasks,
        continuous=True,
        ready_first=True,
        tail_steps=1 + setup.num_devices // setup.num_micro_batches,
        backwards_per_update=backwards_per_update,
    )


def _admitted(
    tasks: Sequence[Task], orders: Sequence[Sequence[Action]], limits: Sequence[int | None]
) -> list[Task]:
    """Admit a forward only with fewer than `limits[i]` unresolved ones: it waits for the backward that many back."""
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
