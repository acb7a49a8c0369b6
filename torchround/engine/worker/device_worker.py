"""One thread per device: takes the device's stage jobs in dispatch order and runs their micro-batches.

The thread enqueues everything on the device's five streams and waits only for hand-overs of other threads.
Before any such wait it sends off the gradients that it still holds, because the optimizer may be waiting for
them.
"""

import copy
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from torch import nn

from torchround.engine.board import Board, HandOverKey
from torchround.engine.boundary_sizes import BoundarySizes
from torchround.engine.device import NO_STEP, Device, Mark, Stream
from torchround.engine.direction_jobs import DIRECTIONS_ENQUEUED, DirectionJob
from torchround.engine.errors import FaultLocation, PipelineError, Stopped
from torchround.engine.exchange.landings import Landings
from torchround.engine.kept_layers import KeptLayers
from torchround.engine.passes import FIRST_SIZES, STAGE_JOB, StageJob
from torchround.engine.results import STAGE_ENQUEUED, DeviceSpan, StageReport
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import BOUNDED, SYNC
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Tasks
from torchround.engine.worker.activation_transfers import ActivationTransfers, StagingSizes
from torchround.engine.worker.bundle_transfers import GradientDownload, WeightUpload
from torchround.engine.worker.compute import LayerCall, bind, unbind, with_own_seed
from torchround.engine.worker.constants import DeviceConstants
from torchround.engine.worker.file_reader import FileReader
from torchround.engine.worker.kept_transfers import KeptTransfers
from torchround.engine.worker.orthogonalise import DIRECTION_STREAMS, Orthogonaliser
from torchround.engine.worker.slots import DeviceSlot, StageLayout, StageSlots
from torchround.engine.worker.stage_run import StageRun
from torchround.layer import LayeredModel
from torchround.planning.partition import Partition, StageKind

T = TypeVar("T")
# The job under way, with its micro-batch, or the position of its bundle: None between jobs, and between micro-batches.
WorkerState = tuple[StageJob | DirectionJob | None, int | None]


@dataclass(frozen=True)
class WorkerSetup:
    """Everything that the workers of an engine share."""

    store: HostStore
    board: Board
    tasks: Tasks
    pool: HostPool
    landings: Landings
    model: LayeredModel
    sizes: BoundarySizes
    partition: Partition
    num_devices: int
    settings: EngineSettings
    kept: KeptLayers
    on_failure: Callable[[PipelineError], None]


