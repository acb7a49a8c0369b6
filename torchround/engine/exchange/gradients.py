"""Gradients between machines: each part goes to its bundle's owner, who adds all parts in the order of their numbers.

A part is what one round makes, in the dtype in which it was downloaded. Round `g` of all machines makes the parts that
round `g` of one machine with as many rounds would make, and the owner adds them in the same order in fp32. So the sum
has the same bits. It depends on neither the number of machines nor the order of arrival.

All machines send and add in one order: by round of each machine, then from the deepest bundle up. An owner adds a
round's parts of all machines together. The earliest parts that are not added yet therefore never wait for later ones,
and bounded buffers cannot block a step.
"""

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

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
from torchround.machines.links import Purpose, Receiver, Sender, chunk_numel
from torchround.planning.machine_shares import StepShare


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

    def landing_order(self, share: StepShare) -> Iterator[tuple[Bundle, range]]:
        """Yield owned bundles with the parts that one round of each machine makes, in the order of adding."""
        num_machines = self._group.size
        for first in range(0, share.total_rounds, num_machines):
            last = min(first + num_machines, share.total_rounds)
            for bundle in reversed(self._store.owned):
                uses = len(bundle.layers)
                yield bundle, range(first * uses, last * uses)

    def wait(self, bundle: Bundle, step: int, parts: range) -> list[HostBuffer | None]:
        """Wait until this machine's own parts have landed. Those of others have no buffer; `add` waits for them."""
        return [
            self._ordering.before_gradient_read(bundle.index, step, part)
            if self._maker(bundle, part) == self._group.rank
            else None
            for part in parts
        ]

    def _add_up(self, bundle: Bundle, step: int, parts: range, landings: list[HostBuffer | None]) -> None:
        # Parts of one machine come one after the other over one link, so only one of each can be under way.
        together = len(parts) if len(bundle.layers) == 1 else 1
        for first in range(0, len(parts), together):
            few = slice(first, first + together)
            self._add_together(bundle, step, parts[few], landings[few])

    def _add_together(
        self, bundle: Bundle, step: int, parts: range, landings: Sequence[HostBuffer | None]
    ) -> None:
        """Add parts of different machines chunk by chunk, each chunk in the order of parts.

        All machines send at once. If one whole part after the other was added, all owners would wait for the same
        machine while the network of the others is idle. The order of additions to one element is the same.
        """
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        sources = [
            self._landed_chunks(buffer) if buffer is not None else self._arriving_chunks(bundle, step, part)
            for part, buffer in zip(parts, landings, strict=True)
        ]
        for chunks in zip(*sources, strict=True):
            # Every next chunk is on its way while this one is added.
            for part, (start, values) in zip(parts, chunks, strict=True):
                target = gradient[start : start + values.numel()]
                self._observer.touched(reads=[values], writes=[target])
                if part == 0:
                    target.copy_(values)  # what the buffer held before is the previous step's
                else:
                    target.add_(values)
        for part, buffer in zip(parts, landings, strict=True):
            if buffer is not None:
                # The buffer is back before the device that waits for it is woken, which may take this very one.
                self._landings.give(buffer, busy=[])
                self._ordering.part_consumed(bundle.index, step, part)

    def _landed_chunks(self, buffer: HostBuffer) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that landed here in the chunks in which others arrive."""
        landed = buffer.memory.view(self._store.gradient_dtype)
        length = chunk_numel(landed.dtype)
        return ((start, landed[start : start + length]) for start in range(0, landed.numel(), length))

    def _arriving_chunks(self, bundle: Bundle, step: int, part: int) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that another machine made, chunk by chunk as it arrives."""
        maker = self._maker(bundle, part)
        what = _words(self._store, bundle, step, part)
        chunks = self._receivers[maker].chunks(bundle.numel, self._store.gradient_dtype, what)
        while True:
            begin_s = time.perf_counter()
            with self._talks.inside(f"{what} from {self._group.machines[maker]}"):
                chunk = next(chunks, None)
            self.waited_s += time.perf_counter() - begin_s
            if chunk is None:
                return
            yield chunk

    def _maker(self, bundle: Bundle, part: int) -> int:
        """Return the machine that makes this part."""
        return part // len(bundle.layers) % self._group.size


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
