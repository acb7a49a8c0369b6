"""Weights between machines: each owner sends the weights that its update made, in the order of the next forward."""

import itertools
import threading
from collections.abc import Callable, Sequence

from torchround.engine.board import Board
from torchround.engine.errors import Stopped
from torchround.engine.exchange.step_exchange import APPLIES, Talks
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose


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
        self._first_step = store.step
        self.threads: list[threading.Thread] = []
        for machine in group.machines:
            theirs = [bundle for bundle in store.trained if bundle.owner == machine.rank]
            if machine.rank == group.rank:
                continue
            if store.owned:
                self._add(
                    f"torchround weights to machine {machine.rank}", self._send, machine.rank, store.owned
                )
            if theirs:
                self._add(
                    f"torchround weights from machine {machine.rank}", self._receive, machine.rank, theirs
                )

    def _add(
        self,
        name: str,
        work: Callable[[int, Bundle, int], None],
        peer: int,
        bundles: Sequence[Bundle],
    ) -> None:
        def main() -> None:
            try:
                for step in itertools.count(self._first_step):
                    for bundle in bundles if self._board.wait(APPLIES(step)) else ():
                        work(peer, bundle, step)
            except Stopped:
                pass
            except Exception as error:  # noqa: BLE001  (any fault must reach the caller)
                self._failed(error)

        self.threads.append(threading.Thread(target=main, name=name, daemon=True))

    def _send(self, peer: int, bundle: Bundle, step: int) -> None:
        self._ordering.before_upload(bundle.index, step + 1)
        weights = bundle.version(step + 1)
        with self._talks.inside(f"{self._group.machines[peer]} to take {self._words(bundle, step)}"):
            self._board.observer.touched(reads=[weights], writes=())
            self._group.links.sender(peer, Purpose.WEIGHTS).send(weights, self._words(bundle, step))
        self._ordering.sent(bundle.index, step + 1, peer)

    def _receive(self, peer: int, bundle: Bundle, step: int) -> None:
        self._ordering.before_device_weight_write(bundle.index, step + 1)
        weights = bundle.version(step + 1)
        with self._talks.inside(f"{self._words(bundle, step)} from {self._group.machines[peer]}"):
            self._board.observer.touched(reads=(), writes=[weights])
            self._group.links.receiver(peer, Purpose.WEIGHTS).receive(weights, self._words(bundle, step))
        self._ordering.updated(bundle.index, step)

    def _words(self, bundle: Bundle, step: int) -> str:
        layers = ", ".join(self._store.layer_names[layer] for layer in bundle.layers)
        return f"version {step + 1} of the weights of {layers}"
