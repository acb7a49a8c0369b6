"""The dispatch schedule as timed tasks for the simulator, over one or several steps (RoundPipe section 3.2).

The stage tasks come from `partition.step_tasks`, as the engine's do. This module adds durations, bytes and
dependencies.
"""

from collections.abc import Sequence
from typing import Any

from torchround.pipeline.costs import Costs, stage_seconds
from torchround.pipeline.partition import (
    Partition,
    Stage,
    StageKind,
    StageTask,
    slots_before_late_jobs,
    step_tasks,
)
from torchround.pipeline.simulation.kept_link import LinkWaits
from torchround.pipeline.simulation.update_jobs import update_jobs
from torchround.pipeline.timeline import COMPUTE, HOST, Dependency, Task, TaskKind

# Steps between a gradient and the first step that reads the weights it made. `async` weights are one step
# old, so that step t + 1 runs while the host still updates with step t's gradients. In `bounded` the forward of
# its stale layers reads weights of that age.
STEPS_UNTIL_READ = {"sync": 1, "async": 2, "bounded": 1}


def dispatch_tasks(
    partition: Partition,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    rounds: int,
    *,
    recompute: str = "stage",
    update: str = "sync",
    stale_layers: int = 0,
    steps: int = 1,
    link_waits: LinkWaits | None = None,
) -> list[Task]:
    """List the tasks of `steps` consecutive steps, slot by slot and micro-batch by micro-batch.

    Jobs that devices do for the update follow the slots of each step, or come among those of the next (`update_jobs.py`).
    If there are several steps, each is followed by its update: after the step's last gradient and job the host
    updates layer by layer in forward order. Each stage of step t+1 (`sync`) or t+2 (`async`) waits for the
    update of its own layers. In `bounded` each layer's update follows its own gradient, from the deepest layer on,
    and forward stages read the first `stale_layers` layers one version older. With `link_waits`, stages that keep
    activations take as long as the link does.
    """
    if partition.num_layers != len(costs.layers):
        raise ValueError(f"the partition holds {partition.num_layers} layers, the costs {len(costs.layers)}")
    stale_layers = min(stale_layers, partition.num_layers - partition.fused) if update == "bounded" else 0
    builder = _Builder(costs, recompute, update == "bounded", stale_layers)
    if link_waits is not None:
        builder.link_s = link_waits.of(partition, rounds)
    slots_per_step = rounds * partition.num_stages
    has_late_jobs = update == "async" and steps > 1 and bool(update_jobs(costs))
    before_jobs = slots_before_late_jobs(len(partition.forward), slots_per_step, num_devices)
    updates: list[list[int]] = []
    for step in range(steps):
        source = step - STEPS_UNTIL_READ[update]
        read = [updates[index] if index >= 0 else [] for index in (source, source - 1)]
        builder.begin_step(step, *read)
        first_slot = step * slots_per_step
        stage_tasks = step_tasks(partition, num_micro_batches, rounds, num_devices, first_slot)
        if has_late_jobs:
            for stage_task in stage_tasks[:before_jobs]:
                builder.add(stage_task)
            if step:
                builder.add_jobs(first_slot + before_jobs, num_devices, builder.gradients_before)
                updates.append(builder.add_updates(builder.gradients_before))
            for stage_task in stage_tasks[before_jobs:]:
                builder.add(stage_task)
            continue  # the next step takes up the jobs of this one
        for stage_task in stage_tasks:
            builder.add(stage_task)
        builder.add_jobs((step + 1) * slots_per_step, num_devices)
        if steps > 1:
            updates.append(builder.add_updates(builder.last_gradients))
    return builder.tasks


