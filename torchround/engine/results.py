"""The passes of an engine: what is checked, reserved and copied before one begins, and the result that its caller gets."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from torchround.engine.board import Observer, Queue, Value, WaitForValue
from torchround.engine.buffer_reservation import BufferReservation, PassShape, StagingSizes
from torchround.engine.device import Event, PastEvent
from torchround.engine.errors import EngineUsageError, PipelineError, Stopped
from torchround.engine.passes import UPDATED, HostTensors, Pass, StageJob
from torchround.engine.reports import StageReport, UpdateReport
from torchround.engine.store.host_memory import HostPool
from torchround.engine.worker.orthogonalise import DirectionJob
from torchround.engine.worker.slots import Packing, fill, unflatten
from torchround.layer import Batch, Hidden, MicroBatch
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import StageKind, StageTask

# The next step is dispatched while one runs; more would only hold more boundary activations.
MOST_PASSES_UNDER_WAY = 2

DeviceJob = StagingSizes | StageJob | DirectionJob


class StepResult:
    """The result of a dispatched pass: its loss, what its devices measured and, for a training step, its update.

    `step` is the number of training steps before the pass. `num_labels` is the number of labels that the loss counts, over
    the whole pass: its divisor. Every method waits for what it needs.
    """

    def __init__(
        self,
        pass_: Pass,
        tasks: list[StageTask],
        pool: HostPool,
        wait: WaitForValue,
        wait_for_end: Callable[[], None] = lambda: None,
    ) -> None:
        # Without the pass: the caller may keep results for long, and its other values are in the engine's pool.
        self.step = pass_.step
        self.num_labels = pass_.num_labels
        self.shape = pass_.shape
        self.tasks = tasks
        self.pool = pool
        self._wait = wait
        self._wait_for_end = wait_for_end  # of a call: its gradients and losses are in the sums of the step
        self._results = pass_.results
        self._all_sums = pass_.sums if pass_.share is not None and pass_.share.num_machines > 1 else None
        self._enqueued = [pass_.reports.at(task.slot) for task in tasks]
        self._updated = pass_.updated
        self._loss_sums: list[float] | None = None
        self._outputs: list[Hidden] | None = None
        self._reports: list[StageReport] | None = None

    def loss(self) -> float:
        """Return the mean loss per label. Sums add up in fp64 in micro-batch order and are divided once.

        A training step's loss is that of all machines, which is there once their calls have ended.
        """
        sums: Sequence[float] = self.loss_sums()
        if self._all_sums is not None:
            sums = self._wait(self._all_sums)
        return mean_loss(sums, self.num_labels)

    def loss_sums(self) -> list[float]:
        """Return the sum of the token losses of each of this machine's micro-batches, in their order."""
        # Once only: the last reader of a loss gives its buffer back, and another micro-batch may fill it.
        if self._loss_sums is None:
            if self.shape.gives_outputs:
                raise EngineUsageError("the result of forward() has outputs(), and no loss")
            self._loss_sums = [float(self._wait(loss).read(self.pool)[0]) for loss in self._results]
            self._results = []
        return self._loss_sums

    def outputs(self) -> list[Hidden]:
        """Return what the last layer returned for each micro-batch, in their order, in host memory of its own.

        Only after `Engine.forward`. Waits for the pass.
        """
        if self._outputs is None:
            if not self.shape.gives_outputs:
                raise EngineUsageError("outputs() is for results of forward(); this pass has losses")
            landed = map(self._wait, self._results)
            self._outputs = [unflatten(each.read(self.pool), each.packing.structure) for each in landed]
            self._results = []
        return self._outputs

    def update(self) -> UpdateReport:
        """Return what the update did. Only after `Engine.step`."""
        return self._wait(self._updated)

    def reports(self) -> list[StageReport]:
        """Return what the devices measured in each stage slot, in dispatch order."""
        if self._reports is None:
            self._reports = [self._wait(report) for report in self._enqueued]
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

    def wait(self) -> None:
        """Wait until the losses or outputs are on the host and every stage task is enqueued; backward passes may still run."""
        _ = self.outputs() if self.shape.gives_outputs else self.loss()
        self.reports()

    def collect(self, is_open: bool = False) -> None:
        """Wait for everything. If the step `is_open`, a training pass ends once its gradient is in the step's sum."""
        self.wait()
        if is_open:
            self._wait_for_end()
        elif self.shape.training:
            self.update()


def mean_loss(loss_sums: Iterable[float], num_labels: int) -> float:
    """Return the mean loss per label of micro-batches whose losses are given as sums, added up in their order."""
    return sum(loss_sums) / max(num_labels, 1)


