"""What a caller can ask of a dispatched pass. Every answer waits for what it needs, and is kept."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from statistics import median

from torchround.engine.board import HandOver, WaitForHandOver
from torchround.engine.device import Mark
from torchround.engine.optimizer_worker import UPDATED, BundleUpdate, UpdateReport
from torchround.engine.passes import Pass, read_loss
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.activation_transfers import LOSS
from torchround.pipeline.costs import Costs
from torchround.pipeline.partition import Partition, StageTask
from torchround.pipeline.timeline import TaskKind

# What devices report of their stage slots, and what that says of a step: busy, and waiting for what.
#
# All times come from marks in the compute stream and the upload streams, so on CUDA they are the device's own.


@dataclass(frozen=True)
class DeviceSpan:
    """One computation of a stage slot for one micro-batch."""

    kind: TaskKind
    micro_batch: int
    start: Mark
    end: Mark


@dataclass(frozen=True)
class SlotReport:
    """One stage slot on its device.

    `idle_since`: end of the slot before it on the same device, None at the first. `weights_ready`: its weights
    have arrived. `optimizer_wait_s`: how long its thread waited for weights to be updated before they could
    be sent. `uploaded_bytes` and `downloaded_bytes` crossed the link while the slot was worked on.
    """

    task: StageTask
    step: int
    idle_since: Mark | None
    weights_ready: Mark
    optimizer_wait_s: float
    pieces: tuple[DeviceSpan, ...]
    uploaded_bytes: int
    downloaded_bytes: int

    def times(self) -> "DeviceTimes":
        """Where the time from `idle_since` to the end of the last piece went."""
        busy_s = sum(piece.end.seconds_since(piece.start) for piece in self.pieces)
        between_s = sum(
            max(later.start.seconds_since(earlier.end), 0.0)
            for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)
        )
        before_s = weights_s = 0.0
        if self.idle_since is not None:
            before_s = max(self.pieces[0].start.seconds_since(self.idle_since), 0.0)
            weights_s = min(max(self.weights_ready.seconds_since(self.idle_since), 0.0), before_s)
        optimizer_s = min(self.optimizer_wait_s, weights_s)
        return DeviceTimes(
            busy_s=busy_s,
            waiting_for_input_s=before_s - weights_s + between_s,
            waiting_for_weights_s=weights_s - optimizer_s,
            waiting_for_optimizer_s=optimizer_s,
            uploaded_bytes=self.uploaded_bytes,
            downloaded_bytes=self.downloaded_bytes,
        )


@dataclass(frozen=True)
class DeviceTimes:
    """Seconds that devices computed, and that they stood still for want of something; bytes moved each way."""

    busy_s: float = 0.0
    waiting_for_input_s: float = 0.0
    waiting_for_weights_s: float = 0.0
    waiting_for_optimizer_s: float = 0.0
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0

    def __add__(self, other: "DeviceTimes") -> "DeviceTimes":
        return DeviceTimes(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


STAGE_DONE = HandOver[SlotReport]("stage slot {0} to be enqueued")


def times_by_device(reports: Iterable[SlotReport], num_devices: int) -> list[DeviceTimes]:
    """The sum of the reports of each device, in device order."""
    times = [DeviceTimes()] * num_devices
    for report in reports:
        times[report.task.device] += report.times()
    return times


class StepResult:
    """A pass's loss and device time and, of a training step, its update. `pool` is its engine's."""

    def __init__(self, pass_: Pass, tasks: list[StageTask], pool: HostPool, wait: WaitForHandOver) -> None:
        self.pass_ = pass_
        self.tasks = tasks
        self.pool = pool
        self._wait = wait
        self._loss: float | None = None
        self._update: UpdateReport | None = None
        self._reports: list[SlotReport] | None = None

    @property
    def num_labels(self) -> int:
        """Labels that count, over the whole pass: the loss divisor."""
        return self.pass_.num_labels

    def loss(self) -> float:
        """Mean token loss over the pass: sums added in micro-batch order in fp64, then divided once."""
        if self._loss is None:
            total = sum(self._loss_sum(index) for index in range(len(self.pass_.micro_batches)))
            self._loss = total / max(self.num_labels, 1)
        return self._loss

    def update(self) -> UpdateReport:
        """Gradient norm before clipping, whether the update was skipped, and its time. After `Engine.step`."""
        if self._update is None:
            self._update = self._wait(UPDATED(self.pass_.step))
        return self._update

    def reports(self) -> list[SlotReport]:
        """What the devices report of each stage task, in dispatch order."""
        if self._reports is None:
            self._reports = [self._wait(STAGE_DONE(task.slot)) for task in self.tasks]
        return self._reports

    def device_times(self, num_devices: int) -> list[DeviceTimes]:
        """Where each device's time went, in device order."""
        return times_by_device(self.reports(), num_devices)

    def wait(self) -> None:
        """Wait until every stage task is done."""
        self.loss()
        self.reports()

    def collect(self) -> None:
        """Wait for everything, so that the engine may forget how it came about."""
        self.wait()
        if self.pass_.training:
            self.update()

    def _loss_sum(self, index: int) -> float:
        return read_loss(self._wait(LOSS(self.pass_.index, index)), self.pool)


