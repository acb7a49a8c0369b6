"""The points of a step at which machines meet, as an engine that is alone passes them: it sends and awaits nothing.

`group_exchange.py` has the same points for several machines. The engine and the optimizer's thread call them alike.
"""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torchround.engine.board import Board, HandOver, WaitForHandOver
from torchround.engine.errors import EngineUsageError, PipelineError
from torchround.engine.exchange.landings import Landings
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.ordering import Ordering
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.planning.machine_shares import StepShare, step_share


@dataclass(frozen=True)
class StepSums:
    """The figures of a step that decide about its update, over all machines.

    `losses` are the loss sums of all micro-batches, in the order of the batch; `squares` the squared norm of each
    bundle's gradient, by the bundle's index. That of its parameters which are not clipped is apart, under
    `landed_gradients.unclipped`.
    """

    losses: Sequence[float]
    squares: Mapping[int, float]


SUMS = HandOver[StepSums]("the losses and norms of step {0} of all machines")
SHARE = HandOver[StepShare]("step {0} to be dispatched, for machine {1}'s gradients")


class StepExchange:
    """The exchange of an engine that is alone. `landings` are the buffers of its gradients."""

    peers: Sequence[int] = ()
    threads: Sequence[threading.Thread] = ()

    def __init__(self, store: HostStore, board: Board, ordering: Ordering, pool: HostPool) -> None:
        self.landings = Landings(store, pool)
        self.landed = LandedGradients(store, ordering, self.landings, board.observer)
        self._store = store
        self._board = board
        self._ordering = ordering

    def share(self, given: StepShare | None, num_micro_batches: int, rounds: int) -> StepShare:
        """Return this machine's share of a step that is about to be dispatched.

        `given` is what the caller says of it, with `num_micro_batches` of its own. Raises `EngineUsageError`.
        """
        # An empty batch has a share too, so that the engine can refuse it by its own message.
        return given or step_share(max(num_micro_batches, 1), rounds, 0, 1)

    def begin(self, step: int, share: StepShare) -> None:
        """Let a dispatched step's gradients go out as they land."""

    def agree(self, pass_: Pass, own: StepSums) -> StepSums:
        """Return the sums of a step over all machines, from this machine's own."""
        return own

    def decided(self, step: int, applies: bool) -> None:
        """Let all threads know whether a step's update applies, before any weights are written."""

    def updated(self, bundle: Bundle, step: int) -> None:
        """Declare version `step + 1` of a bundle's device weights complete."""
        self._ordering.updated(bundle.index, step)

    def drain(self, step: int, wait: WaitForHandOver) -> None:
        """Wait until this machine has all weights after `step` steps, and has sent its own."""

    def collected(self, pass_: Pass, wait: WaitForHandOver) -> None:
        """Wait until no thread of the exchange asks for what is older than a pass that has ended."""

    def share_rewritten(self, version: int, wait: WaitForHandOver) -> None:
        """Bring the device weights of a version that each owner has written anew to all, between steps."""

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