class Passes:
    """The maker of an engine's passes, and the results of the newest ones.

    `queues` are those of the devices. `synchronize` waits for an event of a device. `is_compiled` says that the layers have
    to be compiled.
    """

    def __init__(
        self,
        reservation: BufferReservation,
        queues: Sequence[Queue[DeviceJob]],
        observer: Observer,
        synchronize: Callable[[Event], None],
        is_compiled: bool,
    ) -> None:
        self._reservation = reservation
        self._store = reservation.store
        self._pool = reservation.pool
        self._queues = queues
        self._observer = observer
        self._synchronize = synchronize
        self._is_compiled = is_compiled
        self._under_way: deque[StepResult] = deque()
        self._prepared: set[StagingSizes] = set()
        self._num_made = 0
        self._updated = Value[UpdateReport](UPDATED, self._store.step)  # of the newest step

    def make(
        self,
        batches: Sequence[Batch],
        tasks: list[StageTask],
        step: int,
        stale_layers: int,
        *,
        share: StepShare | None = None,
        num_labels: int | None = None,
        gives_outputs: bool = False,
    ) -> Pass:
        """Return a pass over `batches` after `step` training steps, with all that it needs reserved and in the pool.

        A training step has a `share`. Raises `EngineUsageError`.
        """
        problem = problem_of(batches, self._is_compiled) if tasks else None
        if problem is not None:
            raise EngineUsageError(problem)
        if num_labels is None:
            num_labels = 0 if gives_outputs else sum(batch.num_labels() for batch in batches)
        packings = [Packing.of(batch.tensors()) for batch in batches]
        shapes, integer_bytes = [batch.shape for batch in batches], [each.nbytes for each in packings]
        shape = PassShape.of(tasks, shapes, integer_bytes, share is not None, step, gives_outputs)
        before = self._under_way[-1].shape if self._under_way else None
        if before is not None and not self._reservation.knows_all(before):
            # The previous pass measures them, so that none but a shape's first pass takes memory in its middle.
            self.wait()
        if tasks:  # otherwise this machine has no part in the step
            self.prepare(self._reservation.reserve_for(shape, before))
        if self._updated.numbers != (step,):
            self._updated = Value(UPDATED, step)
        # Each device uploads the micro-batches that it works on; the last one gives their host buffers back.
        devices: list[set[int]] = [set() for _ in batches]
        for task in tasks:
            for m in task.micro_batches:
                devices[m].add(task.device)
        of_host = [self._copied(*each) for each in zip(batches, packings, map(len, devices), strict=True)]
        self._num_made += 1
        return Pass(
            self._num_made - 1, shape, self._store, num_labels, of_host, share, self._updated, stale_layers
        )

    def prepare(self, *sizes: StagingSizes) -> None:
        """Let every device allocate now what passes of these sizes need, so that later steps allocate nothing."""
        new = [each for each in dict.fromkeys(sizes) if each not in self._prepared]
        self._prepared.update(new)
        for queue in self._queues:
            queue.put(*new)

    def _copied(self, micro_batch: Batch, packing: Packing, readers: int) -> HostTensors:
        """Copy a micro-batch's tensors into one pool buffer, for `readers` devices to upload."""
        buffer = self._pool.take(packing.nbytes)
        for event in buffer.busy:
            self._synchronize(event)
        self._observer.touched(reads=(), writes=[buffer.memory])
        fill(packing.views(buffer.memory), micro_batch.tensors())
        return HostTensors(buffer, packing, PastEvent(), readers, micro_batch.rebuild())

    # Those under way.

    def add(self, result: StepResult) -> None:
        """Take the result of the pass that was made last and is dispatched."""
        self._under_way.append(result)

    def make_room(self, step: int) -> None:
        """Wait for the pass before the last. The next pass belongs to `step`, so its update cannot be waited for yet."""
        while len(self._under_way) >= MOST_PASSES_UNDER_WAY:
            result = self._under_way.popleft()
            # Only the last pass of a step waits for its update. Otherwise the next step could not begin beside it.
            is_last = result.step < min(step, self._under_way[0].step)
            result.collect(is_open=not is_last)
            if is_last:
                result.update()  # even if that pass is an evaluation

    def wait(self) -> None:
        """Wait for the losses of all passes, and until each stage task is enqueued."""
        for result in self._under_way:
            result.wait()

    def keep(self) -> None:
        """Take losses and outputs out of the engine's pool, which is about to close. They may be missing after a fault."""
        for result in self._under_way:
            with suppress(EngineUsageError, PipelineError, Stopped):
                result.wait()


def problem_of(micro_batches: Sequence[Batch], is_compiled: bool) -> str | None:
    """Return what is wrong with the micro-batches of a pass, or None. `is_compiled` says that layers have to be compiled."""
    if not micro_batches:
        return "a pass needs at least one micro-batch"
    if is_compiled and (others := {type(part).__name__ for part in micro_batches} - {MicroBatch.__name__}):
        return (
            f"compiled layers take a MicroBatch, not {', '.join(sorted(others))}; give the engine no compiler"
        )
    for index, micro_batch in enumerate(micro_batches):
        problem = micro_batch.problem()
        if problem is not None:
            return f"micro-batch {index}: {problem}"
    bounds = {part.max_documents for part in micro_batches if isinstance(part, MicroBatch)}
    if len(bounds) > 1:
        return (
            "all micro-batches of a pass must have the same max_documents, "
            f"but these have {sorted(map(str, bounds))}"
        )
    return None
