"""A pass: one batch's trip through the pipeline, the values that it makes, and the result that its caller gets."""

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import TypeVar

from torch import Tensor

from torchround.engine.board import Flag, Value, Values
from torchround.engine.buffer_reservation import PassShape
from torchround.engine.device import NO_STEP, PASSED, Event
from torchround.engine.errors import EngineUsageError
from torchround.engine.reports import StageReport, UpdateReport
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access, Task
from torchround.engine.worker.orthogonalise import DirectionJob
from torchround.engine.worker.slots import Packing, Structure, unflatten
from torchround.layer import Batch, Hidden
from torchround.planning.host_buffers import forward_inputs, kept_cuts
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import StageKind, StageTask

T = TypeVar("T")

# The kinds of values.
BOUNDARY = "the input of layer {1} for micro-batch {2} of pass {0}"
BOUNDARY_GRADIENT = "the gradient of layer {1}'s input for micro-batch {2} of pass {0}"
KEPT = "the kept activations of layer {1} for micro-batch {2} of pass {0}"
LOSS = "the loss of micro-batch {1} of pass {0}"
OUTPUT = "the output of micro-batch {1} of pass {0}"
STAGE_ENQUEUED = "all of stage slot {0} to be enqueued"
SUMS = "the losses of pass {0} of all machines"
UPDATED = "the update of step {0}"


