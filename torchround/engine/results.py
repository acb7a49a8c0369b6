"""The measurements of a step by devices and the optimizer, and the result that the caller of a pass gets.

Devices report stage slots (`StageReport`), the optimizer reports updates. A `StepResult` waits for these
reports when its caller asks for them, and keeps them. `costs_from_reports` turns them into the planner's
costs.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import median

from torchround.engine.board import Board, HandOver, WaitForHandOver
from torchround.engine.device import Mark, Stream
from torchround.engine.direction_jobs import DIRECTIONS_ENQUEUED
from torchround.engine.errors import EngineUsageError, PipelineError, Stopped
from torchround.engine.exchange.step_exchange import LOSSES
from torchround.engine.pass_data import read_loss, read_output
from torchround.engine.passes import STAGE_JOB, Pass
from torchround.engine.store.host_memory import HostPool
from torchround.engine.timeline import TaskKind
from torchround.engine.update_report import UPDATED, BundleUpdate, UpdateReport
from torchround.engine.worker.activation_transfers import BOUNDARY, BOUNDARY_GRADIENT, LOSS, OUTPUT
from torchround.engine.worker.kept_transfers import KEPT
from torchround.layer import Hidden
from torchround.planning.costs import Costs
from torchround.planning.partition import Partition, StageKind, StageTask


@dataclass(frozen=True)
class DeviceSpan:
    """One computation of `layers` for one micro-batch, or one copy, between two marks in its stream.

    A stage that sends something in the middle of a micro-batch makes a span before and one after. `part_marks` are points
    before and after each part that the layer can keep, with its name, in steps that measure.
    """

    kind: TaskKind
    start: Mark
    end: Mark
    stream: Stream = Stream.COMPUTE
    micro_batch: int = 0
    layers: range = range(0)
    copied_bytes: int = 0
    part_marks: tuple[tuple[str, Mark], ...] = ()

    def part_seconds(self) -> dict[str, float]:
        """Return the seconds of each part by name. Waits until the device has passed its end."""
        seconds: dict[str, float] = defaultdict(float)
        for (name, start), (_, end) in zip(self.part_marks[::2], self.part_marks[1::2], strict=True):
            seconds[name] += end.seconds_since(start)
        return seconds

    @property
    def seconds(self) -> float:
        """Its duration. Waits until the device has passed its end."""
        return self.end.seconds_since(self.start)


@dataclass(frozen=True)
class StageReport:
    """The measurements of one stage slot on its device.

    `idle_since` is the end of the slot before it on the same device, None for the first. `weights_ready`
    marks the arrival of its weights. `update_wait_s` is how long the device's thread waited until it could
    send them, because the optimizer had not written them yet. The bytes crossed the link while the device
    worked on the slot. `versions` are the weight versions that it read, by layer and bundle.

    The marks lie in the compute and upload streams, so on CUDA every time is the device's own. Reading a time
    waits until the device has passed the slot. The four times add up to the span from `idle_since` to the
    slot's end.
    """

    task: StageTask
    step: int
    idle_since: Mark | None
    weights_ready: Mark
    update_wait_s: float
    spans: tuple[DeviceSpan, ...]
    uploaded_bytes: int
    downloaded_bytes: int
    versions: Mapping[tuple[int, int], int] = field(default_factory=dict)

    @cached_property
    def busy_s(self) -> float:
        """Seconds in which layers ran."""
        return sum(span.seconds for span in self.spans)

    @cached_property
    def input_wait_s(self) -> float:
        """Idle seconds until an input or a gradient of a neighbouring stage arrived."""
        # All weights arrived before the first span, so a gap between two spans is a wait
        # for an activation or gradient.
        between_s = sum(
            max(later.start.seconds_since(earlier.end), 0.0)
            for earlier, later in zip(self.spans, self.spans[1:], strict=False)
        )
        return self._before_s - self._late_weights_s + between_s

    @cached_property
    def weights_wait_s(self) -> float:
        """Idle seconds until the weights were uploaded, without the wait for their update."""
        return self._late_weights_s - self.optimizer_wait_s

    @cached_property
    def optimizer_wait_s(self) -> float:
        """Idle seconds until the optimizer had written the weights."""
        # The thread may wait for an update while its device still computes: only the idle part counts.
        return min(self.update_wait_s, self._late_weights_s)

    @cached_property
    def _before_s(self) -> float:
        """Idle seconds between the slot before and this one."""
        return (
            0.0 if self.idle_since is None else max(self.spans[0].start.seconds_since(self.idle_since), 0.0)
        )

    @cached_property
    def _late_weights_s(self) -> float:
        """The part of `_before_s` before the weights had arrived."""
        if self.idle_since is None:
            return 0.0
        return min(max(self.weights_ready.seconds_since(self.idle_since), 0.0), self._before_s)


STAGE_ENQUEUED = HandOver[StageReport]("all of stage slot {0} to be enqueued")


class StepResult:
    """The result of a dispatched pass: its loss, what its devices measured and, for a training step, its update.

    Every method waits for what it needs. `pool` is the engine's host pool.
    """

    def __init__(
        self,
        pass_: Pass,
        tasks: list[StageTask],
        pool: HostPool,
        wait: WaitForHandOver,
        wait_for_end: Callable[[], None] = lambda: None,
    ) -> None:
        # Without the micro-batches: the caller may keep results for long, and those are in the engine's pool.
        self.pass_ = replace(pass_, micro_batches=())
        self._num_micro_batches = len(pass_.micro_batches)
        self._is_shared = pass_.share is not None and pass_.share.num_machines > 1
        self.tasks = tasks
        self.direction_slots: tuple[int, ...] = ()  # among the tasks, or after them
        self.pool = pool
        self._wait = wait
        self._wait_for_end = wait_for_end  # of a call: its gradients and losses are in the sums of the step
        self._loss_sums: list[float] | None = None
        self._all_sums: Sequence[float] | None = None
        self._outputs: list[Hidden] | None = None
        self._update: UpdateReport | None = None
        self._reports: list[StageReport] | None = None

    @property
    def step(self) -> int:
        """The number of training steps before this pass."""
        return self.pass_.step

    @property
    def num_labels(self) -> int:
        """The number of labels that the loss counts, over the whole pass: its divisor."""
        return self.pass_.num_labels

    def loss(self) -> float:
        """Return the mean loss per label. Sums add up in fp64 in micro-batch order and are divided once.

        A training step's loss is that of all machines, which is there once their calls have ended.
        """
        sums: Sequence[float] = self.loss_sums()
        if self._is_shared:
            if self._all_sums is None:
                self._all_sums = self._wait(LOSSES(self.pass_.index))
            sums = self._all_sums
        return mean_loss(sums, self.num_labels)

    def loss_sums(self) -> list[float]:
        """Return the sum of the token losses of each of this machine's micro-batches, in their order."""
        # Once only: the last reader of a loss gives its buffer back, and another micro-batch may fill it.
        if self._loss_sums is None:
            if self.pass_.gives_outputs:
                raise EngineUsageError("the result of forward() has outputs(), and no loss")
            self._loss_sums = [self._loss_sum(index) for index in range(self._num_micro_batches)]
        return self._loss_sums

    def update(self) -> UpdateReport:
        """Return what the update did. Only after `Engine.step`."""
        if self._update is None:
            self._update = self._wait(UPDATED(self.pass_.step))
        return self._update

    def reports(self) -> list[StageReport]:
        """Return what the devices measured in each stage slot, in dispatch order."""
        # Kept, like the update: the engine forgets the hand-overs of a pass that is two passes old.
        if self._reports is None:
            self._reports = [self._wait(STAGE_ENQUEUED(task.slot)) for task in self.tasks]
        return self._reports

    def weight_drift(self) -> int:
        """Return the most versions between the weights of a layer's forward and those of its backward."""
        forward: dict[tuple[int, int], int] = {}
        drift = 0
        for report in self.reports():
            if report.task.stage.kind is StageKind.FORWARD:
                forward |= report.versions
            else:
                found = (version - forward.get(use, version) for use, version in report.versions.items())
                drift = max([drift, *map(abs, found)])
        return drift

    def by_device(self, figure: Callable[[StageReport], float], num_devices: int) -> list[float]:
        """Return each device's sum of a figure over its stage slots, in device order."""
        sums = [0.0] * num_devices
        for report in self.reports():
            sums[report.task.device] += figure(report)
        return sums

    def outputs(self) -> list[Hidden]:
        """Return what the last layer returned for each micro-batch, in their order, in host memory of its own.

        Only after `Engine.forward`. Waits for the pass.
        """
        if self._outputs is None:
            if not self.pass_.gives_outputs:
                raise EngineUsageError("outputs() is for results of forward(); this pass has losses")
            keys = [OUTPUT(self.pass_.index, index) for index in range(self._num_micro_batches)]
            self._outputs = [read_output(self._wait(key), self.pool) for key in keys]
        return self._outputs

    def wait(self) -> None:
        """Wait until the losses or outputs are on the host and every stage task is enqueued; backward passes may still run."""
        self._results()
        self.reports()

    def collect(self, is_open: bool = False) -> None:
        """Wait for everything, so that the engine may forget the hand-overs of this pass.

        If the step `is_open`, its update is not waited for: the pass ends once its gradient is in the step's sum.
        """
        self.wait()
        # Otherwise a device that is late could look for its job when that is forgotten.
        for slot in self.direction_slots:
            self._wait(DIRECTIONS_ENQUEUED(slot))
        if self.pass_.training:
            self._wait_for_end() if is_open else self.update()

    def forget_before(self, board: Board) -> None:
        """Forget hand-overs of passes before this one, which no thread will ask for again."""
        pass_ = self.pass_
        board.retire(UPDATED, pass_.step)
        board.retire(LOSSES, pass_.index)
        for kind in (BOUNDARY, BOUNDARY_GRADIENT, LOSS, OUTPUT):
            board.retire(kind, pass_.index)
        board.retire(KEPT, pass_.index)
        # Direction jobs come before a pass that begins with a backward. A machine may have no part in a step.
        slots = [*(task.slot for task in self.tasks[:1]), *self.direction_slots]
        if slots:
            board.retire(STAGE_JOB, min(slots))
            board.retire(STAGE_ENQUEUED, min(slots))
            board.retire(DIRECTIONS_ENQUEUED, min(slots))

    def keep(self) -> None:
        """Take the losses or outputs out of the engine's pool, which is about to close. They may be missing after a fault."""
        with suppress(EngineUsageError, PipelineError, Stopped):
            self._results()

    def _results(self) -> object:
        return self.outputs() if self.pass_.gives_outputs else self.loss()

    def _loss_sum(self, index: int) -> float:
        return read_loss(self._wait(LOSS(self.pass_.index, index)), self.pool)


