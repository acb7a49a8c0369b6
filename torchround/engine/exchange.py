"""What the machines of a run exchange: gradients to their owners, sums that all agree on, and weights back.

Each part of a gradient goes to its bundle's owner in the dtype in which it was downloaded. The owner adds all parts in the
order of their numbers, in fp32. Round `g` of all machines makes the parts that round `g` of one machine with as many rounds
would make. So the sum has the same bits, whatever the number of machines and the order of arrival.

Each owner sends the device weights that its update made to all. They arrive in the buffer of the new version itself. A step
whose update does not apply sends nothing: each machine copies the versions by itself.

Workers of their own send to each peer and receive weights from it, because they spend their time waiting for the network.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import xxhash
from torch import Tensor

from torchround.engine.errors import EngineUsageError, FaultLocation, PipelineError
from torchround.engine.landings import Landings, layers_of
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Buffer, Tasks, Worker
from torchround.machines import links
from torchround.machines.group import MachineError, MachineGroup
from torchround.machines.links import Link, Purpose
from torchround.planning.machine_shares import StepShare, step_share


class StepExchange:
    """The exchange of one machine, which is alone if it has no `group`. `is_in_a_step` tells whether a step is under way.

    `landings` are the memory of its gradients. `gradients_to`, `weights_to` and `weights_from` are the workers for each
    peer. `waited_s` is the time that the optimizer's thread has waited for other machines.
    """

    def __init__(
        self,
        store: HostStore,
        tasks: Tasks,
        pool: HostPool,
        group: MachineGroup | None,
        is_in_a_step: Callable[[], bool],
    ) -> None:
        self._rank, self._size = (0, 1) if group is None else (group.rank, group.size)
        ownership = store.ownership
        if (ownership.machine, ownership.num_machines) != (self._rank, self._size):
            raise EngineUsageError(
                f"the host store is of machine {ownership.machine} of {ownership.num_machines}, "
                f"this is machine {self._rank} of {self._size}"
            )
        self.landings = Landings(store, pool)
        self.waited_s = 0.0
        self._store = store
        self._board = tasks.board
        self._group = group
        self._is_in_a_step = is_in_a_step

        def worker(name: str) -> Worker:
            return Worker(f"torchround {name}", "exchange", tasks, lambda task, error: self.failed(error))

        self.peers: Sequence[int] = () if group is None else group.peers
        # A peer that owns nothing gets no gradients and sends no weights.
        owners = [peer for peer in self.peers if any(bundle.owner == peer for bundle in store.trained)]
        self.gradients_to = {peer: worker(f"gradients to machine {peer}") for peer in owners}
        self.weights_to = {peer: worker(f"weights to machine {peer}") for peer in self.peers if store.owned}
        self.weights_from = {peer: worker(f"weights from machine {peer}") for peer in owners}
        self.workers = [
            *self.gradients_to.values(),
            *self.weights_to.values(),
            *self.weights_from.values(),
        ]
        self._counted_bytes = self._sent_bytes()

    def start(self) -> None:
        """Let the other machines learn of faults of this one, and this one of theirs, until the engine's end."""
        self._board.on_fault = self.fail
        if self._group is not None:
            self._group.on_fault(self.failed)

    def share(self, given: StepShare | None, num_micro_batches: int, rounds: int) -> StepShare:
        """Return this machine's share of a step that is about to be dispatched.

        `given` is what the caller says of it, with `num_micro_batches` of its own. Raises `EngineUsageError`.
        """
        if given is None:
            if self.peers:
                raise EngineUsageError(
                    "an engine on several machines needs the share of each step (`step_share`)"
                )
            # An empty batch has a share too, so that the engine can refuse it by its own message.
            return step_share(max(num_micro_batches, 1), rounds, 0, 1)
        if (given.machine, given.num_machines) != (self._rank, self._size):
            raise EngineUsageError(
                f"the share is of machine {given.machine} of {given.num_machines}, "
                f"this is machine {self._rank} of {self._size}"
            )
        if len(given.micro_batches) != num_micro_batches:
            raise EngineUsageError(
                f"the share has {len(given.micro_batches)} micro-batches, but {num_micro_batches} were given"
            )
        return given

    # Gradients.

    def add(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
        """Add parts of a gradient to their sum in fp32, in the order of their numbers, and give their buffers back.

        The source of a part is the memory in which it landed, or the machine that made and sends it.
        """
        # Parts of one machine come one after the other over one link, so only one of each can be under way.
        together = len(parts) if len(bundle.layers) == 1 else 1
        for first in range(0, len(parts), together):
            few = slice(first, first + together)
            self._add_together(bundle, step, parts[few], sources[few])

    def _add_together(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
        """Add parts of different machines chunk by chunk, each chunk in the order of parts.

        All machines send at once. If one whole part after the other was added, all owners would wait for the same
        machine while the network of the others is idle. The order of additions to one element is the same.
        """
        gradient = bundle.gradient
        assert gradient is not None, f"bundle {bundle.index} has no gradient buffer"
        streams = [
            self._landed_chunks(source.content)
            if isinstance(source, Buffer)
            else self._arriving_chunks(bundle, step, part, source)
            for part, source in zip(parts, sources, strict=True)
        ]
        for chunks in zip(*streams, strict=True):
            # Every next chunk is on its way while this one is added.
            for part, (start, values) in zip(parts, chunks, strict=True):
                target = gradient[start : start + values.numel()]
                self._board.observer.touched(reads=[values], writes=[target])
                if part == 0:
                    target.copy_(values)  # what the buffer held before is the previous step's
                else:
                    target.add_(values)
        for source in sources:
            if isinstance(source, Buffer):
                self.landings.give(bundle, source.content)

    def _landed_chunks(self, buffer: HostBuffer) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that landed here in the chunks in which others arrive."""
        landed = buffer.memory.view(self._store.gradient_dtype)
        length = links.CHUNK_BYTES // landed.dtype.itemsize
        return ((start, landed[start : start + length]) for start in range(0, landed.numel(), length))

    def _arriving_chunks(
        self, bundle: Bundle, step: int, part: int, maker: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that another machine made, chunk by chunk as it arrives."""
        what = self._part(bundle, step, part)
        chunks = self._link(maker, Purpose.GRADIENTS).chunks(bundle.numel, self._store.gradient_dtype, what)
        while True:
            begin_s = time.perf_counter()
            with self._waits(f"{what} from {self._name(maker)}"):
                chunk = next(chunks, None)
            self.waited_s += time.perf_counter() - begin_s
            if chunk is None:
                return
            yield chunk

    def send_gradient(
        self, bundle: Bundle, step: int, parts: Sequence[int], sources: Sequence[Buffer]
    ) -> None:
        """Send parts of a gradient to the bundle's owner, and give their buffers back."""
        for part, source in zip(parts, sources, strict=True):
            buffer: HostBuffer = source.content
            self._send(
                bundle.owner,
                Purpose.GRADIENTS,
                buffer.memory.view(self._store.gradient_dtype),
                self._part(bundle, step, part),
            )
            self.landings.give(bundle, buffer)

    def all_losses(self, pass_: Pass, own: Sequence[float]) -> Sequence[float]:
        """Return the loss sums of all machines' micro-batches, in the order of the batch, from this machine's own."""
        if self._group is None:
            return own
        step, share = pass_.step, pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        gathered = self._gather(
            dict(zip(share.micro_batches, own, strict=True)), f"the losses of step {step}"
        )
        sums = [gathered[index] for index in range(share.total_micro_batches)]
        self._board.post(pass_.sums, sums)
        return sums

    def all_squares(self, step: int, own: dict[int, float]) -> dict[int, float]:
        """Return the squared norms of all bundles' gradients, by bundle, from those of this machine's own.

        That of a bundle's parameters which are not clipped is apart, under `update.unclipped`.
        """
        return own if self._group is None else self._gather(own, f"the norms of step {step}")

    def _gather(self, own: dict[int, float], what: str) -> dict[int, float]:
        """Return the numbers of all machines, as exact doubles."""
        assert self._group is not None, "one machine gathers nothing"
        begin_s = time.perf_counter()
        with self._waits(f"{what} from all machines"):
            gathered = self._group.channel("steps").gather(sorted(own.items()), what)
        self.waited_s += time.perf_counter() - begin_s
        return {index: value for of_one in gathered for index, value in of_one}

    # Weights.

    def send_weights(self, peer: int, bundle: Bundle, version: int) -> None:
        """Send a version of a bundle's device weights."""
        self._send(peer, Purpose.WEIGHTS, bundle.version(version), self._weights(bundle, version))

    def receive_weights(self, bundle: Bundle, version: int) -> None:
        """Receive a version of a bundle's device weights from its owner."""
        weights, what = bundle.version(version), self._weights(bundle, version)
        with self._waits(f"{what} from {self._name(bundle.owner)}"):
            self._board.observer.touched(reads=(), writes=[weights])
            self._link(bundle.owner, Purpose.WEIGHTS).receive(weights, what)

    def _send(self, peer: int, purpose: Purpose, data: Tensor, what: str) -> None:
        with self._waits(f"{self._name(peer)} to take {what}"):
            self._board.observer.touched(reads=[data], writes=())
            self._link(peer, purpose).send(data, what)

    @contextmanager
    def _waits(self, what: str) -> Iterator[None]:
        """Wait for another machine within the block; `what` names the wait. Raises `Stopped` if the engine stopped."""
        self._board.raise_if_stopped()
        with self._board.waits(f"waits for {what}"):
            yield
        self._board.note_progress()

    def _link(self, peer: int, purpose: Purpose) -> Link:
        assert self._group is not None, "one machine has no link"
        return self._group.link(peer, purpose)

    def _name(self, machine: int) -> str:
        assert self._group is not None, "one machine has no name"
        return str(self._group.machines[machine])

    def _part(self, bundle: Bundle, step: int, part: int) -> str:
        return f"part {part} of step {step}'s gradient of {layers_of(self._store, bundle)}"

    def _weights(self, bundle: Bundle, version: int) -> str:
        return f"version {version} of the weights of {layers_of(self._store, bundle)}"

    def _sent_bytes(self) -> int:
        both = Purpose.GRADIENTS, Purpose.WEIGHTS
        return sum(self._link(peer, purpose).bytes_sent for peer in self.peers for purpose in both)

    def take_bytes(self) -> int:
        """Return the bytes that this machine has sent to others since the last call."""
        before, self._counted_bytes = self._counted_bytes, self._sent_bytes()
        return self._counted_bytes - before

    # Faults, and one end for all.

    def failed(self, error: BaseException) -> None:
        """End the engine because of an error on one of the exchange's threads, or of another machine."""
        self._board.fail(self.located(error) or PipelineError.of(error, FaultLocation("exchange")))

    def located(self, error: BaseException) -> PipelineError | None:
        """Return the fault of another machine as the engine's, None for any other error."""
        if not isinstance(error, MachineError):
            return None
        machine = "several machines" if error.machine is None else self._name(error.machine)
        failure = PipelineError(FaultLocation(machine), str(error).removeprefix(f"{machine} "))
        failure.__cause__ = error
        return failure

    def fail(self, failure: PipelineError) -> None:
        """Tell the other machines of a fault of this one. Each learns of another one's fault by itself."""
        # What each thread waits for stays here.
        if self._group is not None and not isinstance(failure.__cause__, MachineError):
            self._group.fail(str(failure).splitlines()[0])

    def stop(self, failure: PipelineError | None) -> None:
        """Wake the threads that wait for other machines. The engine's board has stopped, because of `failure` if any.

        Only an abort wakes a thread inside gloo. Between steps there is none, and the group lives on. In the middle of
        a step the others wait for this machine, even if none of its own threads is inside gloo.
        """
        if self._group is None or not self._is_in_a_step():
            return
        if failure is None:
            self._group.fail("it stopped in the middle of a step")
        self._group.abort()


# Before the first step.


def share_weights(
    store: HostStore, group: MachineGroup, advance: Callable[[int], object] = lambda num_bytes: None
) -> None:
    """Give every machine all versions of all device weights, bit for bit. All machines call this alike, between steps.

    Every machine has filled what it owns, from a checkpoint, from pretrained weights or from a seed. Frozen weights are
    on every machine already, each by its own means. Those that differ from their owner's are sent too: unlike processors
    may draw unlike initial weights from one seed. `advance` receives the bytes of each tensor that this machine has
    received, from one thread at a time. Raises `MachineError`.
    """
    unlike = _unlike_frozen(store, group)
    advancing = threading.Lock()

    def messages(owner: int, receiver: int) -> Iterator[tuple[Tensor, str]]:
        """Yield what `owner` sends to `receiver`, in the order of the next forward."""
        for bundle in store.bundles:
            if bundle.owner == owner and (bundle.trainable or bundle.index in unlike[receiver]):
                for age in range(len(bundle.device_weights)):
                    yield bundle.version(store.step - age), f"the first weights of {layers_of(store, bundle)}"

    def send(peer: int) -> None:
        for weights, what in messages(group.rank, peer):
            group.link(peer, Purpose.WEIGHTS).send(weights, what)

    def receive(peer: int) -> None:
        for weights, what in messages(peer, group.rank):
            group.link(peer, Purpose.WEIGHTS).receive(weights, what)
            with advancing:
                advance(weights.nbytes)

    group.with_each_peer(send, receive)


def received_bytes(store: HostStore) -> int:
    """Return the bytes of trained weights that `share_weights` brings to this machine."""
    return sum(
        weights.nbytes for bundle in store.trained if bundle.is_remote for weights in bundle.device_weights
    )


def _unlike_frozen(store: HostStore, group: MachineGroup) -> list[set[int]]:
    """Return, for each machine, the frozen bundles in memory that differ from their owner's."""
    ours = {
        str(bundle.index): xxhash.xxh3_128_hexdigest(bundle.device_weights[0].view(torch.uint8).numpy().data)
        for bundle in store.bundles
        if not (bundle.trainable or bundle.mapped)
    }
    each = group.channel("start").gather(ours, "checksums of the frozen weights")
    return [
        {
            int(index)
            for index, checksum in found.items()
            if checksum != each[store.bundles[int(index)].owner][index]
        }
        for found in each
    ]
