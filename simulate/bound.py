"""The common part of all schedules that bind stages to devices: virtual stage s always runs on device s mod N.

A schedule is then an order of actions per device; this module cuts the layers into stages, and adds durations, bytes
and dependencies to the actions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

from torchround.planning.costs import Costs
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition, SpanKind
from torchround.simulate.timeline import Task

FORWARD, BACKWARD, WEIGHT_GRADIENT = SpanKind.FORWARD, SpanKind.BACKWARD, SpanKind.WEIGHT_GRADIENT

# Share of a layer's backward that makes the weights' gradients: one of two equal matrix products.
WEIGHT_GRADIENT_SHARE = 0.5


class ScheduleError(ValueError):
    """A schedule that cannot be built from the given numbers."""


@dataclass(frozen=True)
class SimulationSetup:
    """The model, the devices and the options of a simulation; each schedule reads the options that concern it.

    - `recompute`: keep only layer inputs and run each layer's forward again in the backward, except the last
      layer's (the head). If False, activations are kept, as in the zero-bubble, PipeOffload and PACI papers.
    - `chunks`: virtual stages per device (v) of the looped schedules; None: as many as there are layers for.
    - `stages`: layers of each virtual stage, zeros allowed; None: the split whose slowest stage is fastest.
    - `group`: micro-batches that GIS takes through a chunk at a time (g); None: N.
    - `offload_ratio`: PipeOffload's k: round trip of a chunk's activations over its forward and backward time.
    - `offload_chunks`: chunks per device that PipeOffload moves to the host; None: half or all of them.
    - `pcie_bytes_per_s`: one direction; if given, transfers take the time of their bytes and k is not read.
    - `accumulate`: PACI's a: local backwards per update; None: all micro-batches of a step.
    - `partition`, `rounds`: RoundPipe's; None: the planner's choice within `limits`.
    - `limits`: memory limits of RoundPipe's plan, and how it recomputes.
    """

    costs: Costs
    num_devices: int
    num_micro_batches: int
    recompute: bool = True
    chunks: int | None = None
    stages: tuple[int, ...] | None = None
    group: int | None = None
    offload_ratio: float = 1.0
    offload_chunks: int | None = None
    pcie_bytes_per_s: float | None = None
    accumulate: int | None = None
    partition: Partition | None = None
    rounds: int | None = None
    limits: MemoryLimits = field(default_factory=MemoryLimits)

    def __post_init__(self) -> None:
        num_layers = len(self.costs.layers)
        for name in ("num_devices", "num_micro_batches", "chunks", "group", "accumulate", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ScheduleError(f"{name} = {value} must be at least 1")
        if self.offload_ratio <= 0:
            raise ScheduleError(f"offload_ratio = {self.offload_ratio} must be above 0")
        if self.rounds is not None and self.rounds > self.num_micro_batches:
            raise ScheduleError(f"{self.rounds} rounds of only {self.num_micro_batches} micro-batches")
        if self.stages is not None and sum(self.stages) != num_layers:
            raise ScheduleError(f"stages hold {sum(self.stages)} layers, the costs {num_layers}")
        if self.partition is not None and self.partition.num_layers != num_layers:
            raise ScheduleError(
                f"the partition holds {self.partition.num_layers} layers, the costs {num_layers}"
            )


# One virtual stage: its tasks for one micro-batch, by kind, without their waits.
Stage = dict[SpanKind, Task]


class Action(NamedTuple):
    """One entry of a device's order; the numbers of micro-batches continue from step to step."""

    kind: SpanKind
    stage: int
    micro_batch: int


