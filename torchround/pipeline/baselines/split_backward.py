"""Schedules whose backward is two tasks: zero bubble (Qi et al., 2023) and PipeOffload (Wan et al., 2025).

The weights' gradients are tasks of their own, which fill what would be bubbles. GIS and GIS-H (PipeOffload
sections 3.1 and 3.2) generalise interleaved 1F1B with less memory. PO-H and PO-F repeat GIS-H's building
block uniformly and offload half or all of the chunks (sections 2 and 4.2).

f, b, w: a stage's forward, input gradient and weight gradient; p or d devices, v chunks per device, rank i
from 0; T_F, T_B, T_W of one chunk.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from torchround.pipeline.baselines.device_bound import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    SimulationSetup,
    bound_stages,
    bound_tasks,
    chunks_of,
)
from torchround.pipeline.baselines.offload import OffloadPlan, Planned
from torchround.pipeline.baselines.schedule_report import Schedule
from torchround.pipeline.baselines.whole_backward import alternate, flushed, looped
from torchround.pipeline.timeline import Task


def zb_h1(setup: SimulationSetup) -> Schedule:
    """Keep 1F1B's memory with bubble `(p - 1)(f + b - w)`: device i puts its weight gradients off by i micro-batches."""
    p = setup.num_devices
    orders = [_order(setup, device, warm_up=p - device, delay=device) for device in range(p)]
    return flushed("zb_h1", setup, bound_stages(setup, 1), orders)