class _Builder:
    """A list of timed tasks under construction, with the tasks whose results later ones need."""

    def __init__(self, costs: Costs, recompute: str, is_bounded: bool, stale_layers: int) -> None:
        self.costs = costs
        self.recompute = recompute
        self.is_bounded = is_bounded
        self.completed_with = costs.completed_with()
        self.stale_layers = stale_layers
        self.tasks: list[Task] = []
        self.link_s: list[float] = []
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
        self.gradients_before, self.last_gradients = self.last_gradients, []
        self.gradient_of: dict[int, int] = {}  # layer -> the task that completes its gradient
        self.directions: list[int] = []  # the last task of each job

    def add(self, stage_task: StageTask) -> None:
        stage, layers = stage_task.stage, self.costs.layers[stage_task.stage.start : stage_task.stage.stop]
        early_s, late_s = stage_seconds(self.costs, stage, self.recompute)
        if self.link_s:
            waits_s = self.link_s[stage_task.stage_index]
            early_s, late_s = (
                (early_s + waits_s, late_s)
                if stage.kind is StageKind.BACKWARD
                else (early_s, late_s + waits_s)
            )
        kept = [layer.activation_bytes for layer in layers]
        peak = sum(kept) if self.recompute == "stage" and stage.kind is not StageKind.FORWARD else max(kept)
        weights_ready = self._weights_ready(stage)
        for micro_batch in stage_task.micro_batches:
            arrived = self._arrival(self.previous.get(micro_batch))
            if stage.kind is StageKind.BACKWARD:
                # Recomputation needs the boundary and the weights, not
                # the gradient: it starts while that is on its way.
                # The last of the inputs that the stage takes: stale layers start anew from their own.
                cut = max(stage.start, min(stage.stop - 1, self.stale_layers))
                boundary = self._arrival(self.producer.get((cut - 1, micro_batch)))
                early = {"after": boundary + weights_ready, "holds_bytes": peak}
                self._append(stage_task, TaskKind.RECOMPUTE, micro_batch, early_s, **early)
                late: dict[str, Any] = {"after": arrived, "frees_bytes": peak}
            else:
                late = {"after": arrived + weights_ready, "scratch_bytes": peak}
            moves_bytes = self._moved_bytes(stage_task, micro_batch)
            kind = TaskKind(stage.kind.value)
            self.previous[micro_batch] = self._append(
                stage_task, kind, micro_batch, late_s, moves_bytes=moves_bytes, **late
            )
            if stage.kind is StageKind.FORWARD:
                self.producer.update(
                    ((layer, micro_batch), self.previous[micro_batch])
                    for layer in range(stage.start, stage.stop)
                )
        if stage.kind is not StageKind.FORWARD:
            self.last_gradients.append(len(self.tasks) - 1)
            self.gradient_of.update((layer, len(self.tasks) - 1) for layer in range(stage.start, stage.stop))

    def add_jobs(self, first_slot: int, num_devices: int, gradients: Sequence[int] = ()) -> None:
        """Add the jobs of an update, each as a copy up, a computation and a copy down.

        They wait for these tasks with gradients, or each one for its own layer's gradient of this step.
        """
        for index, job in enumerate(update_jobs(self.costs)):
            device, layers = (first_slot + index) % num_devices, range(job.layer, job.layer + 1)
            memory = self.costs.layers[job.layer]
            sources = gradients or [self.gradient_of[job.layer]]
            for kind, seconds, stream in (
                (TaskKind.WEIGHTS, job.link_s, "job up"),
                (TaskKind.ORTHOGONALISE, job.seconds, COMPUTE),
                (TaskKind.GRADIENTS, job.link_s, "job down"),
            ):
                scratch = memory.job_slot_bytes + memory.job_scratch_bytes if stream == COMPUTE else 0
                after = tuple((source, 0.0) for source in sources)
                self.tasks.append(
                    Task(
                        device,
                        kind,
                        seconds,
                        layers,
                        -1,
                        after,
                        stream,
                        step=self.step,
                        scratch_bytes=scratch,
                    )
                )
                sources = [len(self.tasks) - 1]
            self.directions += sources

    def add_updates(self, gradients: Sequence[int]) -> list[int]:
        """Add one host task per layer and return their indices, by layer.

        The first waits for all `gradients` and jobs, because the clipping norm is over all of them; the others follow it
        in order. In `bounded` each one waits for its own layer's gradient, and the deepest layer comes first.
        """
        order = list(range(len(self.costs.layers)))
        if self.is_bounded:
            order.reverse()
        tasks = {}
        for layer in order:
            sources = [self.gradient_of[layer]] if self.is_bounded else [*gradients, *self.directions]
            after = tuple((index, 0.0) for index in sources) if self.is_bounded or layer == 0 else ()
            tasks[layer] = len(self.tasks)
            self.tasks.append(
                Task(
                    *(
                        HOST,
                        TaskKind.UPDATE,
                        self.costs.layers[layer].optimizer_s,
                        range(layer, layer + 1),
                        -1,
                    ),
                    after=after,
                    step=self.step,
                )
            )
        return [tasks[layer] for layer in range(len(order))]

    def _weights_ready(self, stage: Stage) -> tuple[Dependency, ...]:
        """Return the last update that the stage waits for, if it is in the schedule."""
        updates, layer = self.updates, stage.stop - 1
        if self.is_bounded:
            start = stage.start
            if stage.kind is StageKind.FORWARD and stage.stop <= self.stale_layers:
                updates = self.older
            elif stage.kind is StageKind.FORWARD:
                start = max(start, self.stale_layers)
            layer = min(self.completed_with[start : stage.stop])
        return ((updates[layer], 0.0),) if updates else ()

    def _arrival(self, index: int | None) -> tuple[Dependency, ...]:
        return () if index is None else ((index, self.costs.hop_s),)

    def _append(
        self, stage_task: StageTask, kind: TaskKind, micro_batch: int, duration_s: float, **fields: Any
    ) -> int:
        layers = range(stage_task.stage.start, stage_task.stage.stop)
        self.tasks.append(
            Task(stage_task.device, kind, duration_s, layers, micro_batch, step=self.step, **fields)
        )
        return len(self.tasks) - 1

    def _moved_bytes(self, stage_task: StageTask, micro_batch: int) -> int:
        """Count moved bytes: weights up with the first micro-batch, gradients down with the last, activations with each."""
        stage, layers = stage_task.stage, self.costs.layers
        mine = layers[stage.start : stage.stop]
        moved = layers[stage.start - 1].boundary_bytes if stage.start > 0 else 0  # in, or its boundary
        if stage.kind is StageKind.FORWARD:
            moved += mine[-1].boundary_bytes
        else:
            moved += layers[stage.start - 1].boundary_bytes if stage.start > 0 else 0  # gradient out
        if stage.kind is StageKind.BACKWARD:
            moved += mine[-1].boundary_bytes  # gradient in
        if micro_batch == stage_task.micro_batches[0]:
            moved += sum(layer.weight_bytes for layer in mine)
        if micro_batch == stage_task.micro_batches[-1] and stage.kind is not StageKind.FORWARD:
            moved += sum(layer.gradient_bytes for layer in mine)
        return moved
