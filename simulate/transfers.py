"""Transfers of schedules that keep weights or activations in host memory, as tasks beside those of the computation.

Mobius (Feng et al., 2023) brings a chunk's weights up before it runs and its gradients down after. PipeOffload
(Wan et al., 2025, section 4.2) offloads and reloads activations on one stream per device, in slots of their own. The
slots are planned on a grid in which each forward, backward and weight gradient takes one unit. The simulator then runs
the transfers in that order with their real durations.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, groupby
from math import ceil, floor, gcd
from operator import itemgetter

from torchround.planning.partition import SpanKind
from torchround.simulate.bound import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    SimulationSetup,
    Stage,
)
from torchround.simulate.timeline import Task

OFFLOAD, RELOAD = SpanKind.OFFLOAD, SpanKind.RELOAD

# An action with its start on the grid; for a transfer the start of its slot, and the stage whose activations move.
Planned = tuple[float, Action]
# A grid unit is a third of a chunk's forward and backward; the round trip of its activations is k of these.
UNITS_PER_CHUNK = 3


def swap_weights(
    tasks: Sequence[Task], setup: SimulationSetup, orders: Sequence[Sequence[Action]]
) -> list[Task]:
    """Keep weights and layer inputs on the host: add an upload before each run of a chunk, and a download of gradients.

    A device has room for two chunks' weights, so one uploads while the other computes.
    """
    # Layer inputs go down after the forward and come up before the backward, instead of staying on the device.
    swapped = []
    for task in tasks:
        held = max(task.holds_bytes, task.frees_bytes)
        scratch, moved = task.scratch_bytes + held, task.moves_bytes + held
        swapped.append(replace(task, holds_bytes=0, frees_bytes=0, scratch_bytes=scratch, moves_bytes=moved))
    rate = setup.pcie_bytes_per_s or float("inf")
    flat = [action for order in orders for action in order]
    ends: list[list[int]] = [[] for _ in orders]  # the last task of each run of a chunk, by device
    for _, group in groupby(range(len(flat)), key=lambda index: flat[index].stage):
        run = list(group)
        first, last = run[0], run[-1]
        start, before = swapped[first], ends[swapped[first].device]
        layers = setup.costs.layers[start.layers.start : start.layers.stop]
        weights = sum(layer.weight_bytes for layer in layers)
        gradients = sum(layer.gradient_bytes for layer in layers)
        upload = replace(
            start,
            kind=SpanKind.WEIGHTS,
            stream="upload",
            duration_s=weights / rate,
            after=((before[-2], 0.0),) if len(before) > 1 else (),
            scratch_bytes=0,
            moves_bytes=weights,
        )
        before.append(last)
        swapped.append(upload)
        swapped[first] = _waiting(start, len(swapped) - 1)
        if swapped[last].kind is BACKWARD:
            download = replace(upload, kind=SpanKind.GRADIENTS, stream="download", moves_bytes=gradients)
            swapped.append(replace(download, duration_s=gradients / rate, after=((last, 0.0),)))
    return swapped


def uniform_grid(num_devices: int, num_micro_batches: int, chunks: int) -> list[list[Planned]]:
    """Repeat GIS-H's building block every `3 v` units; return each device's actions in order of start.

    On each device forwards, backwards and weight gradients use one residue mod 3 each. Chunk follows chunk
    after `3 P` units, `P = ceil(d / 2)`. If P and v share a factor, that would meet another micro-batch's
    chunk, so three units are added. Ranks start late by up to `shift` so that both directions keep their
    order.
    """
    d, period = num_devices, -(-num_devices // 2)
    before_collision = chunks // gcd(chunks, period)
    begins = [3 * period * chunk + 3 * (chunk // before_collision) for chunk in range(chunks)]
    shift = max(0, 2 * d - 1 - 3 * period)
    grid = []
    for device in range(d):
        planned: list[Planned] = []
        late = device + min(device, shift)
        turn = late + begins[-1] + 3 * (d - 1 - device) + 1
        for micro_batch in range(num_micro_batches):
            for chunk, chunk_begin in enumerate(begins):
                begin = 3 * chunks * micro_batch + chunk_begin
                forward, backward = chunk * d + device, (chunks - 1 - chunk) * d + device
                planned.append((late + begin, Action(FORWARD, forward, micro_batch)))
                planned.append((turn + begin, Action(BACKWARD, backward, micro_batch)))
                planned.append((turn + begin + 1, Action(WEIGHT_GRADIENT, backward, micro_batch)))
        grid.append(sorted(planned, key=itemgetter(0)))
    return grid


def offload_activations(
    tasks: Sequence[Task],
    setup: SimulationSetup,
    stages: Sequence[Stage],
    grid: Sequence[Sequence[Planned]],
    offloaded_chunks: int,
) -> list[Task]:
    """Add the transfers of the first `offloaded_chunks` chunks of each device. Raises `ScheduleError` if k is too large.

    A reload starts after the task before its slot, and a forward after the offload before it. Otherwise a
    device could run ahead of the plan and fill its memory.
    """
    num_offloaded, chunks = offloaded_chunks * setup.num_devices, len(stages) // setup.num_devices
    rate = setup.pcie_bytes_per_s
    compute_s = [sum(task.duration_s for task in stage.values()) for stage in stages]
    one_way_s = [
        stage[FORWARD].holds_bytes / rate if rate else setup.offload_ratio * seconds / 2
        for stage, seconds in zip(stages, compute_s, strict=True)
    ]
    work_s = sum(compute_s[:num_offloaded])
    ratio = 2 * sum(one_way_s[:num_offloaded]) / work_s if work_s > 0 else 0.0
    if not 0 <= offloaded_chunks <= chunks:
        raise ScheduleError(f"offload_chunks = {offloaded_chunks} must be between 0 and {chunks}")
    if ratio * offloaded_chunks > chunks:
        raise ScheduleError(
            f"moving a chunk's activations to the host and back takes {ratio:.2f} x its compute (k): with "
            f"{offloaded_chunks} of {chunks} chunks offloaded the stream cannot keep up"
        )
    slot = max(ratio * UNITS_PER_CHUNK / 2, 1e-3)
    result = list(tasks)
    index_of = {action: index for index, (_, action) in enumerate(chain.from_iterable(grid))}
    for planned in grid:
        first, starts = index_of[planned[0][1]], [start for start, _ in planned]
        offloads: list[tuple[float, int]] = []  # (end of the slot, task)
        for start, transfer in _transfers(planned, num_offloaded, slot):
            forward, backward = (index_of[transfer._replace(kind=kind)] for kind in (FORWARD, BACKWARD))
            held, is_offload = tasks[forward].holds_bytes, transfer.kind is OFFLOAD
            if is_offload:
                offloads.append((start + slot, len(result)))
            else:
                result[backward] = _waiting(result[backward], len(result))
            before = forward if is_offload else first + bisect_right(starts, start - 1) - 1
            moved = replace(
                tasks[forward],
                kind=transfer.kind,
                stream="offload",
                duration_s=one_way_s[transfer.stage],
                after=((before, 0.0),),
                holds_bytes=0 if is_offload else held,
                scratch_bytes=0,
                frees_bytes=held if is_offload else 0,
                moves_bytes=held,
            )
            result.append(moved)
        # Forwards wait for the offloads whose slots end before them, so that memory stays as planned.
        for start, action in planned:
            ended = bisect_right(offloads, (start, len(result)))
            if action.kind is FORWARD and action.stage < num_offloaded and ended:
                result[index_of[action]] = _waiting(result[index_of[action]], offloads[ended - 1][1])
    return result


def _transfers(planned: Sequence[Planned], num_offloaded: int, slot: float) -> list[Planned]:
    """Assign slots, which are for an offload and for a reload in turn; return the transfers in order of time.

    Forwards from left to right take the first free offload slot after them, backwards from right to left
    the last free reload slot before them. If the reload would come first, the activations stay on the
    device.
    """
    pair = 2 * slot
    moved = [(start, action) for start, action in planned if action.stage < num_offloaded]
    offload_slot: dict[tuple[int, int], int] = {}
    free = 0
    for start, (kind, stage, micro_batch) in moved:
        if kind is FORWARD:
            free = max(free, ceil((start + 1) / pair))
            offload_slot[stage, micro_batch] = free
            free += 1
    transfers = []
    last = floor(planned[-1][0] / pair)
    for start, (kind, stage, micro_batch) in reversed(moved):
        if kind is BACKWARD:
            last = min(last, floor(start / pair)) - 1
            first = offload_slot[stage, micro_batch]
            # Equal numbers are legal: in each pair of slots the offload comes before the reload.
            if last >= first:
                transfers.append((first * pair, Action(OFFLOAD, stage, micro_batch)))
                transfers.append((last * pair + slot, Action(RELOAD, stage, micro_batch)))
    return sorted(transfers, key=itemgetter(0))


def _waiting(task: Task, before: int) -> Task:
    """Return the task with one more wait."""
    return replace(task, after=(*task.after, (before, 0.0)))