class DeviceWorker:
    """The thread that drives one device. `skeletons` are this worker's own copy of the layers, on `meta`."""

    def __init__(self, index: int, device: Device, skeletons: list[nn.Module], setup: WorkerSetup) -> None:
        self._device = device
        self._skeletons = skeletons
        self._setup = setup
        self._store = setup.store
        self._next_slot = index
        self._micro_batch: int | None = None
        self._job: StageJob | DirectionJob | None = None
        self._constants = DeviceConstants(device, skeletons)
        self._slots = StageSlots(device, setup.store, setup.settings.accumulate_dtype)
        self._upload: WeightUpload | None = None  # of the next stage job
        self._download: GradientDownload | None = None  # of the previous stage job
        self._activations = ActivationTransfers(device, setup.board, setup.pool)
        self._kept = KeptTransfers(device, setup.board, setup.pool, setup.kept)
        self._orthogonaliser = Orthogonaliser(index, device, setup.store, setup.tasks)
        self.reader: FileReader | None = None
        # Without page-locking a copy is the thread's own work anyway, and a ring would only add a second one.
        if device.pins_host_memory and any(bundle.mapped for bundle in self._store.bundles):
            self.reader = FileReader(index, device.name, setup.board, setup.pool, setup.on_failure)
        self._idle_since: Mark | None = None
        self._reported_bytes = (device.uploaded_bytes, device.downloaded_bytes)
        self.thread = threading.Thread(target=self._main, name=f"torchround {device.name}", daemon=True)

    def allocate(self) -> None:
        """Allocate the slots of all stages, so that no step allocates and a plan that does not fit fails here."""
        self._constants.allocate()
        self._slots.allocate(self._setup.partition, self._setup.num_devices)
        self._orthogonaliser.allocate()

    def let_go(self) -> None:
        """Drop all device memory. The thread must have ended, and the device must be idle.

        Empties the slots themselves: other objects that refer to them, or to this worker, then hold no memory.
        """
        self._constants.clear()
        self._slots.clear()
        self._orthogonaliser.clear()
        self._activations.clear()
        self._kept.clear()
        self._upload = self._download = None
        if self.reader is not None:
            self.reader.let_go()
        unbind(self._skeletons)

    def _main(self) -> None:
        try:
            self._device.enter_thread()
            self._constants.upload()
            for sizes in self._await(FIRST_SIZES(0)):
                self._prepare(sizes)
            while True:
                job = self._await(STAGE_JOB(self._next_slot))
                if isinstance(job, StageJob):
                    self._run(job)
                else:
                    self._orthogonalise(job)
                self._next_slot += self._setup.num_devices  # slots are dealt to devices in turn
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001  (whatever a layer raises must reach the caller)
            self._setup.on_failure(self._failure(error))

    def _failure(self, error: BaseException) -> PipelineError:
        # A function of its own: in `_main`, a variable with the failure would make a reference cycle through
        # the error's traceback. The traceback's frames hold activations, and the failure may be a second one,
        # which nothing else refers to.
        failure = PipelineError(self.location(self.state()), f"{type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def _run(self, job: StageJob) -> None:
        """Run one stage job: weights in, every micro-batch, gradients out."""
        self._job = job
        self._begin_step(job, Stream.COMPUTE, Stream.ACTIVATION_UPLOAD, Stream.ACTIVATION_DOWNLOAD)
        self._prepare(job.pass_.sizes)
        upload = self._upload or self._start_upload(job)
        self._upload = None
        # The optimizer may need this device's last gradients before it can complete
        # the weights that are missing.
        if upload.blocked:
            self._flush()
        self._device.wait(Stream.COMPUTE, upload.finish(), "uploaded weights")
        weights_ready = self._device.mark(Stream.WEIGHT_UPLOAD)
        has_gradients = job.task.stage.kind is not StageKind.FORWARD
        gradients = self._clear_gradients(upload.layout) if has_gradients else None
        # Bound anew for each job: each has its own place in the buffer, and the next stage has other layers.
        modules = self._bind(upload, gradients)
        layers = self._layer_calls(upload.layout.layers, modules)
        stage_run = StageRun(
            job,
            layers,
            upload.layout,
            upload.slot,
            gradients,
            model=self._setup.model,
            sizes=self._setup.sizes,
            settings=self._setup.settings,
            board=self._setup.board,
            device=self._device,
            activations=self._activations,
            kept=self._kept,
            wait=self._await,
            on_final=self._early_download(job, upload.layout, gradients),
        )
        for position, micro_batch in enumerate(job.task.micro_batches):
            self._micro_batch = micro_batch
            self._setup.board.raise_if_stopped()
            # Chunks first: their copies then run beside this micro-batch's computation, not after it.
            self._advance_transfers(len(job.task.micro_batches) - position)
            stage_run.run(micro_batch)
        self._finish(job, upload, gradients)
        self._report(job, upload, weights_ready, stage_run.spans)
        self._job = None

    def _orthogonalise(self, job: DirectionJob) -> None:
        """Run a direction job, while the weights of the next stage come up as far as they are complete."""
        self._job = job
        # Look-aheads need them, maybe on other devices. Gradients of the next step land only after this job's update.
        if self._download is not None and self._download.job.pass_.step <= job.step:
            self._flush()
        self._device.begin_step(job.step, *DIRECTION_STREAMS)
        for position, bundle in enumerate(job.bundles):
            self._micro_batch = position
            access, buffer = job.accesses[position], job.buffers[position]
            self._idle_since = self._orthogonaliser.run(bundle, access, buffer)
            self._begin_next_upload()
            if self._upload is not None:
                self._upload.advance(-(-self._upload.remaining // (len(job.bundles) - position)))
        self._micro_batch = None
        self._setup.board.signal(DIRECTIONS_ENQUEUED(job.slot))
        self._job = None

    def _bind(self, upload: WeightUpload, gradients: DeviceSlot | None) -> list[nn.Module]:
        own_dtypes = self._setup.model.own_dtypes
        binding = partial(
            bind, self._store, self._skeletons, upload.layout, upload.slot, gradients, own_dtypes
        )
        if not own_dtypes:
            return binding()
        return self._device.run(Stream.COMPUTE, binding, reads=[upload.slot.memory])

    def _prepare(self, sizes: StagingSizes) -> None:
        self._activations.prepare(sizes)
        self._kept.prepare(sizes)

    def _begin_step(self, job: StageJob, *streams: Stream) -> None:
        # An evaluation has the number of the next training step, whose trace must not show its copies.
        self._device.begin_step(job.pass_.step if job.pass_.training else NO_STEP, *streams)

    def _finish(self, job: StageJob, upload: WeightUpload, gradients: DeviceSlot | None) -> None:
        self._micro_batch = None
        upload.slot.released = self._device.record(Stream.COMPUTE, "weights that are read")
        if self._setup.model.own_dtypes:
            unbind(
                self._skeletons[layer] for layer in upload.layout.layers
            )  # copies take memory beside the slot
        self._activations.end_stage()
        if gradients is None:
            self._flush()
        else:
            self._begin_download(job, upload.layout, gradients).layers_final(upload.layout.layers.start)

    def _early_download(
        self, job: StageJob, layout: StageLayout, gradients: DeviceSlot | None
    ) -> Callable[[int], None] | None:
        """Return what sends off each layer's gradients as soon as they are final, if the stage job asks for that.

        A stage's gradients have the next stage job's windows to go down. The exception is a device's last
        stage job of a step in `sync` mode: the update waits for these gradients, the next job for the update. In
        `bounded` mode every stage job is such an exception, because a layer's update waits for its own gradient alone.
        """
        if not self._device.has_link:
            # The copies and the norm would take processor time from this very backward: 8 % of a step on two cores.
            return None
        is_last = job.slots_left < self._setup.num_devices
        is_waited_for = self._store.policy is BOUNDED or (is_last and self._store.policy is SYNC)
        if gradients is None or not is_waited_for:
            return None

        def layer_final(layer: int) -> None:
            earlier = self._download is not None and self._download.job is not job
            # An earlier download that waits for the optimizer comes first. This thread must not wait here:
            # its device would run out of work.
            if not (earlier and self._download and not self._download.complete):
                download = self._begin_download(job, layout, gradients)
                download.layers_final(layer)
                # Behind the activations already on their way, as every chunk.
                self._device.follow(
                    Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD, "activations before early gradients"
                )
                download.advance(download.remaining)

        return layer_final

    def _begin_download(self, job: StageJob, layout: StageLayout, gradients: DeviceSlot) -> GradientDownload:
        """Return the download of the stage job's gradients, begun here unless it is under way.

        Its chunks go down in the next job's windows, or in `_flush` if none comes.
        """
        if self._download is None or self._download.job is not job:
            # The previous stage's download must be complete before this stage's takes its place.
            self._flush()
            self._begin_step(job, Stream.GRADIENT_DOWNLOAD)
            self._download = GradientDownload(
                self._device,
                self._store,
                self._setup.tasks,
                self._setup.landings,
                self._slots.rounding,
                gradients,
                layout,
                job,
            )
        return self._download

    def _report(
        self, job: StageJob, upload: WeightUpload, weights_ready: Mark, spans: Sequence[DeviceSpan]
    ) -> None:
        moved = (self._device.uploaded_bytes, self._device.downloaded_bytes)
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
        self._setup.board.post(STAGE_ENQUEUED(job.task.slot), report)

    # Weights in, gradients out.

    def _start_upload(self, job: StageJob) -> WeightUpload:
        layout, slot = self._slots.for_weights(job.task.stage)
        self._begin_step(job, Stream.WEIGHT_UPLOAD)
        return WeightUpload(
            self._device,
            self._store,
            self._setup.tasks,
            slot,
            layout,
            partial(job.pass_.version_read, task=job.task),
            job.uploads,
            self.reader,
        )

    def _advance_transfers(self, remaining: int) -> None:
        """Enqueue one transfer window: an equal chunk of the next stage's weights and of the last one's gradients.

        `remaining` counts the windows left in this stage, this one included.
        """
        self._begin_next_upload()
        # Each chunk queues behind the activations already on their way. A chunk has until the end of the
        # stage, but a computation waits for each activation. Chunks of one window's size keep an activation
        # from waiting for a whole stage's weights.
        if self._upload is not None:
            self._device.follow(Stream.WEIGHT_UPLOAD, Stream.ACTIVATION_UPLOAD, "activations before weights")
            self._upload.advance(-(-self._upload.remaining // remaining))
        if self._download is not None:
            self._device.follow(
                Stream.GRADIENT_DOWNLOAD, Stream.ACTIVATION_DOWNLOAD, "activations before gradients"
            )
            self._download.advance(-(-self._download.remaining // remaining))

    def _begin_next_upload(self) -> None:
        """Begin the upload for the next job, if that is a stage job that is handed out already."""
        # Looked for in every window, because it may be handed out while this job is under way.
        following = STAGE_JOB(self._next_slot + self._setup.num_devices)
        if self._upload is None and self._setup.board.ready(following):
            job = self._setup.board.wait(following)
            if isinstance(job, StageJob):
                self._upload = self._start_upload(job)

    def _clear_gradients(self, layout: StageLayout) -> DeviceSlot:
        slot = self._slots.for_gradients(layout)
        if slot.released is not None:
            self._device.wait(Stream.COMPUTE, slot.released, "a free slot for gradients")
        self._device.run(Stream.COMPUTE, slot.memory.zero_, writes=[slot.memory])
        return slot

    def _flush(self) -> None:
        """Send off the gradients that this thread still holds."""
        if self._download is not None:
            self._download.finish()
            self._download = None

    def _await(self, key: HandOverKey[T]) -> T:
        # Held gradients go first: what is awaited may depend on an update that needs
        # them, and then both would hang.
        if not self._setup.board.ready(key):
            self._flush()
        return self._setup.board.wait(key)

    def _layer_calls(self, indices: range, layers: list[nn.Module]) -> list[LayerCall]:
        compiler, board = self._setup.settings.compiler, self._setup.board
        calls: list[LayerCall] = list(layers)
        if compiler is not None:
            calls = [
                compiler.compiled(index, layer, board) for index, layer in zip(indices, layers, strict=True)
            ]
        return [with_own_seed(index, call) for index, call in zip(indices, calls, strict=True)]

    # What the watchdog and error messages ask for, from any thread.

    def state(self) -> WorkerState:
        """Return the stage job and micro-batch under way; `location` describes them."""
        return self._job, self._micro_batch

    def location(self, state: WorkerState) -> FaultLocation:
        """Describe a state that `state` returned."""
        job, position = state
        actor = f"device {self._device.name}"
        return FaultLocation(actor) if job is None else job.location(actor, self._setup.model.names, position)


def make_workers(devices: Sequence[Device], setup: WorkerSetup) -> list[DeviceWorker]:
    """Return a worker for each device, each with its own copy of the layers."""
    return [
        DeviceWorker(index, device, list(copy.deepcopy(nn.ModuleList(setup.model.layers))), setup)
        for index, device in enumerate(devices)
    ]
