"""Weights between machines: each owner sends the device weights that its update made, in the order of the next forward.

Every machine has a sender and a receiver for each peer, threads of their own, because both spend their time waiting for
the network. A sender follows the optimizer's thread from bundle to bundle. A receiver writes straight into the buffer of
the new version and declares it complete, so devices wait for a bundle alike whether it was updated here or elsewhere.

A step whose update does not apply sends nothing: each machine copies the versions by itself.
"""

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchround.engine.board import Board, HandOver, WaitForHandOver
from torchround.engine.errors import Stopped
from torchround.engine.exchange.step_exchange import Talks
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import Machine, MachineGroup
from torchround.machines.links import Purpose, Receiver, Sender


@dataclass(frozen=True)
class WeightJob:
    """Device weights of one version, which every owner sends to all.

    They are of an update under way, bundle by bundle as they are complete. Otherwise (`is_rewrite`) the controller has
    written that version anew between steps, and it is complete.
    """

    version: int
    is_rewrite: bool


# The second number is a peer's rank, or beyond all ranks for the receiver from that peer.
WEIGHT_JOB = HandOver[WeightJob]("exchange {0} of weights to be due")
REWRITTEN = HandOver[None]("the end of exchange {0} of rewritten weights")


class WeightExchange:
    """The threads that send and receive the weights of a machine among several."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        group: MachineGroup,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        self._board = board
        self._next_job = 0
        parts = (store, board, ordering, talks, failed)
        peers = [machine for machine in group.machines if machine.rank != group.rank]
        self._ends: list[WeightSender | WeightReceiver] = []
        for peer in peers:
            owned_there = [bundle for bundle in store.trained if bundle.owner == peer.rank]
            # A machine that owns nothing has nothing to send.
            if store.owned:
                link = group.links.sender(peer.rank, Purpose.WEIGHTS)
                self._ends.append(WeightSender(peer, peer.rank, store.owned, link, *parts))
            if owned_there:
                source = group.links.receiver(peer.rank, Purpose.WEIGHTS)
                self._ends.append(WeightReceiver(peer, peer.rank + group.size, owned_there, source, *parts))
        self.threads = [end.thread for end in self._ends]

    def decided(self, step: int, applies: bool) -> None:
        """Begin the exchange of a step's new weights if its update applies. The optimizer's thread calls this."""
        if applies:
            self._begin(WeightJob(step + 1, is_rewrite=False))

    def share_rewritten(self, version: int, wait: WaitForHandOver) -> None:
        """Bring what every machine has written anew of a version to all. The controller calls this, on all machines alike.

        No step is under way, and no device reads that version.
        """
        number = self._begin(WeightJob(version, is_rewrite=True))
        for end in self._ends:
            key = REWRITTEN(number, end.number)
            wait(key)
            self._board.forget(key)

    def _begin(self, job: WeightJob) -> int:
        number, self._next_job = self._next_job, self._next_job + 1
        for end in self._ends:
            self._board.post(WEIGHT_JOB(number, end.number), job)
        return number


class _WeightEnd:
    """One end of an exchange of weights with a peer: a thread that takes one job after the other."""

    direction = ""

    def __init__(
        self,
        peer: Machine,
        number: int,
        bundles: Sequence[Bundle],
        store: HostStore,
        board: Board,
        ordering: Ordering,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        self.number = number
        self._peer = peer
        self._bundles = bundles
        self._store = store
        self._board = board
        self._ordering = ordering
        self._talks = talks
        self._failed = failed
        name = f"torchround weights {self.direction} machine {peer.rank}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        try:
            for number in itertools.count():
                key = WEIGHT_JOB(number, self.number)
                job = self._board.wait(key)
                self._board.forget(key)
                for bundle in self._bundles:
                    self._exchange(bundle, job)
                if job.is_rewrite:
                    self._board.signal(REWRITTEN(number, self.number))
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  (any fault must reach the caller)
            self._failed(error)

    def _exchange(self, bundle: Bundle, job: WeightJob) -> None:
        raise NotImplementedError

    def _words(self, bundle: Bundle, version: int) -> str:
        layers = ", ".join(self._store.layer_names[layer] for layer in bundle.layers)
        return f"version {version} of {layers}"


class WeightSender(_WeightEnd):
    """A thread that sends one peer the weights that this machine owns."""

    direction = "to"

    def __init__(
        self,
        peer: Machine,
        number: int,
        bundles: Sequence[Bundle],
        sender: Sender,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(peer, number, bundles, store, board, ordering, talks, failed)
        self._sender = sender

    def _exchange(self, bundle: Bundle, job: WeightJob) -> None:
        if not job.is_rewrite:
            self._ordering.before_upload(bundle.index, job.version)
        weights, what = bundle.version(job.version), self._words(bundle, job.version)
        with self._talks.inside(f"{self._peer} to take {what}"):
            self._board.observer.touched(reads=[weights], writes=())
            self._sender.send(weights, what)
        if not job.is_rewrite:
            self._ordering.sent(bundle.index, job.version, self._peer.rank)


class WeightReceiver(_WeightEnd):
    """A thread that receives the weights that one peer owns."""

    direction = "from"

    def __init__(
        self,
        peer: Machine,
        number: int,
        bundles: Sequence[Bundle],
        receiver: Receiver,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        super().__init__(peer, number, bundles, store, board, ordering, talks, failed)
        self._receiver = receiver

    def _exchange(self, bundle: Bundle, job: WeightJob) -> None:
        if not job.is_rewrite:
            # The version before may be a copy that the optimizer's thread makes of a skipped step.
            self._ordering.before_update(bundle.index, job.version - 1)
            self._ordering.before_device_weight_write(bundle.index, job.version)
        weights, what = bundle.version(job.version), self._words(bundle, job.version)
        with self._talks.inside(f"{what} from {self._peer}"):
            self._board.observer.touched(reads=(), writes=[weights])
            self._receiver.receive(weights, what)
        if not job.is_rewrite:
            self._ordering.updated(bundle.index, job.version - 1)