def mean_loss(loss_sums: Iterable[float], num_labels: int) -> float:
    """Return the mean loss per label of micro-batches whose losses are given as sums, added up in their order."""
    return sum(loss_sums) / max(num_labels, 1)


def one_layer_a_stage(num_layers: int) -> Partition:
    """Return the partition to measure costs with. It is also the one that needs the least device memory."""
    return Partition((1,) * (num_layers - 1), 1, (1,) * (num_layers - 1))


def costs_from_reports(
    counted: Costs,
    reports: Iterable[StageReport],
    updates: Iterable[Sequence[BundleUpdate]] = (),
    recompute: str = "stage",
) -> Costs:
    """Return `counted` with measured seconds in place of counted ones.

    The reports come from an engine that `times_layers`, or from steps under `one_layer_a_stage`: each of their
    spans is one layer's forward, recomputation or backward, or the head's forward and backward. Forwards that mark their
    parts give the seconds of these; parts of other layers keep their counted share. `updates`
    gives, for each step, the bundles that its update changed; empty for a skipped update. With
    `recompute = "layer"` all layers but a stage's last run again before their backward, in the same span. `counted` also
    says what the layers kept in those steps: their recomputations were shorter than their forwards.
    """
    samples: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    parts: list[dict[str, list[float]]] = [defaultdict(list) for _ in counted.layers]
    run_again: set[int] = set()
    for report in reports:
        stage = report.task.stage
        if recompute == "layer" and stage.kind is not StageKind.FORWARD:
            run_again |= set(range(stage.start, stage.stop - 1))
        for span in report.spans:
            assert len(span.layers) <= 1, f"a span of {span.layers} says nothing about single layers"
            layer = span.layers.start if span.layers else stage.start
            for name, part_s in span.part_seconds().items():
                parts[layer][name].append(part_s)
            if span.kind is TaskKind.RECOMPUTE and counted.layers[layer].kept:
                continue
            # A recomputation of all is the same work as a forward.
            kind = TaskKind.FORWARD if span.kind is TaskKind.RECOMPUTE else span.kind
            samples[kind, layer].append(span.seconds)
    # Medians, because the first step (caches, compilation) and other processes make
    # single samples far too long.
    seconds = {key: median(values) for key, values in samples.items()}
    for layer in run_again:
        again_s = seconds[TaskKind.FORWARD, layer]
        if counted.layers[layer].kept:
            again_s *= counted.layers[layer].recompute_s / counted.layers[layer].forward_s
        seconds[TaskKind.BACKWARD, layer] = max(seconds[TaskKind.BACKWARD, layer] - again_s, 0.0)
    last = counted.num_layers - 1
    layers = [
        layer.timed(
            seconds[TaskKind.FORWARD, index],
            seconds[TaskKind.BACKWARD, index],
            {name: median(values) for name, values in parts[index].items()},
        )
        for index, layer in enumerate(counted.layers[:last])
    ]
    # The head's slot runs forward and backward in one go: split it in the counted proportion.
    head = counted.layers[last]
    whole_s = seconds[TaskKind.FUSED, last]
    share = head.forward_s / (head.forward_s + head.backward_s)
    head = head.timed(whole_s * share, whole_s * (1 - share))
    return _with_updates(
        replace(counted, layers=(*layers, head), launch_s=0.0), [step for step in updates if step]
    )


def _with_updates(costs: Costs, updates: Sequence[Sequence[BundleUpdate]]) -> Costs:
    """Add the optimizer's seconds. A shared bundle counts with its first layer, whose upload waits for it."""
    if not updates:
        return costs  # the counted seconds stay
    seconds = [[0.0] * len(updates) for _ in costs.layers]
    for step, bundles in enumerate(updates):
        for bundle in bundles:
            seconds[bundle.layer][step] += bundle.end_s - bundle.start_s
    layers = (replace(c, optimizer_s=median(s)) for c, s in zip(costs.layers, seconds, strict=True))
    return replace(costs, layers=tuple(layers))