def zb_h2(setup: SimulationSetup) -> Schedule:
    """Keep 2p - 1 micro-batches in flight: bubble `(p - 1)(f + b - 2w)`, 0 if all are equal.

    The bubble is that from step to step: the paper checks the update afterwards instead of waiting for all
    devices, so each device starts the next step as soon as its own stage is done.
    """
    p, m = setup.num_devices, setup.num_micro_batches
    stages = bound_stages(setup, 1)
    orders = [_order(setup, device, 2 * (p - device) - 1, 2 * device) for device in range(p)]

    # The numbers of micro-batches continue from step to step, because `bound_tasks` tells tasks apart by them.
    def tasks(steps: int) -> list[Task]:
        repeated = [
            [Action(a.kind, a.stage, a.micro_batch + step * m) for step in range(steps) for a in order]
            for order in orders
        ]
        return bound_tasks(setup, stages, repeated)

    partition = [len(stage.layers) for stage in stages]
    return Schedule("zb_h2", p, partition, tasks, continuous=True, tail_steps=1 + 2 * p // m)


def _order(setup: SimulationSetup, device: int, warm_up: int, delay: int) -> list[Action]:
    """List `warm_up` forwards, then backward, weight gradient of `delay` micro-batches ago and forward in turn.

    At the end come the remaining backwards and the weight gradients that were put off.
    """
    m = setup.num_micro_batches
    order = [Action(FORWARD, device, k) for k in range(min(warm_up, m))]
    pending = 0
    for k in range(m):
        order.append(Action(BACKWARD, device, k))
        if k - pending >= delay or warm_up + k >= m:
            order.append(Action(WEIGHT_GRADIENT, device, pending))
            pending += 1
        if warm_up + k < m:
            order.append(Action(FORWARD, device, warm_up + k))
    order += [Action(WEIGHT_GRADIENT, device, k) for k in range(pending, m)]
    return order


def gis(setup: SimulationSetup) -> Schedule:
    """Run groups of g micro-batches: `g (v - 1) + d - i` forwards first, at most `g (v - 1) + d` chunks kept.

    `ceil(d / 2) <= g <= d`. With g = d: bubble `(d - 1)(T_F + T_B)`; smaller g adds `(d - g)(v - 1)` units.
    """
    return _grouped("gis", setup, setup.group or setup.num_devices)


def gis_h(setup: SimulationSetup) -> Schedule:
    """Run GIS with the smallest group, `ceil(d / 2)`: about half of interleaved 1F1B's memory."""
    return _grouped("gis_h", setup, -(-setup.num_devices // 2))


def po_h(setup: SimulationSetup) -> Schedule:
    """Offload the first half of each device's chunks, which live longest: about `(v + 2) / (8 v)` stays."""
    return _offloading("po_h", setup, -(-chunks_of(setup) // 2))


def po_f(setup: SimulationSetup) -> Schedule:
    """Offload all chunks: a constant number of chunks stays, O(1 / (v d)) of the activations."""
    return _offloading("po_f", setup, chunks_of(setup))


def _grouped(name: str, setup: SimulationSetup, group: int) -> Schedule:
    d, m, chunks = setup.num_devices, setup.num_micro_batches, chunks_of(setup)
    if not -(-d // 2) <= group <= d:
        raise ScheduleError(f"a group of {group} micro-batches must be between {-(-d // 2)} and {d}")
    # A short last group would reverse the order on some devices,
    # so it is filled up here and its surplus removed below.
    groups = [range(first, first + group) for first in range(0, m, group)]
    orders = []
    for device in range(d):
        forwards = looped(FORWARD, groups, chunks, device, d)
        backwards = looped(BACKWARD, groups, chunks, device, d)
        order = alternate(forwards, backwards, group * (chunks - 1) + d - device)
        orders.append(_with_weight_gradients(action for action in order if action.micro_batch < m))
    return flushed(name, setup, bound_stages(setup, chunks), orders)


def _with_weight_gradients(order: Iterable[Action]) -> list[Action]:
    """Put each weight gradient right behind its backward, as in the original schedule."""
    result = []
    for action in order:
        result.append(action)
        if action.kind is BACKWARD:
            result.append(replace(action, kind=WEIGHT_GRADIENT))
    return result


def uniform_grid(num_devices: int, num_micro_batches: int, chunks: int) -> list[list[Planned]]:
    """Repeat GIS-H's building block every `3 v` units; return each device's actions in order of start.

    On each device forwards, backwards and weight gradients use one residue mod 3 each. Chunk follows chunk
    after `3 P` units, `P = ceil(d / 2)`. If P and v share a factor, that would meet another micro-batch's
    chunk, so three units are added. Ranks start late by up to `shift` so that both directions keep their
    order.
    """
    d, period = num_devices, -(-num_devices // 2)
    before_collision = chunks // gcd(chunks, period)
    shift = max(0, 2 * d - 1 - 3 * period)
    grid = []
    for device in range(d):
        planned = []
        late = device + min(device, shift)
        turn = late + _chunk_start(chunks - 1, period, before_collision) + 3 * (d - 1 - device) + 1
        for micro_batch in range(num_micro_batches):
            origin = 3 * chunks * micro_batch
            for chunk in range(chunks):
                begin = origin + _chunk_start(chunk, period, before_collision)
                forward, backward = chunk * d + device, (chunks - 1 - chunk) * d + device
                planned.append(Planned(late + begin, Action(FORWARD, forward, micro_batch)))
                planned.append(Planned(turn + begin, Action(BACKWARD, backward, micro_batch)))
                planned.append(Planned(turn + begin + 1, Action(WEIGHT_GRADIENT, backward, micro_batch)))
        grid.append(sorted(planned, key=lambda item: item.start))
    return grid


def _chunk_start(chunk: int, period: int, before_collision: int) -> int:
    return 3 * period * chunk + 3 * (chunk // before_collision)


def _offloading(name: str, setup: SimulationSetup, offloaded_chunks: int) -> Schedule:
    d, chunks = setup.num_devices, chunks_of(setup)
    stages = bound_stages(setup, chunks)
    grid = uniform_grid(d, setup.num_micro_batches, chunks)
    orders = [[item.action for item in planned] for planned in grid]
    plan = OffloadPlan.of(setup, stages, offloaded_chunks)

    def tasks(steps: int) -> list[Task]:
        built = bound_tasks(setup, stages, orders)
        first = 0
        for planned in grid:
            plan.add_transfers(built, first, planned)
            first += len(planned)
        return built

    return replace(flushed(name, setup, stages, orders), tasks=tasks)
