"""The exchange of a machine among several: its threads, the sums that all agree on, and one end for all."""

import time
from collections.abc import Callable

from torchround.engine.board import Board, WaitForHandOver
from torchround.engine.errors import EngineUsageError, FaultLocation, PipelineError
from torchround.engine.exchange.gradients import GradientSender, SharedGradients
from torchround.engine.exchange.landings import RingLandings
from torchround.engine.exchange.step_exchange import (
    SHARE,
    SUMS,
    StepExchange,
    StepSums,
    Talks,
    check_share,
)
from torchround.engine.exchange.weights import WeightExchange
from torchround.engine.ordering import GRADIENT_CONSUMED, SENT, WEIGHTS, Ordering
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import BOUNDED, Bundle
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.machines.errors import MachineError
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose
from torchround.planning.machine_shares import StepShare


class GroupExchange(StepExchange):
    """The exchange of one machine of a `MachineGroup`."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        pool: HostPool,
        group: MachineGroup,
        on_failure: Callable[[PipelineError], None],
    ) -> None:
        super().__init__(store, board, ordering, pool)
        self._group = group
        self._on_failure = on_failure
        self._channel = group.channel("steps")
        self._talks = Talks(board)
        self.landings = RingLandings(store, pool, ordering)
        self.landed = SharedGradients(store, board, ordering, self.landings, group, self._talks)
        self.peers = [machine.rank for machine in group.machines if machine.rank != group.rank]
        of_peer = {peer: [b for b in store.trained if b.owner == peer] for peer in self.peers}
        # A peer that owns nothing gets no thread: it would only count steps.
        self._owners = [peer for peer in self.peers if of_peer[peer]]
        self._senders = [
            GradientSender(
                group.machines[peer],
                of_peer[peer],
                group.links.sender(peer, Purpose.GRADIENTS),
                *(store, board, ordering, self.landings, self._talks, self.failed),
            )
            for peer in self._owners
        ]
        self._weights = WeightExchange(store, board, ordering, group, self._talks, self.failed)
        self.threads = [*(sender.thread for sender in self._senders), *self._weights.threads]
        self._links = [
            group.links.sender(peer, purpose)
            for peer in self.peers
            for purpose in (Purpose.GRADIENTS, Purpose.WEIGHTS)
        ]
        self._counted_bytes = sum(sender.bytes_sent for sender in self._links)
        self._last_step: int | None = None
        self._last_applies = True
        group.on_fault(self.failed)

    def share(self, given: StepShare | None, num_micro_batches: int, rounds: int) -> StepShare:
        return check_share(given, num_micro_batches, self._group.rank, self._group.size)

    def begin(self, step: int, share: StepShare) -> None:
        self._last_step = step
        for peer in self._owners:
            self._board.post(SHARE(step, peer), share)

    def agree(self, pass_: Pass, own: StepSums) -> StepSums:
        """Gather the losses and squared norms of all machines, as exact doubles."""
        step, share = pass_.step, pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        losses = list(zip(share.micro_batches, own.losses, strict=True))
        what = f"the losses and norms of step {step}"
        begin_s = time.perf_counter()
        with self._talks.inside(f"{what} from all machines"):
            gathered = self._channel.gather([losses, sorted(own.squares.items())], what)
        self.landed.waited_s += time.perf_counter() - begin_s
        by_micro_batch = dict(pair for of_one, _ in gathered for pair in of_one)
        sums = StepSums(
            [by_micro_batch[index] for index in range(share.total_micro_batches)],
            {index: value for _, of_one in gathered for index, value in of_one},
        )
        self._board.post(SUMS(step), sums)
        return sums

    def decided(self, step: int, applies: bool) -> None:
        self._last_applies = applies
        self._weights.decided(step, applies)

    def updated(self, bundle: Bundle, step: int) -> None:
        # First: the peers' senders may be done before this thread comes to its next line.
        self._ordering.expect_sending(bundle.index, step + 1, self.peers)
        super().updated(bundle, step)

    def drain(self, step: int, wait: WaitForHandOver) -> None:
        for bundle in self._store.trained:
            wait(WEIGHTS(step, bundle.index))
            wait(GRADIENT_CONSUMED(step - 1, bundle.index))
        for key in self._ordering.sendings():
            wait(key)

    def collected(self, pass_: Pass, wait: WaitForHandOver) -> None:
        # A receiver may be late by as many versions as are kept, or by many where no device waits for weights. Until it
        # has the newest version that this pass left room for, it asks for the last uploads of the version before those.
        newest = pass_.version + self._store.policy.versions - 1
        for bundle in self._store.trained if pass_.training else ():
            wait(WEIGHTS(newest, bundle.index))

    def share_rewritten(self, version: int, wait: WaitForHandOver) -> None:
        self._weights.share_rewritten(version, wait)

    def take_bytes(self) -> int:
        total = sum(sender.bytes_sent for sender in self._links)
        sent, self._counted_bytes = total - self._counted_bytes, total
        return sent

    def failed(self, error: BaseException) -> None:
        """End the engine because of an error on one of the exchange's threads, or of another machine."""
        failure = self.located(error)
        if failure is None:
            failure = PipelineError(FaultLocation("exchange"), f"{type(error).__name__}: {error}")
            failure.__cause__ = error
        self._on_failure(failure)

    def located(self, error: BaseException) -> PipelineError | None:
        if not isinstance(error, MachineError):
            return None
        machine = "several machines" if error.machine is None else str(self._group.machines[error.machine])
        failure = PipelineError(FaultLocation(machine), str(error).removeprefix(f"{machine} "))
        failure.__cause__ = error
        return failure

    def fail(self, failure: PipelineError) -> None:
        # Every machine learns of another one's fault by itself. What each thread waits for stays here.
        if not isinstance(failure.__cause__, MachineError):
            self._group.fail(str(failure).splitlines()[0])

    def stop(self, failure: PipelineError | None) -> None:
        # Only an abort wakes a thread inside gloo. Between steps there is none, and the group lives on. In the middle of
        # a step the others wait for this machine, even if none of its own threads is inside gloo.
        if not self._talks.are_under_way and not self._is_in_a_step():
            return
        if failure is None:
            self._group.fail("it stopped in the middle of a step")
        self._group.abort()

    def _is_in_a_step(self) -> bool:
        """Whether this machine has weights of the last step to receive or to send."""
        if self._last_step is None:
            return False
        version = self._last_step + 1
        if not all(self._board.ready(WEIGHTS(version, bundle.index)) for bundle in self._store.trained):
            return True
        sendings = (SENT(version, b.index, peer) for b in self._store.owned for peer in self.peers)
        return self._last_applies and not all(map(self._board.ready, sendings))


def make_exchange(
    store: HostStore,
    board: Board,
    ordering: Ordering,
    pool: HostPool,
    on_failure: Callable[[PipelineError], None],
    group: MachineGroup | None,
) -> StepExchange:
    """Return the exchange of a machine among others, or of one that is alone."""
    ownership = store.ownership
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    if (ownership.machine, ownership.num_machines) != (rank, size):
        raise EngineUsageError(
            f"the host store is of machine {ownership.machine} of {ownership.num_machines}, "
            f"this is machine {rank} of {size}"
        )
    if group is None:
        return StepExchange(store, board, ordering, pool)
    if store.policy is BOUNDED:
        raise EngineUsageError(
            'bounded updates run on one machine: use "sync" or "async" on several, with clip = "layer" if you like'
        )
    return GroupExchange(store, board, ordering, pool, group, on_failure)
