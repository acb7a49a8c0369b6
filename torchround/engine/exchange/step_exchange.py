"""The points of a step at which machines meet, as an engine that is alone passes them: it sends and awaits nothing.

`group_exchange.py` has the same points for several machines. The program's tasks call them alike.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchround.engine.board import Board, HandOver
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.exchange.landings import Landings
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Buffer, Task, Worker
from torchround.planning.machine_shares import StepShare, step_share

if TYPE_CHECKING:
    from torchround.engine.update import Decision


LOSSES = HandOver[Sequence[float]]("the losses of pass {0} of all machines")


class StepExchange:
    """The exchange of an engine that is alone. `landings` are the buffers of its gradients.

    `waited_s` is the time that the optimizer's thread has waited for other machines. With other machines, `gradients_to`,
    `weights_to` and `weights_from` are the workers that talk to each.
    """

    peers: Sequence[int] = ()
    waited_s = 0.0

    def __init__(self, store: HostStore, board: Board, pool: HostPool) -> None:
        self.landings = Landings(store, pool)
        self.gradients_to: dict[int, Worker] = {}
        self.weights_to: dict[int, Worker] = {}
        self.weights_from: dict[int, Worker] = {}
        self._store = store
        self._board = board

    @property
    def workers(self) -> list[Worker]:
        """The workers that talk to other machines."""
        return [*self.gradients_to.values(), *self.weights_to.values(), *self.weights_from.values()]

    def share(self, given: StepShare | None, num_micro_batches: int, rounds: int) -> StepShare:
        """Return this machine's share of a step that is about to be dispatched.

        `given` is what the caller says of it, with `num_micro_batches` of its own. Raises `EngineUsageError`.
        """
        # An empty batch has a share too, so that the engine can refuse it by its own message.
        return given or step_share(max(num_micro_batches, 1), rounds, 0, 1)

    def add(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
        """Add parts of a gradient to their sum in fp32, in the order of their numbers, and give their buffers back.

        The source of a part is the memory in which it landed, or the machine that made and sends it.
        """
        assert bundle.gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        for part, source in zip(parts, sources, strict=True):
            assert isinstance(source, Buffer), f"part {part} of bundle {bundle.index} landed in no buffer"
            buffer: HostBuffer = source.content
            landed = buffer.memory.view(self._store.gradient_dtype)
            self._board.observer.touched(reads=[buffer.memory], writes=[bundle.gradient])
            if part == 0:
                bundle.gradient.copy_(landed)  # what the buffer held before is the previous step's
            else:
                bundle.gradient.add_(landed)
            self.landings.give(buffer, busy=[])

    def all_losses(self, pass_: Pass, own: Sequence[float]) -> Sequence[float]:
        """Return the loss sums of all machines' micro-batches, in the order of the batch, from this machine's own."""
        return own

    def all_squares(self, step: int, own: dict[int, float]) -> dict[int, float]:
        """Return the squared norms of all machines' gradients, by bundle, from this machine's own.

        That of a bundle's parameters which are not clipped is apart, under `update.unclipped`.
        """
        return own

    def send_gradient(
        self, bundle: Bundle, step: int, parts: Sequence[int], sources: Sequence[Buffer], task: Task
    ) -> None:
        """Send parts of a gradient to the bundle's owner, and give their buffers back."""

    def send_weights(
        self, peer: int, bundle: Bundle, version: int, decision: "Decision | None", task: Task
    ) -> None:
        """Send a version of a bundle's device weights, if the update that makes it applies."""

    def receive_weights(
        self,
        bundle: Bundle,
        version: int,
        decision: "Decision | None",
        copy_version: Callable[[Bundle, int], None],
        task: Task,
    ) -> None:
        """Receive a version of a bundle's device weights, or copy the version before if the update does not apply."""

    def take_bytes(self) -> int:
        """Return the bytes that this machine has sent to others since the last call."""
        return 0

    def fail(self, failure: PipelineError) -> None:
        """Tell the other machines of a fault of this one."""

    def located(self, error: BaseException) -> PipelineError | None:
        """Return the fault of another machine as the engine's, None for any other error."""
        return None

    def stop(self, failure: PipelineError | None) -> None:
        """Wake the threads that wait for other machines. The engine's board has stopped, because of `failure` if any."""


class Talks:
    """The waits for other machines that are under way on this engine's threads."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._lock = threading.Lock()
        self._under_way = 0

    @contextmanager
    def inside(self, what: str) -> Iterator[None]:
        """Wait for another machine within the block; `what` names the wait. Raises `Stopped` if the engine stopped."""
        with self._lock:
            self._under_way += 1
        try:
            # Counts first and looks second: either this sees the stop, or the stop sees this talk.
            self._board.raise_if_stopped()
            with self._board.waits(f"waits for {what}"):
                yield
        finally:
            with self._lock:
                self._under_way -= 1
            self._board.note_progress()

    @property
    def are_under_way(self) -> bool:
        """Whether a thread waits for another machine. After a stop of the board none begins to."""
        with self._lock:
            return self._under_way > 0


def check_share(
    given: StepShare | None, num_micro_batches: int, machine: int, num_machines: int
) -> StepShare:
    """Return the share that the caller gave. Raises `EngineUsageError` if it is missing or another machine's."""
    if given is None:
        raise EngineUsageError("an engine on several machines needs the share of each step (`step_share`)")
    if (given.machine, given.num_machines) != (machine, num_machines):
        raise EngineUsageError(
            f"the share is of machine {given.machine} of {given.num_machines}, this is machine {machine} of {num_machines}"
        )
    if len(given.micro_batches) != num_micro_batches:
        raise EngineUsageError(
            f"the share has {len(given.micro_batches)} micro-batches, but {num_micro_batches} were given"
        )
    return given
