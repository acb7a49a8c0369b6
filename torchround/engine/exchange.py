"""What the machines of a run exchange: gradients to their owners, sums that all agree on, and weights back.

Each part of a gradient goes to its bundle's owner in the dtype in which it was downloaded. The owner adds all parts in the
order of their numbers, in fp32, so the sum has the same bits, whatever the number of machines and the order of arrival.
Then it sends the device weights that its update made to all, into the buffer of the new version itself. Workers of their own
send to each peer and receive weights from it, because they spend their time waiting for the network.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, cycle

import torch
import xxhash
from torch import Tensor

from torchround.engine.board import Board
from torchround.engine.errors import EngineUsageError, FaultLocation, PipelineError
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import Bundle, Ownership
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import PART, Buffer, Worker
from torchround.machines import links
from torchround.machines.group import MachineError, MachineGroup
from torchround.machines.links import Purpose
from torchround.planning.host_buffers import whole_pages
from torchround.planning.machine_shares import ring_places


@dataclass(eq=False, repr=False)
class StepExchange:
    """The exchange of one machine, which is alone if it has no `group`.

    `landings` are the memory in which parts of gradients land, by bundle and use of it. `gradients_to`, `weights_to` and
    `weights_from` are the workers for each peer.
    """

    store: HostStore
    board: Board
    pool: HostPool
    group: MachineGroup | None

    def __post_init__(self) -> None:
        store, group = self.store, self.group
        this = Ownership(0, 1) if group is None else Ownership(group.rank, group.size)
        if store.ownership != this:
            raise EngineUsageError(f"the host store is of {store.ownership}, this is {this}")
        self.landings = _make_landings(store, self.pool)
        self.waited_s = 0.0  # by the optimizer's thread

        def worker(name: str) -> Worker:
            return Worker(f"torchround {name}", name, self.board, self.failed)

        self.peers: Sequence[int] = () if group is None else group.peers
        # A peer that owns nothing gets no gradients and sends no weights.
        owners = [peer for peer in self.peers if any(bundle.owner == peer for bundle in store.trained)]
        self.gradients_to = {peer: worker(f"gradients to machine {peer}") for peer in owners}
        self.weights_to = {peer: worker(f"weights to machine {peer}") for peer in self.peers if store.owned}
        self.weights_from = {peer: worker(f"weights from machine {peer}") for peer in owners}
        each = self.gradients_to, self.weights_to, self.weights_from
        self.workers = [worker for by_peer in each for worker in by_peer.values()]

    # Gradients.

    def add(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
        """Add parts of a gradient to their sum in fp32, in the order of their numbers.

        The source of a part is the memory in which it landed, or the machine that made and sends it. Parts of different
        machines are added chunk by chunk: otherwise all owners would wait for the same machine while the others idle.
        """
        if len(bundle.layers) > 1 < len(parts):
            # Parts of one machine come one after the other over one link, so only one of each can be under way.
            for index, source in enumerate(sources):
                self.add(bundle, step, parts[index : index + 1], [source])
            return
        length = links.CHUNK_BYTES // self.store.dtype.itemsize
        streams = [
            self._landed(bundle, source).split(length)
            if isinstance(source, Buffer)
            else self._arriving_chunks(bundle, step, part, source)
            for part, source in zip(parts, sources, strict=True)
        ]
        for target, chunks in zip(
            bundle.whole_gradient.split(length), zip(*streams, strict=True), strict=True
        ):
            # Every next chunk is on its way while this one is added.
            for part, values in zip(parts, chunks, strict=True):
                self.board.observer.touched(reads=[values], writes=[target])
                if part == 0:
                    target.copy_(values)  # what the buffer held before is the previous step's
                else:
                    target.add_(values)

    def _landed(self, bundle: Bundle, place: Buffer) -> Tensor:
        values: Tensor = place.content.memory.view(self.store.dtype)
        return values[: bundle.numel]

    def _arriving_chunks(self, bundle: Bundle, step: int, part: int, maker: int) -> Iterator[Tensor]:
        what = self._part(bundle, step, part)
        chunks = self._machines.link(maker, Purpose.GRADIENTS).chunks(bundle.numel, self.store.dtype, what)
        while True:
            with self._waits(f"{what} from {self._name(maker)}", is_update=True):
                _, values = next(chunks, (0, None))
            if values is None:
                return
            yield values

    def send_gradient(self, bundle: Bundle, step: int, landed: Mapping[int, Buffer]) -> None:
        for part, place in landed.items():
            what = self._part(bundle, step, part)
            self._send(bundle.owner, Purpose.GRADIENTS, self._landed(bundle, place), what)

    def all_losses(self, pass_: Pass, own: Sequence[float]) -> Sequence[float]:
        if self.group is None:
            return own
        share, what = pass_.share, f"the losses of step {pass_.step}"
        assert share is not None, f"step {pass_.step} was dispatched without a share"
        [gathered] = self.gather([dict(zip(share.micro_batches, own, strict=True))], what)
        sums = [gathered[index] for index in range(share.total_micro_batches)]
        self.board.post(pass_.sums, sums)
        return sums

    def gather(self, own: Sequence[dict[int, float]], what: str) -> Sequence[dict[int, float]]:
        """Gather the numbers of all machines, as exact doubles."""
        if self.group is None:
            return own
        with self._waits(f"{what} from all machines", is_update=True):
            gathered = self.group.channel("steps").gather([sorted(each.items()) for each in own], what)
        return [dict(chain(*alike)) for alike in zip(*gathered, strict=True)]

    # Weights.

    def send_weights(self, peer: int, bundle: Bundle, version: int) -> None:
        self._send(peer, Purpose.WEIGHTS, bundle.version(version), self._weights(bundle, version))

    def receive_weights(self, bundle: Bundle, version: int) -> None:
        what = self._weights(bundle, version)
        with self._waits(f"{what} from {self._name(bundle.owner)}"):
            link = self._machines.link(bundle.owner, Purpose.WEIGHTS)
            self.store.receive(bundle, version, partial(link.receive, what=what))

    def _send(self, peer: int, purpose: Purpose, data: Tensor, what: str) -> None:
        with self._waits(f"{self._name(peer)} to take {what}"):
            self.board.observer.touched(reads=[data], writes=())
            self._machines.link(peer, purpose).send(data, what)

    @contextmanager
    def _waits(self, what: str, is_update: bool = False) -> Iterator[None]:
        """Wait for another machine within the block; `is_update` says that the optimizer's thread does. Raises `Stopped`."""
        self.board.note_progress()
        begin_s = time.perf_counter()
        with self.board.waits(f"waits for {what}"):
            yield
        if is_update:
            self.waited_s += time.perf_counter() - begin_s

    @property
    def _machines(self) -> MachineGroup:
        assert self.group is not None, "one machine exchanges nothing"
        return self.group

    def _name(self, machine: int) -> str:
        return str(self._machines.machines[machine])

    def _part(self, bundle: Bundle, step: int, part: int) -> str:
        return f"part {part} of step {step}'s gradient of {bundle.name}"

    def _weights(self, bundle: Bundle, version: int) -> str:
        return f"version {version} of the weights of {bundle.name}"

    # Faults, and one end for all.

    def failed(self, error: BaseException, location: FaultLocation | None = None) -> None:
        """End the engine because of an error on one of the exchange's threads, or of another machine."""
        location = location or FaultLocation("exchange")
        self.board.fail(self.located(error) or PipelineError.of(error, location))

    def located(self, error: BaseException) -> PipelineError | None:
        """Make the engine's fault of another machine's, None of any other error."""
        if not isinstance(error, MachineError):
            return None
        machine = "several machines" if error.machine is None else self._name(error.machine)
        failure = PipelineError(FaultLocation(machine), str(error).removeprefix(f"{machine} "))
        failure.__cause__ = error
        return failure

    def fail(self, failure: PipelineError) -> None:
        """Tell the other machines of a fault of this one. Each learns of another one's fault by itself."""
        # What each thread waits for stays here.
        if self.group is not None and not isinstance(failure.__cause__, MachineError):
            self.group.fail(str(failure).splitlines()[0])

    def stop(self, failure: PipelineError | None) -> None:
        """Wake the threads that wait for other machines. The engine's board has stopped, because of `failure` if any.

        Only an abort wakes a thread inside gloo. Call this within a step: between steps there is none, and the group lives on.
        """
        if self.group is None:
            return
        if failure is None:
            self.group.fail("it stopped in the middle of a step")
        self.group.abort()


