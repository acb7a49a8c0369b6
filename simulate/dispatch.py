"""The dispatch schedule as timed tasks for the simulator, over one or several steps (RoundPipe section 3.2).

The stage tasks come from `partition.step_tasks`, as the engine's do. This module adds durations, bytes and
dependencies.
"""

from collections.abc import Sequence
from typing import Any

from torchround.planning.costs import Costs
from torchround.planning.partition import (
    Partition,
    SpanKind,
    StageKind,
    StageTask,
    slots_before_late_jobs,
    step_tasks,
)
from torchround.planning.stage_times import KeptLink, LayerSums, layers_with_jobs
from torchround.planning.update_modes import SYNC, mode_of
from torchround.simulate.timeline import COMPUTE, HOST, Dependency, Task


def dispatch_tasks(
    partition: Partition,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    rounds: int,
    *,
    recompute: str = "stage",
    update: str = SYNC.name,
    stale_layers: int = 0,
    steps: int = 1,
    link: KeptLink | None = None,
) -> list[Task]:
    """List the tasks of `steps` consecutive steps, slot by slot and micro-batch by micro-batch.

    Jobs that devices do for the update follow the slots of each step, or come among those of the next (`run_jobs` in `step_time.py`).
    If there are several steps, each is followed by its update: after the step's last gradient and job the host
    updates layer by layer in forward order. Each stage of step t+V, in a mode of V versions, waits for the update of its
    own layers. In `bounded` each layer's update follows its own gradient, from the deepest layer on,
    and forward stages read the first `stale_layers` layers one version older. With a `link`, stages take at
    least as long as their transfers.
    """
    mode = mode_of(update)
    if partition.num_layers != len(costs.layers):
        raise ValueError(f"the partition holds {partition.num_layers} layers, the costs {len(costs.layers)}")
    stale_layers = min(stale_layers, partition.num_layers - partition.fused) if mode.updates_by_layer else 0
    builder = _Builder(costs, recompute, mode.updates_by_layer, stale_layers)
    sums = LayerSums(costs, recompute, link, num_micro_batches)
    builder.seconds = list(zip(*sums.seconds(partition, rounds), strict=True))
    num_slots = rounds * partition.num_stages
    has_late_jobs = mode.versions > 1 and steps > 1 and bool(layers_with_jobs(costs))
    before_jobs = slots_before_late_jobs(len(partition.forward), num_slots, num_devices)
    updates: dict[int, list[int]] = {}  # step -> the tasks that update the layers with its gradients
    for step in range(steps):
        gradients_before = builder.last_gradients
        builder.begin_step(
            step, updates.get(step - mode.versions, []), updates.get(step - mode.versions - 1, [])
        )
        first_slot = step * num_slots
        stage_tasks = step_tasks(partition, num_micro_batches, rounds, num_devices, first_slot)
        jobs_at = before_jobs if has_late_jobs else num_slots
        for stage_task in stage_tasks[:jobs_at]:
            builder.add(stage_task)
        if has_late_jobs and step:
            builder.add_jobs(first_slot + jobs_at, num_devices, gradients_before)
            updates[step - 1] = builder.add_updates(gradients_before)
        elif not has_late_jobs:
            builder.add_jobs(first_slot + jobs_at, num_devices)
            updates[step] = builder.add_updates(builder.last_gradients) if steps > 1 else []
        for stage_task in stage_tasks[jobs_at:]:
            builder.add(stage_task)
    return builder.tasks


