"""The common part of all schedules that bind stages to devices: virtual stage s always runs on device s mod N.

A schedule is then an order of actions per device; this module adds durations, bytes and dependencies.
`bind_stages` cuts the layers into stages.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.partition import Partition
from torchround.pipeline.timeline import Dependency, Task, TaskKind

FORWARD, BACKWARD, WEIGHT_GRADIENT = TaskKind.FORWARD, TaskKind.BACKWARD, TaskKind.WEIGHT_GRADIENT

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
    - `offload_ratio`: PipeOffload's k: round trip of a chunk's activations over its forward and backward
      time.
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


@dataclass(frozen=True)
class BoundStage:
    """One virtual stage; seconds and bytes per micro-batch, weights and gradients per upload or download.

    - `held_bytes`: kept on the device from the forward to the backward.
    - `rebuilt_bytes`: activations that recomputation makes again; 0 if nothing is recomputed.
    - `largest_bytes`: the same for one layer at a time.
    """

    device: int
    layers: range
    forward_s: float
    recompute_s: float
    backward_s: float
    held_bytes: int
    rebuilt_bytes: int
    largest_bytes: int
    input_bytes: int
    output_bytes: int
    weight_bytes: int
    gradient_bytes: int


@dataclass(frozen=True)
class Action:
    """One entry of a device's order; the numbers of micro-batches continue from step to step."""

    kind: TaskKind
    stage: int
    micro_batch: int


