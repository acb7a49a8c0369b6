"""One thread per device: takes the device's stage jobs in dispatch order and runs their micro-batches.

The thread enqueues everything on the device's five streams and waits only for values and jobs of other threads.
Before any such wait it sends off the gradients that it still holds, because the optimizer may be waiting for
them.
"""

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from torchround.engine.board import Board, Queue, Value
from torchround.engine.buffer_reservation import StagingSizes, ValueSizes
from torchround.engine.device import NO_STEP, Device, Mark, Stream
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.landings import Landings
from torchround.engine.passes import StageJob
from torchround.engine.reports import DeviceSpan, StageReport
from torchround.engine.results import DeviceJob
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED, SYNC
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Tasks
from torchround.engine.worker.activation_transfers import ActivationTransfers
from torchround.engine.worker.bundle_transfers import FileReader, GradientDownload, WeightUpload
from torchround.engine.worker.compute import unbind
from torchround.engine.worker.orthogonalise import DIRECTION_STREAMS, DirectionJob, Orthogonaliser
from torchround.engine.worker.slots import DeviceConstants, StageSlots
from torchround.engine.worker.stage_run import StageRun
from torchround.layer import LayeredModel
from torchround.planning.partition import Partition, StageKind, StageTask

T = TypeVar("T")
# The job under way, without its pass, and its micro-batch or the position of its bundle: None between them.
WorkerState = tuple[StageTask | DirectionJob | None, int | None]
# The kind of the jobs that a device's thread gets.
STAGE_JOB = "stage slot {0} to be handed out"


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that the workers of an engine share."""

    store: HostStore
    board: Board
    tasks: Tasks
    pool: HostPool
    landings: Landings
    model: LayeredModel
    sizes: ValueSizes
    partition: Partition
    queues: Sequence[Queue[DeviceJob]]
    settings: EngineSettings


class DeviceWorker:
    """The thread that drives one device. `skeletons` are this worker's own copy of the layers, on `meta`."""

    def __init__(self, index: int, device: Device, setup: WorkerSetup) -> None:
        self.device = device
        self.setup = setup
        self.skeletons = list(copy.deepcopy(nn.ModuleList(setup.model.layers)))
        self._store = setup.store
        self._queue = setup.queues[index]
        self._next_slot = index
        self._micro_batch: int | None = None
        self._job: StageTask | DirectionJob | None = None
        self._upload: WeightUpload | None = None  # of the next stage job
        self._download: GradientDownload | None = None  # of the previous stage job
        self.activations = ActivationTransfers(device, setup.board, setup.pool, setup.sizes)
        self._orthogonaliser = Orthogonaliser(index, device, setup.store, setup.tasks)
        self.reader: FileReader | None = None
        # Without page-locking a copy is the thread's own work anyway, and a ring would only add a second one.
        if device.pins_host_memory and any(bundle.mapped for bundle in self._store.bundles):
            self.reader = FileReader(device, setup.tasks, setup.pool)
        self._idle_since: Mark | None = None
        self._reported_bytes = (device.uploaded_bytes, device.downloaded_bytes)
        self.thread = threading.Thread(target=self._main, name=f"torchround {device.name}", daemon=True)

    def allocate(self) -> None:
        """Allocate the slots of all stages, so that no step allocates and a plan that does not fit fails here."""
        setup = self.setup
        self._constants = DeviceConstants(self.device, self.skeletons)
        self.slots = StageSlots(
            self.device, setup.store, setup.settings.accumulate_dtype, setup.partition, len(setup.queues)
        )
        self._orthogonaliser.allocate()

    def release(self) -> None:
        """Free all device memory. The thread must have ended, and the device must be idle."""
        self.device.free()
        unbind(self.skeletons)
        self._upload = self._download = None  # and views of host buffers
        del self.activations  # and the activations that they hold

    def _main(self) -> None:
        try:
            self.device.enter_thread()
            self._constants.upload()
            while True:
                if self._queue.peek() is None:
                    self._flush()  # as in `_await`
                job = self._queue.take(STAGE_JOB.format(self._next_slot))
                if isinstance(job, StagingSizes):
                    self.activations.prepare(job)
                    continue
                if isinstance(job, StageJob):
                    self._run(job)
                else:
                    self._orthogonalise(job)
                self._next_slot += len(self.setup.queues)  # slots are dealt to devices in turn
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever a layer raises must reach the caller)
            # Without a variable for the failure, which would make a reference cycle through the error's traceback. Its
            # frames hold activations, and the failure may be a second one, which nothing else refers to.
            self.setup.board.fail(PipelineError.of(error, self.location(self.state())))

    def _run(self, job: StageJob) -> None:
        """Run one stage job: weights in, every micro-batch, gradients out."""
        self._job = job.task
        self._begin_step(job, Stream.COMPUTE, Stream.ACTIVATION_UPLOAD, Stream.ACTIVATION_DOWNLOAD)
        upload, self._upload = self._upload or self._start_upload(job), None
        # The optimizer may need this device's last gradients before it can complete
        # the weights that are missing.
        if upload.blocked:
            self._flush()
        self.device.wait(Stream.COMPUTE, upload.finish(), "uploaded weights")
        weights_ready = self.device.mark(Stream.WEIGHT_UPLOAD)
        stage, micro_batches = job.task.stage, job.task.micro_batches
        gradients = None if stage.kind is StageKind.FORWARD else GradientDownload(self, job, upload.layout)
        on_final = partial(self._send_early, gradients) if gradients and self._is_waited_for(job) else None
        slot = None if gradients is None else gradients.slot
        stage_run = StageRun(self, job, upload, slot, self._await, on_final)
        for position, micro_batch in enumerate(micro_batches):
            self._micro_batch = micro_batch
            self.setup.board.raise_if_stopped()
            # Chunks first: their copies then run beside this micro-batch's computation, not after it.
            self._advance_transfers(len(micro_batches) - position)
            stage_run.run(micro_batch)
        self._micro_batch = None
        upload.slot.released = self.device.record(Stream.COMPUTE, "weights that are read")
        if self.setup.model.own_dtypes:
            unbind(self.skeletons[stage.start : stage.stop])  # copies take memory beside the slot
        self.activations.end_stage()
        if gradients is None:
            self._flush()
        else:
            self._begin_download(gradients)
            gradients.layers_final(stage.start)
        self._report(job, upload, weights_ready, stage_run.spans)
        self._job = None

    def _orthogonalise(self, job: DirectionJob) -> None:
        """Run a direction job, while the weights of the next stage come up as far as they are complete."""
        self._job = job
        # Look-aheads need them, maybe on other devices. Gradients of the next step land only after this job's update.
        if self._download is not None and self._download.job.pass_.step <= job.step:
            self._flush()
        self.device.begin_step(job.step, *DIRECTION_STREAMS)
        for position, bundle in enumerate(job.bundles):
            self._micro_batch = position
            self._idle_since = self._orthogonaliser.run(bundle, job.accesses[position])
            self._begin_next_upload()
            if self._upload is not None:
                self._upload.advance(-(-self._upload.remaining // (len(job.bundles) - position)))
        self._micro_batch = None
        self._job = None

    def _begin_step(self, job: StageJob, *streams: Stream) -> None:
        # An evaluation has the number of the next training step, whose trace must not show its copies.
        self.device.begin_step(job.pass_.step if job.pass_.training else NO_STEP, *streams)

    def _is_waited_for(self, job: StageJob) -> bool:
        """Tell whether a stage job sends off each layer's gradients as soon as they are final.

        A stage's gradients have the next stage job's windows to go down. The exception is a device's last
        stage job of a step in `sync` mode: the update waits for these gradients, the next job for the update. In
        `bounded` mode every stage job is such an exception, because a layer's update waits for its own gradient alone.
        """
        is_last = job.slots_left < len(self.setup.queues)
        is_waited_for = self._store.policy is BOUNDED or (is_last and self._store.policy is SYNC)
        # Otherwise copies and the norm would take processor time from this very backward: 8 % of a step on two cores.
        return is_waited_for and self.device.has_link

    def _send_early(self, gradients: GradientDownload, layer: int) -> None:
        """Send off the gradients of a layer, to which the computation enqueued so far is the last that adds."""
        # An earlier download that waits for the optimizer comes first. This thread must not wait here:
        # its device would run out of work.
        if self._download in (None, gradients) or self._download.complete:
            self._begin_download(gradients)
            gradients.layers_final(layer)
            # Behind the activations already on their way, as every chunk.
            self.device.follow(
                Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD, "activations before early gradients"
            )
            gradients.advance(gradients.remaining)

    def _begin_download(self, gradients: GradientDownload) -> None:
        """Begin to send a stage's gradients, unless that is begun.

        Chunks go down in the next job's windows, or in `_flush` if none comes.
        """
        if self._download is not gradients:
            # The previous stage's download must be complete before this stage's takes its place.
            self._flush()
            self._begin_step(gradients.job, Stream.GRADIENT_DOWNLOAD)
            self._download = gradients

    def _report(
        self, job: StageJob, upload: WeightUpload, weights_ready: Mark, spans: Sequence[DeviceSpan]
    ) -> None:
        moved = (self.device.uploaded_bytes, self.device.downloaded_bytes)
        report = StageReport(
            task=job.task,
            step=job.pass_.step,
            idle_since=self._idle_since,
            weights_ready=weights_ready,
            update_wait_s=upload.waited_s,
            spans=tuple(spans),
            uploaded_bytes=moved[0] - self._reported_bytes[0],
            downloaded_bytes=moved[1] - self._reported_bytes[1],
            versions=upload.versions,
        )
        self._reported_bytes, self._idle_since = moved, spans[-1].end
        self.setup.board.post(job.pass_.reports.at(job.slot), report)

    def _start_upload(self, job: StageJob) -> WeightUpload:
        self._begin_step(job, Stream.WEIGHT_UPLOAD)
        return WeightUpload(self, job)

    def _advance_transfers(self, remaining: int) -> None:
        """Enqueue one transfer window: an equal chunk of the next stage's weights and of the last one's gradients.

        `remaining` counts the windows left in this stage, this one included.
        """
        self._begin_next_upload()
        # Each chunk queues behind the activations already on their way. A chunk has until the end of the
        # stage, but a computation waits for each activation. Chunks of one window's size keep an activation
        # from waiting for a whole stage's weights.
        if self._upload is not None:
            self.device.follow(Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD, "activations before weights")
            self._upload.advance(-(-self._upload.remaining // remaining))
        if self._download is not None:
            self.device.follow(
                Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD, "activations before gradients"
            )
            self._download.advance(-(-self._download.remaining // remaining))

    def _begin_next_upload(self) -> None:
        """Begin the upload for the next job, if that is a stage job that is handed out already."""
        # Looked for in every window, because it may be handed out while this job is under way.
        if self._upload is None and isinstance(job := self._queue.peek(), StageJob):
            self._upload = self._start_upload(job)

    def _flush(self) -> None:
        """Send off the gradients that this thread still holds."""
        if self._download is not None:
            self._download.finish()
            self._download = None

    def _await(self, value: Value[T]) -> T:
        # Held gradients go first: what is awaited may depend on an update that needs
        # them, and then both would hang.
        if not value.happened:
            self._flush()
        return self.setup.board.wait(value)

    # What the watchdog and error messages ask for, from any thread.

    def state(self) -> WorkerState:
        """Return what is under way; `location` describes it. The watchdog keeps it, so it must not hold memory."""
        return self._job, self._micro_batch

    def location(self, state: WorkerState) -> FaultLocation:
        """Describe a state that `state` returned."""
        job, position = state
        actor = f"device {self.device.name}"
        names = self.setup.model.names
        if isinstance(job, StageTask):
            layers = tuple(names[job.stage.start : job.stage.stop])
            return FaultLocation(actor, job.stage.kind.value, layers, position)
        return FaultLocation(actor) if job is None else job.location(actor, names, position)