class _Builder:
    """A list of timed tasks under construction, with the tasks whose results later ones need."""

    def __init__(self, costs: Costs, recompute: str, updates_by_layer: bool, stale_layers: int) -> None:
        self.costs = costs
        self.recompute = recompute
        self.seconds: list[tuple[float, float]] = []  # of each stage, before and after it needs its input
        self.updates_by_layer = updates_by_layer
        self.completed_with = costs.completed_with()
        self.stale_layers = stale_layers
        self.input_bytes = [0, *(layer.boundary_bytes for layer in costs.layers)]
        self.tasks: list[Task] = []
        self.last_gradients: list[int] = []  # the last task of each slot that makes gradients

    def begin_step(self, step: int, updates: list[int], older: list[int]) -> None:
        """Start a step. `updates[layer]` is the task that makes the weights it reads; empty if they are already there.

        `older` is the same of the weights one version older.
        """
        self.step = step
        self.updates = updates
        self.older = older
        self.previous: dict[int, int] = {}  # micro-batch -> its task in the slot before
        self.producer: dict[tuple[int, int], int] = {}  # (layer, micro-batch) -> the forward task that ran it
        self.last_gradients = []
        self.gradient_of: dict[int, int] = {}  # layer -> the task that completes its gradient
        self.directions: list[int] = []  # the last task of each job

    def add(self, stage_task: StageTask) -> None:
        """Add the stage's tasks of its micro-batches; the recomputation of a backward stage is a task of its own."""
        stage, device, micro_batches = stage_task.stage, stage_task.device, stage_task.micro_batches
        inside, layers = range(stage.start, stage.stop), self.costs.layers[stage.start : stage.stop]
        is_forward, is_backward = stage.kind is StageKind.FORWARD, stage.kind is StageKind.BACKWARD
        early_s, late_s = self.seconds[stage_task.stage_index]
        kept = [layer.activation_bytes for layer in layers]
        peak = sum(kept) if self.recompute == "stage" and not is_forward else max(kept)
        weights_ready = self._weights_ready(stage.kind, stage.start, stage.stop)
        # In come its input or boundary, and a backward stage's gradient; out goes a gradient or an output.
        moved = self.input_bytes[stage.start] * (1 if is_forward else 2)
        moved += self.input_bytes[stage.stop] if stage.kind is not StageKind.FUSED else 0
        # Weights go up with the first micro-batch, gradients down with the last.
        moves = dict.fromkeys(micro_batches, moved)
        moves[micro_batches[0]] += sum(layer.weight_bytes for layer in layers)
        moves[micro_batches[-1]] += 0 if is_forward else sum(layer.gradient_bytes for layer in layers)
        for micro_batch, moved in moves.items():
            fields: dict[str, Any] = {
                "after": self._arrival(self.previous.get(micro_batch)),
                "moves_bytes": moved,
            }
            if is_backward:
                # Recomputation needs the boundary and the weights, not the gradient: it starts while that is on its way.
                # The last of the inputs that the stage takes: stale layers start anew from their own.
                cut = max(stage.start, min(stage.stop - 1, self.stale_layers))
                after = self._arrival(self.producer.get((cut - 1, micro_batch))) + weights_ready
                early = {"after": after, "holds_bytes": peak}
                self._append(device, SpanKind.RECOMPUTE, early_s, inside, micro_batch, **early)
                fields["frees_bytes"] = peak
            else:
                fields |= {"after": fields["after"] + weights_ready, "scratch_bytes": peak}
            task = self._append(device, SpanKind(stage.kind.value), late_s, inside, micro_batch, **fields)
            self.previous[micro_batch] = task
            if is_forward:
                self.producer.update(((layer, micro_batch), task) for layer in inside)
        if not is_forward:
            self.last_gradients.append(len(self.tasks) - 1)
            self.gradient_of.update((layer, len(self.tasks) - 1) for layer in inside)

    def add_jobs(self, first_slot: int, num_devices: int, gradients: Sequence[int] = ()) -> None:
        """Add the jobs of an update, each as a copy up, a computation and a copy down.

        They wait for these tasks with gradients, or each one for its own layer's gradient of this step.
        """
        for number, (index, layer) in enumerate(layers_with_jobs(self.costs)):
            device, layers = (first_slot + number) % num_devices, range(index, index + 1)
            memory = layer.job_slot_bytes + layer.job_scratch_bytes
            sources = gradients or [self.gradient_of[index]]
            for kind, seconds, stream, scratch in (
                (SpanKind.WEIGHTS, layer.job_link_s, "job up", 0),
                (SpanKind.ORTHOGONALISE, layer.job_s, COMPUTE, memory),
                (SpanKind.GRADIENTS, layer.job_link_s, "job down", 0),
            ):
                fields = {"after": _ends(sources), "stream": stream, "scratch_bytes": scratch}
                sources = [self._append(device, kind, seconds, layers, -1, **fields)]
            self.directions += sources

    def add_updates(self, gradients: Sequence[int]) -> list[int]:
        """Add one host task per layer and return their indices, by layer.

        The first waits for all `gradients` and jobs, because the clipping norm is over all of them; the others follow it
        in order. In `bounded` each one waits for its own layer's gradient, and the deepest layer comes first.
        """
        order = list(range(len(self.costs.layers)))
        tasks = {}
        for layer in reversed(order) if self.updates_by_layer else order:
            sources = [] if layer else [*gradients, *self.directions]
            after = _ends([self.gradient_of[layer]] if self.updates_by_layer else sources)
            own, seconds = range(layer, layer + 1), self.costs.layers[layer].optimizer_s
            tasks[layer] = self._append(HOST, SpanKind.UPDATE, seconds, own, -1, after=after)
        return [tasks[layer] for layer in order]

    def _weights_ready(self, kind: StageKind, start: int, stop: int) -> tuple[Dependency, ...]:
        """Return the last update that a stage waits for, if it is in the schedule."""
        updates, layer = self.updates, stop - 1
        if self.updates_by_layer:
            if kind is StageKind.FORWARD and stop <= self.stale_layers:
                updates = self.older
            elif kind is StageKind.FORWARD:
                start = max(start, self.stale_layers)
            layer = min(self.completed_with[start:stop])
        return _ends(updates[layer : layer + 1])

    def _arrival(self, index: int | None) -> tuple[Dependency, ...]:
        return () if index is None else ((index, self.costs.hop_s),)

    def _append(
        self, device: int, kind: SpanKind, seconds: float, layers: range, micro_batch: int, **more: Any
    ) -> int:
        """Add a task of this step and return its index."""
        self.tasks.append(Task(device, kind, seconds, layers, micro_batch, step=self.step, **more))
        return len(self.tasks) - 1


def _ends(tasks: Sequence[int]) -> tuple[Dependency, ...]:
    return tuple((task, 0.0) for task in tasks)
