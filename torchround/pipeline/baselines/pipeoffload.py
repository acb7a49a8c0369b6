"""PipeOffload's schedules (Wan et al., 2025): interleaving with less memory, and offload of activations.

GIS and GIS-H (sections 3.1, 3.2) generalise interleaved 1F1B with a split backward; PO-H and PO-F repeat
GIS-H's building block uniformly and offload half or all of the chunks (sections 2 and 4.2). d devices, v
chunks per device, rank i from 0, T_F, T_B, T_W of one chunk.
"""

from collections.abc import Iterable
from dataclasses import replace
from math import gcd

from torchround.pipeline.baselines.bound import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    Setting,
    bound_stages,
    bound_tasks,
    chunks_of,
)
from torchround.pipeline.baselines.flush import alternate, flushed, looped
from torchround.pipeline.baselines.measure import Schedule
from torchround.pipeline.baselines.offload import OffloadPlan, Planned
from torchround.pipeline.timeline import Task


def gis(setting: Setting) -> Schedule:
    """Groups of g micro-batches: `g (v - 1) + d - i` forwards first, at most `g (v - 1) + d` chunks kept.

    `ceil(d / 2) <= g <= d`. With g = d: bubble `(d - 1)(T_F + T_B)`; smaller g adds `(d - g)(v - 1)` units.
    """
    return _grouped("gis", setting, setting.group or setting.num_devices)


def gis_h(setting: Setting) -> Schedule:
    """The smallest group, `ceil(d / 2)`: about half of interleaved 1F1B's memory."""
    return _grouped("gis_h", setting, -(-setting.num_devices // 2))


def po_h(setting: Setting) -> Schedule:
    """The first half of each device's chunks, those that live longest, is offloaded: about `(v + 2) / (8 v)`."""
    return _offloading("po_h", setting, -(-chunks_of(setting) // 2))


def po_f(setting: Setting) -> Schedule:
    """All chunks are offloaded: a constant number of chunks stays, O(1 / (v d)) of the activations."""
    return _offloading("po_f", setting, chunks_of(setting))


def _grouped(name: str, setting: Setting, group: int) -> Schedule:
    d, m, chunks = setting.num_devices, setting.num_micro_batches, chunks_of(setting)
    if not -(-d // 2) <= group <= d:
        raise ScheduleError(f"a group of {group} micro-batches does not lie between {-(-d // 2)} and {d}")
    # A short last group would turn the order of some devices around, so it is filled up and taken out again.
    groups = [range(first, first + group) for first in range(0, m, group)]
    orders = []
    for device in range(d):
        forwards = looped(FORWARD, groups, chunks, device, d)
        backwards = looped(BACKWARD, groups, chunks, device, d)
        order = alternate(forwards, backwards, group * (chunks - 1) + d - device)
        orders.append(_with_weight_gradients(action for action in order if action.micro_batch < m))
    return flushed(name, setting, bound_stages(setting, chunks), orders)


def _with_weight_gradients(order: Iterable[Action]) -> list[Action]:
    """Each weight gradient right behind its backward, as in the original schedule."""
    result = []
    for action in order:
        result.append(action)
        if action.kind is BACKWARD:
            result.append(replace(action, kind=WEIGHT_GRADIENT))
    return result


def uniform_grid(num_devices: int, num_micro_batches: int, chunks: int) -> list[list[Planned]]:
    """GIS-H's building block repeated every `3 v` units, per device in order of start.

    On each device forwards, backwards and weight gradients use one residue mod 3 each. Chunk follows chunk
    after `3 P` units, `P = ceil(d / 2)`; where that would meet another micro-batch's (P and v share a factor)
    three units are added. Ranks start late by up to `shift` so that both directions keep their order.
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


def _offloading(name: str, setting: Setting, offloaded_chunks: int) -> Schedule:
    d, chunks = setting.num_devices, chunks_of(setting)
    stages = bound_stages(setting, chunks)
    grid = uniform_grid(d, setting.num_micro_batches, chunks)
    orders = [[item.action for item in planned] for planned in grid]
    plan = OffloadPlan.of(setting, stages, offloaded_chunks)

    def tasks(steps: int) -> list[Task]:
        built = bound_tasks(setting, stages, orders)
        first = 0
        for planned in grid:
            plan.add_transfers(built, first, planned)
            first += len(planned)
        return built

    return replace(flushed(name, setting, stages, orders), tasks=tasks)