# Measured costs: each layer's own times, from steps that ran with one layer a stage.
#
# In such steps every stage slot is a layer's forward, its recomputation or its backward, so the devices' reports
# are the layers' costs without any further measuring, and the optimizer reports each layer's update anyway. Medians,
# not one sample (DESIGN section 5).


def one_layer_a_stage(num_layers: int) -> Partition:
    """The partition that costs are measured with; also the one that needs the least device memory."""
    return Partition((1,) * (num_layers - 1), 1, (1,) * (num_layers - 1))


def costs_from_reports(
    counted: Costs, reports: Iterable[SlotReport], updates: Iterable[Sequence[BundleUpdate]] = ()
) -> Costs:
    """`counted` with the seconds of the reports, which are of steps under `one_layer_a_stage`.

    `updates`: the bundles that each step's update updated, none where it was skipped.

    A forward and a recomputation are the same work; the head, whose slot runs both ways in one go, keeps the
    counted proportion between its two parts.
    """
    samples: dict[tuple[TaskKind, int], list[float]] = defaultdict(list)
    for report in reports:
        for piece in report.pieces:
            kind = TaskKind.FORWARD if piece.kind is TaskKind.RECOMPUTE else piece.kind
            samples[kind, report.task.stage.start].append(piece.end.seconds_since(piece.start))
    seconds = {key: median(values) for key, values in samples.items()}
    last = counted.num_layers - 1
    layers = [
        replace(
            layer,
            forward_s=seconds[TaskKind.FORWARD, index],
            backward_s=seconds[TaskKind.BACKWARD, index],
        )
        for index, layer in enumerate(counted.layers[:last])
    ]
    head = counted.layers[last]
    whole_s = seconds[TaskKind.FUSED, last]
    share = head.forward_s / (head.forward_s + head.backward_s)
    head = replace(head, forward_s=whole_s * share, backward_s=whole_s * (1 - share))
    return _with_updates(replace(counted, layers=(*layers, head)), [step for step in updates if step])


def _with_updates(costs: Costs, updates: Sequence[Sequence[BundleUpdate]]) -> Costs:
    """The optimizer's seconds, a shared bundle's with its first layer: that one's upload waits for it."""
    if not updates:
        return costs
    seconds = [[0.0] * len(updates) for _ in costs.layers]
    for step, bundles in enumerate(updates):
        for bundle in bundles:
            seconds[bundle.layer][step] += bundle.end_s - bundle.start_s
    layers = (replace(c, optimizer_s=median(s)) for c, s in zip(costs.layers, seconds, strict=True))
    return replace(costs, layers=tuple(layers))