def _make_landings(store: HostStore, pool: HostPool) -> dict[tuple[int, int], Buffer]:
    """Take the host memory in which parts of gradients land before they are added up or sent.

    On one machine each use of a bundle has a buffer, and so have shared bundles of several machines. Others would hold a
    whole round of gradients in that way, because the network may be far behind the devices. So those of one size land in a
    few places in turn, each once the part before it is taken.
    """
    summed = [bundle for bundle in reversed(store.trained) if bundle.adds_up]  # as they land
    sizes = {bundle.index: whole_pages(bundle.numel * store.dtype.itemsize) for bundle in summed}
    is_alone = store.ownership.num_machines == 1
    in_turn = [bundle.index for bundle in summed if len(bundle.layers) == 1 and not is_alone]
    apart = [(b.index, use) for b in summed if b.index not in in_turn for use in range(len(b.layers))]
    ring = ring_places([sizes[index] for index in in_turn])
    memory = iter(pool.lend([*(sizes[index] for index, _ in apart), *ring.elements()]))
    names = {bundle.index: bundle.name for bundle in summed}
    landings = {(i, use): Buffer(PART, names[i], next(memory)) for i, use in apart}
    rings = {
        nbytes: cycle([Buffer(PART, content=next(memory)) for _ in range(count)])
        for nbytes, count in ring.items()
    }
    return landings | {(index, 0): next(rings[sizes[index]]) for index in in_turn}


