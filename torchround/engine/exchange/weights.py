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
from torchround.machines.links import Purpose


@dataclass(frozen=True)
class WeightJob:
    """Device weights of one version, which every owner sends to all.

    They are of an update under way, bundle by bundle as they are complete. If they were `rewritten`, the controller has
    written that version anew between steps, and all of it is complete.
    """

    version: int
    rewritten: bool = False


# The second number is that of the thread.
WEIGHT_JOB = HandOver[WeightJob]("exchange {0} of weights to be due")
REWRITTEN = HandOver[None]("the end of exchange {0}, of rewritten weights")


class WeightExchange:
    """The threads that send this machine's new weights to each peer, and receive those that each peer owns."""

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        group: MachineGroup,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        self._store = store
        self._board = board
        self._ordering = ordering
        self._group = group
        self._talks = talks
        self._failed = failed
        self._next_job = 0
        self.threads: list[threading.Thread] = []
        for machine in group.machines:
            theirs = [bundle for bundle in store.trained if bundle.owner == machine.rank]
            if machine.rank == group.rank:
                continue
            if store.owned:
                self._add("to", machine, self._send, store.owned)
            if theirs:
                self._add("from", machine, self._receive, theirs)

    def decided(self, step: int, applies: bool) -> None:
        """Let a step's new weights be sent and received, if its update applies. Only the optimizer's thread calls this."""
        if applies:
            self._begin(WeightJob(step + 1))

    def share_rewritten(self, version: int, wait: WaitForHandOver) -> None:
        """Bring what each owner has written anew of a version to all. The controller calls this, on all machines alike.

        No step is under way, and no device reads that version.
        """
        number = self._begin(WeightJob(version, rewritten=True))
        for thread in range(len(self.threads)):
            key = REWRITTEN(number, thread)
            wait(key)
            self._board.forget(key)

    def _begin(self, job: WeightJob) -> int:
        number, self._next_job = self._next_job, self._next_job + 1
        for thread in range(len(self.threads)):
            self._board.post(WEIGHT_JOB(number, thread), job)
        return number

    def _add(
        self,
        direction: str,
        peer: Machine,
        work: Callable[[Machine, Bundle, WeightJob], None],
        bundles: Sequence[Bundle],
    ) -> None:
        thread = len(self.threads)

        def main() -> None:
            try:
                for number in itertools.count():
                    key = WEIGHT_JOB(number, thread)
                    job = self._board.wait(key)
                    self._board.forget(key)
                    for bundle in bundles:
                        work(peer, bundle, job)
                    if job.rewritten:
                        self._board.signal(REWRITTEN(number, thread))
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001  (any fault must reach the caller)
                self._failed(error)

        name = f"torchround weights {direction} machine {peer.rank}"
        self.threads.append(threading.Thread(target=main, name=name, daemon=True))

    def _send(self, peer: Machine, bundle: Bundle, job: WeightJob) -> None:
        if not job.rewritten:
            self._ordering.before_upload(bundle.index, job.version)
        weights, what = bundle.version(job.version), self._words(bundle, job)
        link = self._group.links.sender(peer.rank, Purpose.WEIGHTS)
        with self._talks.inside(f"{peer} to take {what}"):
            self._board.observer.touched(reads=[weights], writes=())
            link.send(weights, what)
        if not job.rewritten:
            self._ordering.sent(bundle.index, job.version, peer.rank)

    def _receive(self, peer: Machine, bundle: Bundle, job: WeightJob) -> None:
        if not job.rewritten:
            # Rule 5 needs no wait: the version before came on this thread, or is a copy that the optimizer's thread made
            # of a skipped step, before it let this exchange begin.
            self._ordering.before_device_weight_write(bundle.index, job.version)
        weights, what = bundle.version(job.version), self._words(bundle, job)
        link = self._group.links.receiver(peer.rank, Purpose.WEIGHTS)
        with self._talks.inside(f"{what} from {peer}"):
            self._board.observer.touched(reads=(), writes=[weights])
            link.receive(weights, what)
        if not job.rewritten:
            self._ordering.updated(bundle.index, job.version - 1)

    def _words(self, bundle: Bundle, job: WeightJob) -> str:
        layers = ", ".join(self._store.layer_names[layer] for layer in bundle.layers)
        return f"version {job.version} of the weights of {layers}"