@dataclass(eq=False)
class HostTensors:
    """Packed tensors on the host: a stage's input or its gradient, a micro-batch's integers, or a loss.

    They are valid after `landed`; the last of the `readers` gives the buffer back. `rebuild` is `Batch.rebuild`'s.
    """

    buffer: HostBuffer
    packing: Packing
    landed: Event
    readers: int
    rebuild: Callable[[Sequence[Tensor]], Batch] | None = None
    _reads: list[Event] = field(default_factory=list, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    @property
    def memory(self) -> Tensor:
        """The bytes of the packing; empty after the end of the engine."""
        return self.buffer.memory[: self.packing.nbytes]

    def reader_ends(self, event: Event, pool: HostPool) -> None:
        with self._lock:
            self._reads.append(event)
            last = len(self._reads) == self.readers
        if last:
            pool.give(self.buffer, self._reads)

    def read(self, pool: HostPool) -> list[Tensor]:
        """Copy the tensors, as one of the readers. Waits until they have landed."""
        self.landed.synchronize()
        copies = [view.clone() for view in self.packing.views(self.memory)]
        self.reader_ends(PASSED, pool)
        return copies


@dataclass(eq=False, repr=False)
class Pass:
    """The facts that all stage jobs of a pass share, and the values that they make. These go with the pass.

    `step` counts the training steps before it. `version` is the weight version that it reads, except what
    `version_read` says of `stale_layers`. `loss_factor`, the loss scale divided by `num_labels`, multiplies each token's loss.
    `forward_inputs` are the layers whose input a forward or fused stage takes from the host, `backward_inputs` those of
    backward stages. The `results` are losses, or what the last layer returns in a pass that `gives_outputs`.
    """

    index: InitVar[int]
    shape: PassShape
    store: InitVar[HostStore]
    num_labels: int
    micro_batches: Sequence[HostTensors]
    share: StepShare | None
    updated: Value[UpdateReport]

    def __post_init__(self, index: int, store: HostStore) -> None:
        shape, self.step, self.training = self.shape, self.shape.step, self.shape.training
        self.gives_outputs, self.stale_layers = shape.gives_outputs, shape.stale_layers
        self.version = store.mode.version_read(self.step) if self.training else self.step
        loss_scale = store.loss_scaling.scale_of(self.step) if self.training else 1.0
        self.loss_factor = loss_scale / max(self.num_labels, 1)
        self.forward_inputs = forward_inputs(shape.stages)
        self.backward_inputs = kept_cuts(shape.stages, shape.stale_layers)
        # By layer and micro-batch. What a layer keeps is None if the layer is to be recomputed.
        self.boundaries = Values[HostTensors](BOUNDARY, index)
        self.boundary_gradients = Values[HostTensors](BOUNDARY_GRADIENT, index)
        self.kept = Values[HostTensors | None](KEPT, index)
        kind = OUTPUT if self.gives_outputs else LOSS
        self.results = [Value[HostTensors](kind, index, m) for m in range(len(self.micro_batches))]
        self.reports = Values[StageReport](STAGE_ENQUEUED)  # by slot
        self.sums = Value[Sequence[float]](SUMS, index)  # if there are several machines

    def version_read(self, bundle: Bundle, layer: int, task: StageTask) -> int:
        """Choose a version: in a step's first round, forwards of the first `stale_layers` layers read the one before."""
        # The host holds one version between steps: an older one of each bundle that one of those layers uses.
        first = layer if self.training else bundle.layers[0]
        is_early = task.stage.kind is StageKind.FORWARD and task.round == 0
        return self.version - (is_early and first < self.stale_layers)


@dataclass(frozen=True)
class StageJob:
    """A stage task of a pass. `uploads` and `parts` are its accesses to weights and gradients, by layer and bundle."""

    task: StageTask
    pass_: Pass
    uploads: dict[tuple[int, int], Access]
    parts: dict[tuple[int, int], Access]

    @property
    def slot(self) -> int:
        return self.task.slot

    @property
    def traced_step(self) -> int:
        # An evaluation has the number of the next training step, whose trace must not show its copies.
        return self.pass_.step if self.pass_.training else NO_STEP

    @property
    def slots_left(self) -> int:
        stages, rounds = len(self.pass_.shape.stages), len(self.pass_.shape.rounds)
        return rounds * stages - (self.task.round * stages + self.task.stage_index + 1)


DeviceJob = PassShape | StageJob | DirectionJob


@dataclass(eq=False, repr=False)
class StepResult:
    """The result of a dispatched pass: its loss, what its devices measured and, for a training step, its update.

    `step` is the number of training steps before the pass, `num_labels` the divisor of its loss. Every method waits for what
    it needs. After the task `end` of a training pass its gradients and losses are in the sums of the step.
    """

    pass_: InitVar[Pass]
    tasks: InitVar[list[StageTask]]
    pool: HostPool
    wait_for: Callable[[Flag], None]
    end: Task | None = None

    def __post_init__(self, pass_: Pass, tasks: list[StageTask]) -> None:
        # Without the pass: the caller may keep results for long, and its other values are in the engine's pool.
        self.step = pass_.step
        self.num_labels = pass_.num_labels
        self.shape = pass_.shape
        self._results = pass_.results
        self._all_sums = pass_.sums if pass_.share is not None and pass_.share.num_machines > 1 else None
        self._enqueued = [pass_.reports[task.slot] for task in tasks]
        self._updated = pass_.updated
        self._read: list[tuple[list[Tensor], Structure]] | None = None
        self._reports: list[StageReport] | None = None

    def _wait(self, value: Value[T]) -> T:
        self.wait_for(value)
        return value.content

    def loss(self) -> float:
        """Return the mean loss per label. A training step's loss is that of all machines, once their calls have ended."""
        if self.shape.gives_outputs:
            raise EngineUsageError("Engine.forward gives outputs(), not a loss")
        sums: Sequence[float] = self.loss_sums()
        if self._all_sums is not None:
            sums = self._wait(self._all_sums)
        return mean_loss(sums, self.num_labels)

    def loss_sums(self) -> list[float]:
        return [float(tensors[0]) for tensors, _ in self._read_results()]

    def outputs(self) -> list[Hidden]:
        """Copy what the last layer returned for each micro-batch into host memory of its own, after `Engine.forward`."""
        if not self.shape.gives_outputs:
            raise EngineUsageError("this pass has a loss(); outputs are those of Engine.forward")
        return [unflatten(*each) for each in self._read_results()]

    def _read_results(self) -> list[tuple[list[Tensor], Structure]]:
        # Once only: the last reader gives a buffer back, and other values may fill it. Without `cached_property`, whose
        # lock in Python 3.11 is one for all results: engines in other threads would wait for this one.
        if self._read is None:
            landed = map(self._wait, self._results)
            self._read = [(each.read(self.pool), each.packing.structure) for each in landed]
            self._results = []
        return self._read

    def update(self) -> UpdateReport:
        return self._wait(self._updated)

    def reports(self) -> list[StageReport]:
        if self._reports is None:
            self._reports = [self._wait(report) for report in self._enqueued]
        return self._reports

    def by_device(self, figure: Callable[[StageReport], float], num_devices: int) -> list[float]:
        sums = [0.0] * num_devices
        for report in self.reports():
            sums[report.task.device] += figure(report)
        return sums

    def wait(self) -> None:
        """Wait until losses or outputs are on the host and every stage is enqueued; backward passes may still run."""
        _ = self.outputs() if self.shape.gives_outputs else self.loss()
        self.reports()

    def collect(self) -> None:
        self.wait()
        if self.shape.training:
            self.update()


def mean_loss(loss_sums: Iterable[float], num_labels: int) -> float:
    """Average the loss over labels. The sums of micro-batches add up in fp64 in their order, and are divided once."""
    return sum(loss_sums) / max(num_labels, 1)
