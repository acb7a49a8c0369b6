"""The schedules of other papers as one table, RoundPipe's two, and how each becomes tasks and a report.

With a flush each step starts and ends with an empty pipeline: GPipe (Huang et al., 2019), 1F1B (PipeDream-flush),
interleaved 1F1B (Megatron-LM), Looped BFS (Lamy-Poirier, 2023), zero bubble (Qi et al., 2023), PipeOffload's GIS and
its offloading forms (Wan et al., 2025), and Mobius (Feng et al., 2023). Without one, stages take what arrives and
update on their own: PipeDream's asynchronous 1F1B, and PACI (Elam et al., 2026), which bounds how far weights move on
between a micro-batch's forward and its backward. docs/schedules.md has the formulas that each one reaches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from torchround.planning.partition import SpanKind, split_evenly
from torchround.planning.planner import make_plan
from torchround.planning.update_modes import mode_of
from torchround.simulate.bound import (
    BACKWARD,
    FORWARD,
    WEIGHT_GRADIENT,
    Action,
    ScheduleError,
    SimulationSetup,
    bound_stages,
    bound_tasks,
)
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import Run, simulate, steady_state
from torchround.simulate.timeline import COMPUTE, Task
from torchround.simulate.transfers import offload_activations, swap_weights, uniform_grid


class Sizes(NamedTuple):
    """The numbers that orders depend on: p devices, m micro-batches, v chunks per device, groups of g micro-batches."""

    p: int
    m: int
    v: int
    g: int


@dataclass(frozen=True)
class Rule:
    """The order of each device's work: forwards first, then a backward and a forward in turn, then the other backwards.

    - `warm_up(sizes, i)`: how many forwards come first on device i, counted from 0; all of them unless it says otherwise.
    - `groups`: the micro-batches that take a chunk before any of them takes the next one; None: all of them.
    - `delay(i)`: micro-batches by which a weight gradient follows its backward; None: a backward is one task.
    - `looped`: several chunks per device; `last_first`: backwards take the micro-batches in reverse.
    - `tail`: above 0 if steps flow into each other; the last `tail` x N micro-batches run ahead, as nothing follows them.
    - `admits(p, i)`: with so many unresolved micro-batches device i starts no forward. It takes what is ready.
    - `updates(setup)`: backwards per update of a stage.
    - `offloaded(v)`: how many chunks PipeOffload moves to the host, in an order of its own.
    - `swapped`: weights and layer inputs are on the host, as Mobius keeps them.
    """

    warm_up: Callable[[Sizes, int], int] = lambda n, i: n.m * n.v
    groups: Callable[[SimulationSetup], Sequence[range]] | None = None
    delay: Callable[[int], int] | None = None
    looped: bool = False
    last_first: bool = False
    tail: int = 0
    admits: Callable[[int, int], int | None] | None = None
    updates: Callable[[SimulationSetup], int] | None = None
    offloaded: Callable[[int], int] | None = None
    swapped: bool = False


def _about_p(setup: SimulationSetup) -> list[range]:
    """Cut the step into groups of about p: with fewer micro-batches a device would wait for its next chunk's input."""
    return split_evenly(setup.num_micro_batches, max(1, setup.num_micro_batches // setup.num_devices))


def _of_size(setup: SimulationSetup, group: int | None) -> list[range]:
    """Cut the step into groups of `ceil(p / 2)` to p. The last is filled up: a short one would reverse an order."""
    least, most = -(-setup.num_devices // 2), setup.num_devices
    group = group or least
    if not least <= group <= most:
        raise ScheduleError(f"a group of {group} micro-batches must be between {least} and {most}")
    return [range(first, first + group) for first in range(0, setup.num_micro_batches, group)]


_1F1B = Rule(lambda n, i: n.p - i)
_BREADTH_FIRST = Rule(looped=True, last_first=True)
_GIS = Rule(
    lambda n, i: n.g * (n.v - 1) + n.p - i,
    groups=lambda setup: _of_size(setup, setup.group or setup.num_devices),
    delay=lambda i: 0,
    looped=True,
)
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "gpipe": Rule(),
        "1f1b": _1F1B,
        "interleaved_1f1b": Rule(lambda n, i: n.g * (n.v - 1) + 2 * (n.p - 1 - i) + 1, _about_p, looped=True),
        "looped_bfs": _BREADTH_FIRST,
        "zb_h1": replace(_1F1B, delay=lambda i: i),
        # The paper checks the update afterwards instead of waiting for all devices, so steps flow into each other.
        "zb_h2": Rule(lambda n, i: 2 * (n.p - i) - 1, delay=lambda i: 2 * i, tail=2),
        "gis": _GIS,
        "gis_h": replace(_GIS, groups=lambda setup: _of_size(setup, None)),
        # The first half of each device's chunks, which live longest, or all.
        "po_h": Rule(looped=True, offloaded=lambda v: -(-v // 2)),
        "po_f": Rule(looped=True, offloaded=lambda v: v),
        "mobius": replace(_BREADTH_FIRST, swapped=True),
        # A stage that has a forward and a backward alternates, as 1F1B's order and PACI's algorithm 1 do.
        "async_1f1b": replace(_1F1B, tail=1, admits=lambda p, i: None if i else p, updates=lambda setup: 1),
        # Stage i, counted from 1, admits a forward while q_i < N + 1 - i are unresolved (PACI, algorithm 1).
        "paci": replace(
            _1F1B,
            tail=1,
            admits=lambda p, i: p - i,
            updates=lambda setup: setup.accumulate or setup.num_micro_batches,
        ),
    }
)
SCHEDULES = (*RULES, "roundpipe_sync", "roundpipe_async")


@dataclass(frozen=True)
class Schedule:
    """The tasks of any number of steps, and how to read their run.

    - `tasks(steps)` builds the tasks.
    - `partition`: layers per virtual stage, or RoundPipe's ranges; goes to JSON as it is.
    - `ready_first`: devices take what is ready instead of following their order.
    - `tail_steps`: steps at the end of a continuous run that end sooner because nothing follows them; None: steps flush.
    - `backwards_per_update`: after how many of its backwards a stage updates its weights.
    - `update_s`: seconds per step that all devices wait for the optimizer.
    """

    name: str
    num_devices: int
    partition: Any
    tasks: Callable[[int], list[Task]]
    ready_first: bool = False
    tail_steps: int | None = None
    backwards_per_update: int | None = None
    update_s: float = 0.0


@dataclass(frozen=True)
class ScheduleReport:
    """The figures of one schedule.

    - `bubble`: share of all device time in which no task runs.
    - `peak_activation_bytes`: one figure per device.
    - `drift`: most updates of a stage between a micro-batch's forward and its backward there.
    - `moved_bytes`: per step, over all links.
    - `timeline`: one step, or several steps of a continuous schedule.
    """

    name: str
    makespan_s: float
    bubble: float
    peak_activation_bytes: tuple[int, ...]
    drift: int
    moved_bytes: float
    partition: Any
    timeline: Run


def simulate_schedule(name: str, setup: SimulationSetup) -> ScheduleReport:
    """Simulate one schedule and measure it.

    If the chunks of a looped schedule are not given, it gets one layer per stage if possible: as many chunks
    as layers allow, or one more with empty stages in front, whichever is faster.
    """
    if name not in RULES:
        return measure_schedule(_roundpipe(name, setup))
    rule = RULES[name]
    # Mobius always recomputes: its activations have no place to stay.
    setup = replace(setup, recompute=setup.recompute or rule.swapped)
    if not rule.looped:
        choices = {1}
    elif setup.stages is not None:
        choices = {max(1, len(setup.stages) // setup.num_devices)}
    elif setup.chunks is not None:
        choices = {setup.chunks}
    else:
        # Layers that do not divide among the devices leave a choice: some stages of two layers, or some empty ones.
        layers = setup.costs.num_layers
        choices = {max(1, layers // setup.num_devices), -(-layers // setup.num_devices)}
    reports = [measure_schedule(_bound(name, rule, setup, chunks)) for chunks in sorted(choices)]
    return min(reports, key=lambda report: report.makespan_s)


def _bound(name: str, rule: Rule, setup: SimulationSetup, chunks: int) -> Schedule:
    """Make the schedule of a rule with `chunks` stages on each device."""
    is_split = rule.delay is not None or rule.offloaded is not None
    stages = bound_stages(setup, chunks, is_split)
    p, m = setup.num_devices, setup.num_micro_batches
    groups = rule.groups(setup) if rule.groups else None
    sizes = Sizes(p, m, chunks, len(groups[0]) if groups else m)

    def tasks(steps: int) -> list[Task]:
        if rule.offloaded:
            grid = uniform_grid(p, m, chunks)
            made = bound_tasks(setup, stages, [[action for _, action in planned] for planned in grid])
            moved = rule.offloaded(chunks) if setup.offload_chunks is None else setup.offload_chunks
            return offload_activations(made, setup, stages, grid, moved)
        # Devices that take what is ready see all steps as one.
        length = m * steps if rule.admits else m
        orders = []
        for device in range(p):
            order = _order(rule, sizes, device, groups or [range(length)], length)
            firsts = range(0, m * steps, length)
            orders.append([Action(a.kind, a.stage, a.micro_batch + first) for first in firsts for a in order])
        made = bound_tasks(setup, stages, orders, rule.admits)
        return swap_weights(made, setup, orders) if rule.swapped else made

    return Schedule(
        name=name,
        num_devices=p,
        partition=[len(stage[FORWARD].layers) for stage in stages],
        tasks=tasks,
        ready_first=rule.admits is not None,
        tail_steps=1 + rule.tail * p // m if rule.tail else None,
        backwards_per_update=rule.updates(setup) if rule.updates else None,
    )


def _order(rule: Rule, n: Sizes, device: int, groups: Sequence[range], length: int) -> list[Action]:
    """List a device's actions with `length` micro-batches: forwards, a backward and a forward in turn, more backwards.

    A weight gradient follows a backward, that of `delay` backwards ago; those that were put off come at the end.
    """
    own = range(device, n.p * n.v, n.p)
    forwards = [Action(FORWARD, stage, k) for group in groups for stage in own for k in group]
    turns = [group[::-1] if rule.last_first else group for group in groups]
    backwards = [Action(BACKWARD, stage, k) for group in turns for stage in own[::-1] for k in group]
    weight_gradients = [action._replace(kind=WEIGHT_GRADIENT) for action in backwards]
    warm_up, delay = rule.warm_up(n, device), rule.delay(device) if rule.delay else None
    order, done = forwards[:warm_up], 0
    for index, backward in enumerate(backwards):
        order.append(backward)
        forward = forwards[warm_up + index : warm_up + index + 1]
        if delay is not None and (index - done >= delay or not forward):
            order.append(weight_gradients[done])
            done += 1
        order += forward
    order += weight_gradients[done:] if delay is not None else []
    return [action for action in order if action.micro_batch < length]


def _roundpipe(name: str, setup: SimulationSetup) -> Schedule:
    """Make RoundPipe's schedule (section 3.2) with the given partition, or that of a plan.

    A step of `sync` reads the weights of the step before, and so starts from idle devices. Step t + 2 of `async`
    waits for step t's update, without a flush. A given partition runs in rounds of N micro-batches, as in the paper.
    """
    update = name.removeprefix("roundpipe_")
    has_flush, partition, rounds = mode_of(update).has_flush, setup.partition, setup.rounds
    if partition is None:
        sizes = setup.num_devices, setup.num_micro_batches
        plan = make_plan(setup.costs, *sizes, update, rounds or "auto", setup.limits)
        partition, rounds = plan.partition, plan.rounds
    rounds = rounds or max(1, setup.num_micro_batches // setup.num_devices)

    def tasks(steps: int) -> list[Task]:
        sizes = setup.num_devices, setup.num_micro_batches, rounds
        recompute = setup.limits.recompute
        return dispatch_tasks(partition, setup.costs, *sizes, recompute=recompute, update=update, steps=steps)

    update_s = 0.0
    if has_flush:
        # The second of two steps waits for the first one's update, a lone step for none.
        both = simulate(tasks(2), setup.num_devices).step_ends_s()
        update_s = max(0.0, both[1] - both[0] - simulate(tasks(1), setup.num_devices).makespan_s)
    shown = {**asdict(partition), "rounds": rounds}
    return Schedule(
        name, setup.num_devices, shown, tasks, tail_steps=None if has_flush else 0, update_s=update_s
    )


def measure_schedule(schedule: Schedule) -> ScheduleReport:
    """Simulate a schedule and read everything off its timeline.

    A schedule that flushes is measured over one step from idle devices, a continuous one once the time from step to
    step has settled.
    """
    devices, ready_first, tail_steps = schedule.num_devices, schedule.ready_first, schedule.tail_steps
    if tail_steps is not None:
        line, makespan_s, steps = steady_state(schedule.tasks, devices, ready_first, tail_steps)
    else:
        line, steps = simulate(schedule.tasks(1), devices, ready_first), 1
        makespan_s = line.makespan_s + schedule.update_s
    total_s = devices * makespan_s
    # Rounding may leave a bubble just below 0.
    bubble = max(0.0, 1 - line.work_s / steps / total_s) if total_s > 0 else 0.0
    return ScheduleReport(
        name=schedule.name,
        makespan_s=makespan_s,
        bubble=bubble,
        peak_activation_bytes=line.peak_bytes(),
        drift=_drift(line, schedule.backwards_per_update),
        moved_bytes=sum(task.moves_bytes for task in line.tasks) / steps,
        partition=schedule.partition,
        timeline=line,
    )


def _drift(line: Run, backwards_per_update: int | None) -> int:
    """Count the most updates of a device's stage from a micro-batch's forward to its backward (PACI section 3.1).

    The count follows the order in which each device ran its tasks; it is 0 if no update falls inside a step.
    """
    if backwards_per_update is None:
        return 0
    drift = 0
    backwards = [0] * line.num_devices
    version_read: dict[tuple[int, int], int] = {}
    # An empty stage has no weights.
    computed = [index for index, task in enumerate(line.tasks) if task.stream == COMPUTE and task.layers]
    # A task that takes no time comes before one that starts at the same moment.
    for index in sorted(computed, key=lambda i: (line.start_s[i], line.end_s[i], i)):
        task = line.tasks[index]
        version = backwards[task.device] // backwards_per_update
        if task.kind is SpanKind.FORWARD:
            version_read[task.device, task.micro_batch] = version
        elif task.kind is SpanKind.BACKWARD:
            drift = max(drift, version - version_read[task.device, task.micro_batch])
            backwards[task.device] += 1
    return drift
