"""The maker of passes: checks a batch, reserves what its pass needs and copies its tensors to the host pool."""

from collections.abc import Callable, Sequence

from torchround.engine.board import Board
from torchround.engine.buffer_reservation import BufferReservation
from torchround.engine.device import Event
from torchround.engine.errors import EngineUsageError
from torchround.engine.pass_data import check_micro_batches, host_micro_batches
from torchround.engine.passes import (
    FIRST_SIZES,
    Pass,
    PassShape,
    forward_inputs,
)
from torchround.engine.passes_under_way import PassesUnderWay
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.layer import Batch
from torchround.planning.host_buffers import kept_cuts
from torchround.planning.machine_shares import StepShare
from torchround.planning.partition import Partition, StageTask


class PassMaker:
    """The maker of an engine's passes, numbered in their order. `synchronize` waits for an event of a device.

    `is_compiled` says that the layers have to be compiled.
    """

    def __init__(
        self,
        store: HostStore,
        partition: Partition,
        board: Board,
        pool: HostPool,
        reservation: BufferReservation,
        synchronize: Callable[[Event], None],
        is_compiled: bool = False,
    ) -> None:
        self._store = store
        self._partition = partition
        self._board = board
        self._pool = pool
        self._reservation = reservation
        self._synchronize = synchronize
        self._is_compiled = is_compiled
        self._next_pass = 0

    def make(
        self,
        batches: Sequence[Batch],
        tasks: list[StageTask],
        step: int,
        under_way: PassesUnderWay,
        *,
        share: StepShare | None = None,
        num_labels: int | None = None,
        gives_outputs: bool = False,
        is_first_call: bool = True,
    ) -> Pass:
        """Return a pass over `batches` after `step` training steps. A training step has a `share`.

        From the first backward of a step on no layer is stale, so from its second call on.

        Raises `EngineUsageError`.
        """
        before = under_way.last_shape
        problem = check_micro_batches(batches, self._is_compiled) if tasks else None
        if problem is not None:
            raise EngineUsageError(problem)
        training, store = share is not None, self._store
        if num_labels is None:
            num_labels = 0 if gives_outputs else sum(batch.num_labels() for batch in batches)
        version = store.policy.version_read(step) if training else step
        oldest = store.oldest_version_read(step, training)
        stale_layers = store.stale_layers if is_first_call else 0
        shape = PassShape.of(tasks, batches, training, step, oldest, gives_outputs)
        if before is not None and not self._reservation.knows_all(before):
            # The previous pass measures them, so that none but a shape's first pass takes memory in its middle.
            under_way.wait()
        sizes = self._reservation.reserve_for(shape, before)
        loss_scale = store.loss_scaling.scale_of(step) if training else 1.0
        restarts = kept_cuts(self._partition.stages(), stale_layers) if training else frozenset()
        pass_ = Pass(
            index=self._next_pass,
            training=training,
            step=step,
            version=version,
            loss_factor=loss_scale / max(num_labels, 1),
            num_labels=num_labels,
            micro_batches=host_micro_batches(
                batches, tasks, self._pool, self._board.observer, self._synchronize
            ),
            forward_inputs=forward_inputs(shape.stages),
            backward_inputs=restarts,
            shape=shape,
            sizes=sizes,
            share=share,
            stale_layers=stale_layers,
            gives_outputs=gives_outputs,
        )
        if tasks and not self._board.ready(FIRST_SIZES(0)):
            self._board.post(FIRST_SIZES(0), (sizes,))
        self._next_pass += 1
        return pass_
