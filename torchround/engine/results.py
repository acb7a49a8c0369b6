"""What a caller can ask of a dispatched pass. Every answer waits for what it needs, and is kept."""

from collections.abc import Callable

from torchround.engine.board import Fact
from torchround.engine.host_memory import HostPool
from torchround.engine.optimizer_worker import UpdateReport
from torchround.engine.passes import Pass, read_loss
from torchround.engine.reports import DeviceTimes, SlotReport, times_by_device
from torchround.engine.worker.transfers import Boundary
from torchround.pipeline.schedule import StageTask


class StepResult:
    """A pass's loss and device time and, of a training step, its update. `pool` is its engine's."""

    def __init__(
        self, work: Pass, tasks: list[StageTask], pool: HostPool, wait: Callable[[Fact], object]
    ) -> None:
        self.work = work
        self.tasks = tasks
        self.pool = pool
        self._wait = wait
        self._loss: float | None = None
        self._update: UpdateReport | None = None
        self._reports: list[SlotReport] | None = None

    @property
    def num_labels(self) -> int:
        """Labels that count, over the whole pass: the loss divisor."""
        return self.work.num_labels

    def loss(self) -> float:
        """Mean token loss over the pass: sums added in micro-batch order in fp64, then divided once."""
        if self._loss is None:
            total = sum(self._loss_sum(index) for index in range(len(self.work.micro_batches)))
            self._loss = total / max(self.num_labels, 1)
        return self._loss

    def update(self) -> UpdateReport:
        """Gradient norm before clipping, whether the update was skipped, and its time. After `Engine.step`."""
        if self._update is None:
            report = self._wait(Fact("updated", self.work.step))
            assert isinstance(report, UpdateReport), f"update of step {self.work.step} reported {report!r}"
            self._update = report
        return self._update

    def reports(self) -> list[SlotReport]:
        """What the devices report of each stage task, in dispatch order."""
        if self._reports is None:
            reports = [self._wait(Fact("done", task.slot)) for task in self.tasks]
            self._reports = [report for report in reports if isinstance(report, SlotReport)]
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
        if self.work.training:
            self.update()

    def _loss_sum(self, index: int) -> float:
        boundary = self._wait(Fact("loss", self.work.index, (index,)))
        assert isinstance(boundary, Boundary), f"loss of micro-batch {index} is {boundary!r}"
        return read_loss(boundary, self.pool)