def chunks_of(setup: SimulationSetup) -> int:
    """Return the virtual stages per device of a looped schedule."""
    if setup.stages is not None:
        return max(1, len(setup.stages) // setup.num_devices)
    if setup.chunks is not None:
        return setup.chunks
    return max(1, len(setup.costs.layers) // setup.num_devices)


def bound_stages(setup: SimulationSetup, chunks: int) -> list[BoundStage]:
    """Build the setup's stages, or N x `chunks` stages cut by PACI's min-max partition (appendix D.5)."""
    counts = setup.stages
    if counts is None:
        counts = _fastest_split(setup, setup.num_devices * chunks)
    if len(counts) % setup.num_devices:
        raise ScheduleError(f"{len(counts)} stages do not divide among {setup.num_devices} devices")
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        _stage(setup, index % setup.num_devices, range(start, start + count))
        for index, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def _fastest_split(setup: SimulationSetup, num_stages: int) -> tuple[int, ...]:
    """Cut the layers so that the slowest stage is as fast as possible; surplus stages come first and are empty."""
    layers = setup.costs.layers
    # The last layer is the head, whose activations are used at once and so never recomputed.
    seconds = [layer.forward_s * (2 if setup.recompute else 1) + layer.backward_s for layer in layers]
    seconds[-1] = layers[-1].forward_s + layers[-1].backward_s
    # Surplus stages come first: an empty stage passes its input on, and the head stays on the last device.
    if num_stages >= len(layers):
        return (0,) * (num_stages - len(layers)) + (1,) * len(layers)
    return bind_stages(seconds, [0] * len(seconds), num_stages, None)


def _stage(setup: SimulationSetup, device: int, indices: range) -> BoundStage:
    layers = setup.costs.layers
    mine = [layers[index] for index in indices]
    recomputed = [index for index in indices if setup.recompute and index < len(layers) - 1]
    kept = [index for index in indices if index not in recomputed]
    inputs = [0, *(layer.boundary_bytes for layer in layers)]
    activations = [layer.activation_bytes for layer in layers]
    return BoundStage(
        device=device,
        layers=indices,
        forward_s=sum(layer.forward_s for layer in mine),
        recompute_s=sum(layers[index].forward_s for index in recomputed),
        backward_s=sum(layer.backward_s for layer in mine),
        held_bytes=sum(activations[index] for index in kept) + sum(inputs[index] for index in recomputed),
        rebuilt_bytes=sum(activations[index] for index in recomputed),
        largest_bytes=max((activations[index] for index in recomputed), default=0),
        input_bytes=inputs[indices.start],
        output_bytes=inputs[indices.stop],
        weight_bytes=sum(layer.weight_bytes for layer in mine),
        gradient_bytes=sum(layer.gradient_bytes for layer in mine),
    )


def bound_tasks(
    setup: SimulationSetup, stages: Sequence[BoundStage], orders: Sequence[Sequence[Action]]
) -> list[Task]:
    """Turn the orders, one per device, into tasks; the position in an order is also the priority.

    A forward waits for the previous stage. A backward, with its recomputation, waits for its own forward and
    for the next stage. Both pay a hop if the device changes. A weight gradient waits for its backward.
    """
    flat = [(action, position) for order in orders for position, action in enumerate(order)]
    builder = _Builder(setup, stages, {action: index for index, (action, _) in enumerate(flat)})
    return [builder.task(action, position) for action, position in flat]


class _Builder:
    """The stages and the indices of all actions, from which each action becomes a task."""

    def __init__(
        self, setup: SimulationSetup, stages: Sequence[BoundStage], index_of: dict[Action, int]
    ) -> None:
        self.setup = setup
        self.stages = stages
        self.index_of = index_of
        self.split = any(action.kind is WEIGHT_GRADIENT for action in index_of)

    def task(self, action: Action, position: int) -> Task:
        stage = self.stages[action.stage]
        fields = {FORWARD: self._forward, BACKWARD: self._backward, WEIGHT_GRADIENT: self._weight_gradient}
        return Task(
            device=stage.device,
            kind=action.kind,
            layers=stage.layers,
            micro_batch=action.micro_batch,
            step=action.micro_batch // self.setup.num_micro_batches,
            priority=position,
            **fields[action.kind](action, stage),
        )

    def _forward(self, action: Action, stage: BoundStage) -> dict[str, Any]:
        return {
            "duration_s": stage.forward_s,
            "after": self._waits(FORWARD, action.stage - 1, action),
            "holds_bytes": stage.held_bytes,
            "scratch_bytes": stage.largest_bytes,
            "moves_bytes": self._moved_bytes(action.stage),
        }

    def _backward(self, action: Action, stage: BoundStage) -> dict[str, Any]:
        own_forward = self._waits(FORWARD, action.stage, action)
        fields: dict[str, Any] = {
            "after": own_forward + self._waits(BACKWARD, action.stage + 1, action),
            "moves_bytes": self._moved_bytes(action.stage),
        }
        # The weight gradient still needs the activations, so only that task frees them.
        if self.split:
            seconds = stage.recompute_s + (1 - WEIGHT_GRADIENT_SHARE) * stage.backward_s
            return {**fields, "duration_s": seconds, "holds_bytes": stage.rebuilt_bytes}
        seconds = stage.recompute_s + stage.backward_s
        memory = {"scratch_bytes": stage.largest_bytes, "frees_bytes": stage.held_bytes}
        return {**fields, "duration_s": seconds, **memory}

    def _weight_gradient(self, action: Action, stage: BoundStage) -> dict[str, Any]:
        return {
            "duration_s": WEIGHT_GRADIENT_SHARE * stage.backward_s,
            "after": self._waits(BACKWARD, action.stage, action),
            "frees_bytes": stage.held_bytes + stage.rebuilt_bytes,
        }

    def _waits(self, kind: TaskKind, stage: int, action: Action) -> tuple[Dependency, ...]:
        """Return the wait for `kind` of `stage` of the same micro-batch; nothing beyond the first and the last stage."""
        if not 0 <= stage < len(self.stages):
            return ()
        same_device = self.stages[stage].device == self.stages[action.stage].device
        index = self.index_of[Action(kind, stage, action.micro_batch)]
        return ((index, 0.0 if same_device else self.setup.costs.hop_s),)

    def _moved_bytes(self, index: int) -> int:
        """Count the bytes in and out of the device; a gradient is as large as its activation."""
        stage = self.stages[index]
        moved = 0
        if index > 0 and self.stages[index - 1].device != stage.device:
            moved += stage.input_bytes
        if index + 1 < len(self.stages) and self.stages[index + 1].device != stage.device:
            moved += stage.output_bytes
        return moved


def bind_stages(
    costs_s: Sequence[float],
    memory_bytes: Sequence[int],
    num_stages: int,
    limit_bytes: int | None,
    in_flight_bytes: Sequence[int] = (),
) -> tuple[int, ...]:
    """Find the layer counts per stage that minimise the slowest stage's seconds within `limit_bytes` per stage.

    This is PACI's memory-constrained min-max partition (appendix D.5). A layer's `memory_bytes` are resident
    for any number of micro-batches in flight; `in_flight_bytes` count `num_stages - j` times in stage j,
    counted from 0, as 1F1B keeps them (equation 12). If nothing fits, the worst overshoot is minimised first
    and the slowest stage second. Among equals the split with the earliest cuts wins. Raises `ScheduleError`
    for fewer layers than stages or lists of different lengths.
    """
    num_layers = len(costs_s)
    if not 1 <= num_stages <= num_layers:
        raise ScheduleError(f"cannot bind {num_layers} layers to {num_stages} non-empty stages")
    if len(memory_bytes) != num_layers or (in_flight_bytes and len(in_flight_bytes) != num_layers):
        raise ScheduleError(
            f"{num_layers} layers have {len(memory_bytes)} memory and {len(in_flight_bytes)} in-flight figures"
        )
    time_sums = list(accumulate(costs_s, initial=0.0))
    static_sums = list(accumulate(memory_bytes, initial=0))
    flight_sums = list(accumulate(in_flight_bytes or [0] * num_layers, initial=0))

    def overshoot(stage: int, start: int, stop: int) -> float:
        used = static_sums[stop] - static_sums[start]
        used += (num_stages - stage) * (flight_sums[stop] - flight_sums[start])
        return 0 if limit_bytes is None else max(0, used - limit_bytes)

    # Two passes, not one over pairs: the best pair of a
    # prefix need not be part of the best pair of the whole.
    least, _ = _min_max(num_layers, num_stages, overshoot)

    def seconds(stage: int, start: int, stop: int) -> float:
        allowed = overshoot(stage, start, stop) <= least
        return time_sums[stop] - time_sums[start] if allowed else float("inf")

    _, bounds = _min_max(num_layers, num_stages, seconds)
    return tuple(stop - start for start, stop in pairwise(bounds))


def _min_max(
    num_layers: int, num_stages: int, cost: Callable[[int, int, int], float]
) -> tuple[float, list[int]]:
    """Find the least possible largest `cost(stage, start, stop)`, and bounds that reach it (PACI equation 15)."""
    infinite = float("inf")
    # best[i]: the first i layers in the stages so far.
    best = [infinite, *(cost(0, 0, stop) for stop in range(1, num_layers + 1))]
    cuts: list[list[int]] = []
    for stage in range(1, num_stages):
        # If no choice is finite, any non-empty stages do.
        before, best, cut = best, [infinite] * (num_layers + 1), [stage] * (num_layers + 1)
        for stop in range(stage + 1, num_layers + 1):
            for start in range(stage, stop):
                candidate = max(before[start], cost(stage, start, stop))
                if candidate < best[stop]:
                    best[stop], cut[stop] = candidate, start
        cuts.append(cut)
    bounds = [num_layers]
    for cut in reversed(cuts):
        bounds.append(cut[bounds[-1]])
    return best[num_layers], [0, *reversed(bounds)]