def bound_stages(setup: SimulationSetup, chunks: int, is_split: bool) -> list[Stage]:
    """Build the setup's stages, or N x `chunks` stages whose slowest one is as fast as possible.

    With `is_split` the weights' gradients are tasks of their own. They free what the backward has rebuilt and used.
    """
    layers, devices = setup.costs.layers, setup.num_devices
    counts = setup.stages
    if counts is None:
        # The last layer is the head, whose activations are used at once and so never recomputed.
        seconds = [layer.forward_s * (2 if setup.recompute else 1) + layer.backward_s for layer in layers]
        seconds[-1] = layers[-1].forward_s + layers[-1].backward_s
        # Surplus stages come first: an empty stage passes its input on, and the head stays on the last device.
        surplus = max(0, devices * chunks - len(layers))
        counts = (0,) * surplus + fastest_split(seconds, devices * chunks - surplus)
    if len(counts) % devices:
        raise ScheduleError(f"{len(counts)} stages do not divide among {devices} devices")
    inputs = [0, *(layer.boundary_bytes for layer in layers)]
    stages = []
    for index, (start, stop) in enumerate(pairwise(accumulate(counts, initial=0))):
        cut = min(stop, len(layers) - 1) if setup.recompute else start
        rebuilt = [layer.activation_bytes for layer in layers[start:cut]]
        kept = [layer.activation_bytes for layer in layers[max(start, cut) : stop]]
        held = sum(kept) + sum(inputs[start:cut])
        forward_s = sum(layer.forward_s for layer in layers[start:stop])
        backward_s = sum(layer.backward_s for layer in layers[start:stop])
        late_s = WEIGHT_GRADIENT_SHARE * backward_s if is_split else 0.0
        early_s = sum(layer.forward_s for layer in layers[start:cut]) + (backward_s - late_s)
        most = max(rebuilt, default=0)
        # A gradient is as large as its activation.
        moved = inputs[start] + (inputs[stop] if index + 1 < len(counts) else 0) if devices > 1 else 0
        device, own = index % devices, range(start, stop)
        made = [
            Task(device, FORWARD, forward_s, own, 0, holds_bytes=held, scratch_bytes=most, moves_bytes=moved),
            Task(device, BACKWARD, early_s, own, 0, scratch_bytes=most, frees_bytes=held, moves_bytes=moved),
            Task(device, WEIGHT_GRADIENT, late_s, own, 0, frees_bytes=held + sum(rebuilt)),
        ]
        if is_split:
            made[1] = replace(made[1], holds_bytes=sum(rebuilt), scratch_bytes=0, frees_bytes=0)
        stages.append({task.kind: task for task in made})
    return stages


def fastest_split(seconds: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """Cut layers into non-empty stages so that the slowest one is as fast as possible (PACI equation 15).

    Among equals the split with the earliest cuts wins.
    """
    sums = list(accumulate(seconds, initial=0.0))

    @cache
    def best(stop: int, stages: int) -> tuple[float, int, tuple[int, ...]]:
        """Cut the first `stop` layers: the slowest stage, where the last one starts, and the layers of each."""
        if stages == 1:
            return sums[stop], 0, (stop,)
        cuts = ((start, best(start, stages - 1)) for start in range(stages - 1, stop))
        return min(
            (max(slowest_s, sums[stop] - sums[start]), start, (*counts, stop - start))
            for start, (slowest_s, _, counts) in cuts
        )

    return best(len(seconds), num_stages)[2]


def bound_tasks(
    setup: SimulationSetup,
    stages: Sequence[Stage],
    orders: Sequence[Sequence[Action]],
    admits: Callable[[int, int], int | None] | None = None,
) -> list[Task]:
    """Turn the orders, one per device, into tasks; the position in an order is also the priority.

    A forward waits for the previous stage. A backward, with its recomputation, waits for its own forward and
    for the next stage. Both pay a hop if the device changes. A weight gradient waits for its backward. With
    `admits(N, i)` a forward on device i waits for the backward that many micro-batches back.
    """
    flat = [(action, position) for order in orders for position, action in enumerate(order)]
    index_of = {action: index for index, (action, _) in enumerate(flat)}
    hop_s = setup.costs.hop_s if setup.num_devices > 1 else 0.0
    tasks = []
    for (kind, number, k), position in flat:
        task, step = stages[number][kind], k // setup.num_micro_batches
        if kind is FORWARD:
            waits = [(Action(FORWARD, number - 1, k), hop_s)]
            limit = admits(setup.num_devices, task.device) if admits else None
            waits += [] if limit is None else [(Action(BACKWARD, number, k - limit), 0.0)]
        elif kind is BACKWARD:
            waits = [(Action(FORWARD, number, k), 0.0), (Action(BACKWARD, number + 1, k), hop_s)]
        else:
            waits = [(Action(BACKWARD, number, k), 0.0)]
        # Nothing comes before the first stage, after the last one, or before the first micro-batch.
        after = tuple((index_of[action], lag_s) for action, lag_s in waits if action in index_of)
        tasks.append(replace(task, micro_batch=k, step=step, priority=position, after=after))
    return tasks
