"""A pass: one batch's trip through the pipeline, as the controller hands it out, and the values that it makes."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from torchround.engine.board import Value, Values
from torchround.engine.buffer_reservation import PassShape, forward_inputs
from torchround.engine.device import Event, PastEvent
from torchround.engine.reports import StageReport, UpdateReport
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Access
from torchround.engine.worker.slots import Packing
from torchround.layer import Batch
from torchround.planning.host_buffers import kept_cuts
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import StageKind, StageTask

# The kinds of values.
BOUNDARY = "the input of layer {1} for micro-batch {2} of pass {0}"
BOUNDARY_GRADIENT = "the gradient of layer {1}'s input for micro-batch {2} of pass {0}"
KEPT = "the kept activations of layer {1} for micro-batch {2} of pass {0}"
LOSS = "the loss of micro-batch {1} of pass {0}"
OUTPUT = "the output of micro-batch {1} of pass {0}"
STAGE_ENQUEUED = "all of stage slot {0} to be enqueued"
SUMS = "the losses of pass {0} of all machines"
UPDATED = "the update of step {0}"


class HostTensors:
    """Packed tensors on the host: a stage's input or its gradient, a micro-batch's integers, or a loss.

    They are valid after `landed`; the last reader gives them back.

    `rebuild` makes a micro-batch from its uploaded tensors (`Batch.rebuild`).
    """

    def __init__(
        self,
        buffer: HostBuffer,
        packing: Packing,
        landed: Event,
        readers: int,
        rebuild: Callable[[Sequence[Tensor]], Batch] | None = None,
    ) -> None:
        self.packing = packing
        self.rebuild = rebuild
        self.landed = landed
        self._buffer = buffer
        self._readers = readers
        self._reads: list[Event] = []
        self._lock = threading.Lock()

    @property
    def memory(self) -> Tensor:
        """The bytes of the packing; empty after the end of the engine."""
        return self._buffer.memory[: self.packing.nbytes]

    def reader_ends(self, event: Event, pool: HostPool) -> None:
        """Note that one reader's read ends at `event`."""
        with self._lock:
            self._reads.append(event)
            last = len(self._reads) == self._readers
        if last:
            pool.give(self._buffer, self._reads)

    def read(self, pool: HostPool) -> list[Tensor]:
        """Return copies of the tensors, as one of the readers. Waits until they have landed."""
        self.landed.synchronize()
        copies = [view.clone() for view in self.packing.views(self.memory)]
        self.reader_ends(PastEvent(), pool)
        return copies


class Pass:
    """The facts that all stage jobs of a pass share, and the values that they make. These go with the pass.

    `step` counts the training steps before it. `version` is the weight version it reads, except what
    `version_read` says of `stale_layers`. `loss_factor` multiplies each token's loss before the backward pass:
    it is the loss scale divided by `num_labels`. `forward_inputs` are the layers whose input a forward or fused stage takes
    from the host, `backward_inputs` the layers whose input a backward stage takes. `share` is this machine's share of a
    training step. The `results` are losses, or what the last layer returns in a pass that `gives_outputs`.
    """

    def __init__(
        self,
        index: int,
        shape: PassShape,
        store: HostStore,
        num_labels: int,
        micro_batches: Sequence[HostTensors],
        share: StepShare | None,
        updated: Value[UpdateReport],
        stale_layers: int,
    ) -> None:
        self.shape, self.step, self.training = shape, shape.step, shape.training
        self.gives_outputs = shape.gives_outputs
        self.num_labels = num_labels
        self.micro_batches = micro_batches
        self.share = share
        self.version = store.policy.version_read(self.step) if self.training else self.step
        self.stale_layers = stale_layers
        loss_scale = store.loss_scaling.scale_of(self.step) if self.training else 1.0
        self.loss_factor = loss_scale / max(num_labels, 1)
        self.forward_inputs = forward_inputs(shape.stages)
        self.backward_inputs = kept_cuts(shape.stages, stale_layers)
        # By layer and micro-batch. What a layer keeps is None if the layer is to be recomputed.
        self.boundaries = Values[HostTensors](BOUNDARY, index)
        self.boundary_gradients = Values[HostTensors](BOUNDARY_GRADIENT, index)
        self.kept = Values[HostTensors | None](KEPT, index)
        kind = OUTPUT if self.gives_outputs else LOSS
        self.results = [Value[HostTensors](kind, index, m) for m in range(len(micro_batches))]
        self.reports = Values[StageReport](STAGE_ENQUEUED)  # by slot
        self.sums = Value[Sequence[float]](SUMS, index)  # if there are several machines
        self.updated = updated

    def version_read(self, bundle: Bundle, layer: int, task: StageTask) -> int:
        """Return the version of a bundle that a stage uploads for `layer`.

        The forward of a step's first round reads the version before in its first `stale_layers` layers. An evaluation
        reads what the host holds between steps: the version before of each bundle that one of those layers uses.
        """
        first = layer if self.training else bundle.layers[0]
        is_early = task.stage.kind is StageKind.FORWARD and task.round == 0
        return self.version - (is_early and first < self.stale_layers)


@dataclass(frozen=True)
class StageJob:
    """A stage task of a pass, as a device gets it.

    `uploads` and `parts` are, by layer and bundle, its accesses to device weights and to gradients.
    """

    task: StageTask
    pass_: Pass
    uploads: dict[tuple[int, int], Access]
    parts: dict[tuple[int, int], Access]

    @property
    def slot(self) -> int:
        """The stage slot of the job."""
        return self.task.slot

    @property
    def slots_left(self) -> int:
        """The number of the pass's stage slots after this one."""
        stages, rounds = len(self.pass_.shape.stages), len(self.pass_.shape.rounds)
        return rounds * stages - (self.task.round * stages + self.task.stage_index + 1)
