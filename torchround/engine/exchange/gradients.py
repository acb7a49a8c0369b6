"""Gradients between machines: each part goes to its bundle's owner, who adds all parts in the order of their numbers.

A part is what one round makes, in the dtype in which it was downloaded. Round `g` of all machines makes the parts that
round `g` of one machine with as many rounds would make, and the owner adds them in the same order in fp32. So the sum
has the same bits. It depends on neither the number of machines nor the order of arrival.

All machines send and add in one order: by round of each machine, then from the deepest bundle up, then by machine. The
earliest part that is not added yet therefore never waits for a later one, and bounded buffers cannot block a step.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torchround.engine.board import Board
from torchround.engine.errors import Stopped
from torchround.engine.exchange.landings import Landings
from torchround.engine.exchange.step_exchange import SHARE, Talks
from torchround.engine.landed_gradients import LandedGradients
from torchround.engine.ordering import Ordering
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer
from torchround.engine.store.host_store import HostStore
from torchround.machines.group import Machine, MachineGroup
from torchround.machines.links import Purpose, Receiver, Sender


class SharedGradients(LandedGradients):
    """The gradients of the bundles that this machine owns, with the parts that other machines send.

    `waited_s` is the time that the optimizer's thread waited for such parts.
    """

    def __init__(
        self,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        landings: Landings,
        group: MachineGroup,
        talks: Talks,
    ) -> None:
        super().__init__(store, ordering, landings, board.observer)
        self._group = group
        self._talks = talks
        self._receivers: dict[int, Receiver] = {
            machine.rank: group.links.receiver(machine.rank, Purpose.GRADIENTS)
            for machine in group.machines
            if machine.rank != group.rank
        }

    def landing_order(self, step: int) -> Iterator[tuple[Bundle, range]]:
        """Yield owned bundles with the parts that one round of one machine makes, in the order of adding."""
        owned, num_machines = self._store.owned, self._group.size
        if not owned:
            return
        rounds = self._ordering.num_parts(owned[0].index, step) // len(owned[0].layers)
        for first in range(0, rounds, num_machines):
            for bundle in reversed(owned):
                uses = len(bundle.layers)
                for round_index in range(first, min(first + num_machines, rounds)):
                    yield bundle, range(round_index * uses, (round_index + 1) * uses)

    def wait(self, bundle: Bundle, step: int, parts: range) -> list[HostBuffer | None]:
        """Wait until these parts have landed here. A part of another machine has no buffer; `add` waits for it."""
        if self._maker(bundle, parts) != self._group.rank:
            return [None] * len(parts)
        return super().wait(bundle, step, parts)

    def _add_up(self, bundle: Bundle, step: int, parts: range, landings: list[HostBuffer | None]) -> None:
        maker = self._maker(bundle, parts)
        if maker == self._group.rank:
            super()._add_up(bundle, step, parts, landings)
            return
        for part in parts:
            self._add_remote(bundle, step, part, maker)

    def _add_remote(self, bundle: Bundle, step: int, part: int, maker: int) -> None:
        """Add a part that another machine made, chunk by chunk as it arrives."""
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        what = _words(self._store, bundle, step, part)
        chunks = self._receivers[maker].chunks(bundle.numel, self._store.gradient_dtype, what)
        while True:
            begin_s = time.perf_counter()
            with self._talks.inside(f"{what} from {self._group.machines[maker]}"):
                chunk = next(chunks, None)
            self.waited_s += time.perf_counter() - begin_s
            if chunk is None:
                return
            start, values = chunk
            target = gradient[start : start + values.numel()]
            self._observer.touched(reads=(), writes=[target])
            if part == 0:
                target.copy_(values)  # what the buffer held before is the previous step's
            else:
                target.add_(values)

    def _maker(self, bundle: Bundle, parts: range) -> int:
        """Return the machine that makes these parts."""
        return parts.start // len(bundle.layers) % self._group.size


class GradientSender:
    """A thread that sends one peer the gradients of the bundles that the peer owns, as they land on this machine."""

    def __init__(
        self,
        peer: Machine,
        bundles: Sequence[Bundle],
        sender: Sender,
        store: HostStore,
        board: Board,
        ordering: Ordering,
        landings: Landings,
        talks: Talks,
        failed: Callable[[Exception], None],
    ) -> None:
        self._peer = peer
        self._bundles = bundles
        self._sender = sender
        self._store = store
        self._board = board
        self._ordering = ordering
        self._landings = landings
        self._talks = talks
        self._failed = failed
        self._first_step = store.step
        name = f"torchround gradients to machine {peer.rank}"
        self.thread = threading.Thread(target=self._main, name=name, daemon=True)

    def _main(self) -> None:
        try:
            for step in itertools.count(self._first_step):
                key = SHARE(step, self._peer.rank)
                rounds = self._board.wait(key).rounds
                self._board.forget(key)
                self._send_step(step, rounds)
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001  (any fault must reach the caller)
            self._failed(error)

    def _send_step(self, step: int, rounds: Sequence[int]) -> None:
        """Send the parts of this machine's rounds in the order in which they land."""
        for round_index in rounds:
            for bundle in reversed(self._bundles):
                uses = len(bundle.layers)
                for part in range(round_index * uses, (round_index + 1) * uses):
                    self._send_part(bundle, step, part)
                if round_index == rounds[-1]:
                    self._ordering.gradient_consumed(bundle.index, step)
        for bundle in self._bundles if not rounds else ():
            self._ordering.gradient_consumed(bundle.index, step)

    def _send_part(self, bundle: Bundle, step: int, part: int) -> None:
        buffer = self._ordering.before_gradient_read(bundle.index, step, part)
        assert buffer is not None, f"part {part} of bundle {bundle.index} landed in no buffer"
        what = _words(self._store, bundle, step, part)
        with self._talks.inside(f"{self._peer} to take {what}"):
            self._board.observer.touched(reads=[buffer.memory], writes=())
            self._sender.send(buffer.memory.view(self._store.gradient_dtype), what)
        # The buffer is back before the device that waits for it is woken, which may take this very one.
        self._landings.give(buffer, busy=[])
        self._ordering.part_consumed(bundle.index, step, part)


def _words(store: HostStore, bundle: Bundle, step: int, part: int) -> str:
    layers = ", ".join(store.layer_names[layer] for layer in bundle.layers)
    return f"part {part} of step {step}'s gradient of {layers}"