# Before the first step.


def share_weights(store: HostStore, group: MachineGroup) -> None:
    """Give every machine all versions of all device weights, bit for bit. All machines call this alike, between steps.

    Every machine has filled what it owns and its frozen weights. Those that differ from their owner's are sent too: a machine
    may have read its own part of a checkpoint only. Raises `MachineError`.
    """
    ours = [
        # 128 bits of the frozen weights that are in memory, packed ones too.
        ""
        if bundle.trainable or bundle.mapped
        else xxhash.xxh3_128_hexdigest(bundle.device_weights[0].view(torch.uint8).numpy().data)
        for bundle in store.bundles
    ]
    each = group.channel("start").gather(ours, "checksums of the frozen weights")
    unlike = [{b.index for b in store.bundles if found[b.index] != each[b.owner][b.index]} for found in each]

    def messages(owner: int, receiver: int) -> Iterator[tuple[Bundle, int, str]]:
        """Yield what `owner` sends to `receiver`, bundles and versions in the order of the next forward."""
        for bundle in store.bundles:
            if bundle.owner == owner and (bundle.trainable or bundle.index in unlike[receiver]):
                for age in range(len(bundle.device_weights)):
                    yield bundle, store.step - age, f"the first weights of {bundle.name}"

    def send(peer: int) -> None:
        for bundle, version, what in messages(group.rank, peer):
            group.link(peer, Purpose.WEIGHTS).send(bundle.version(version), what)

    def receive(peer: int) -> None:
        for bundle, version, what in messages(peer, group.rank):
            store.receive(bundle, version, partial(group.link(peer, Purpose.WEIGHTS).receive, what=what))

    group.with_each_peer(send, receive)
