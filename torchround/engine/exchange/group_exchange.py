"""The exchange of a machine among several: gradients to their owners, sums that all agree on, and weights back.

Each part of a gradient goes to its bundle's owner in the dtype in which it was downloaded. The owner adds all parts in the
order of their numbers, in fp32. Round `g` of all machines makes the parts that round `g` of one machine with as many rounds
would make. So the sum has the same bits, whatever the number of machines and the order of arrival.

Each owner sends the device weights that its update made to all. They arrive in the buffer of the new version itself. A step
whose update does not apply sends nothing: each machine copies the versions by itself.

Workers of their own talk to each peer, because they spend their time waiting for the network.
"""

import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from torchround.engine.errors import EngineUsageError, FaultLocation, PipelineError
from torchround.engine.exchange.landings import RingLandings
from torchround.engine.exchange.step_exchange import LOSSES, StepExchange, Talks, check_share
from torchround.engine.passes import Pass
from torchround.engine.store.bundles import Bundle
from torchround.engine.store.host_memory import HostBuffer, HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Buffer, Task, Tasks, Worker
from torchround.engine.update import Decision
from torchround.machines.errors import MachineError
from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose, chunk_numel
from torchround.planning.machine_shares import StepShare


class GroupExchange(StepExchange):
    """The exchange of one machine of a `MachineGroup`. `is_in_a_step` tells whether a step is dispatched and not done."""

    def __init__(
        self,
        store: HostStore,
        tasks: Tasks,
        pool: HostPool,
        group: MachineGroup,
        on_failure: Callable[[PipelineError], None],
        is_in_a_step: Callable[[], bool],
    ) -> None:
        super().__init__(store, tasks.board, pool)
        self._group = group
        self._on_failure = on_failure
        self._is_in_a_step = is_in_a_step
        self._channel = group.channel("steps")
        self._talks = Talks(tasks.board)
        self.landings = RingLandings(store, pool)
        self.peers = [machine.rank for machine in group.machines if machine.rank != group.rank]
        # A peer that owns nothing gets no gradients and sends no weights.
        owners = [peer for peer in self.peers if any(bundle.owner == peer for bundle in store.trained)]

        def worker(name: str) -> Worker:
            return Worker(f"torchround {name}", "exchange", tasks, lambda task, error: self.failed(error))

        self.gradients_to = {peer: worker(f"gradients to machine {peer}") for peer in owners}
        self.weights_to = {peer: worker(f"weights to machine {peer}") for peer in self.peers if store.owned}
        self.weights_from = {peer: worker(f"weights from machine {peer}") for peer in owners}
        links, both = group.links, (Purpose.GRADIENTS, Purpose.WEIGHTS)
        self._receivers = {peer: links.receiver(peer, Purpose.GRADIENTS) for peer in self.peers}
        self._links = [links.sender(peer, purpose) for peer in self.peers for purpose in both]
        self._counted_bytes = self._sent_bytes()
        group.on_fault(self.failed)

    def share(self, given: StepShare | None, num_micro_batches: int, rounds: int) -> StepShare:
        return check_share(given, num_micro_batches, self._group.rank, self._group.size)

    # Gradients.

    def add(self, bundle: Bundle, step: int, parts: range, sources: Sequence[Buffer | int]) -> None:
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
                self.landings.give(source.content, busy=[])

    def _landed_chunks(self, buffer: HostBuffer) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that landed here in the chunks in which others arrive."""
        landed = buffer.memory.view(self._store.gradient_dtype)
        length = chunk_numel(landed.dtype)
        return ((start, landed[start : start + length]) for start in range(0, landed.numel(), length))

    def _arriving_chunks(
        self, bundle: Bundle, step: int, part: int, maker: int
    ) -> Iterator[tuple[int, Tensor]]:
        """Yield a part that another machine made, chunk by chunk as it arrives."""
        what = self._words_of_part(bundle, step, part)
        chunks = self._receivers[maker].chunks(bundle.numel, self._store.gradient_dtype, what)
        while True:
            begin_s = time.perf_counter()
            with self._talks.inside(f"{what} from {self._group.machines[maker]}"):
                chunk = next(chunks, None)
            self.waited_s += time.perf_counter() - begin_s
            if chunk is None:
                return
            yield chunk

    def send_gradient(
        self, bundle: Bundle, step: int, parts: Sequence[int], sources: Sequence[Buffer], task: Task
    ) -> None:
        link = self._group.links.sender(bundle.owner, Purpose.GRADIENTS)
        for part, source in zip(parts, sources, strict=True):
            buffer: HostBuffer = source.content
            what = self._words_of_part(bundle, step, part)
            with self._talks.inside(f"{self._group.machines[bundle.owner]} to take {what}"):
                self._board.observer.touched(reads=[buffer.memory], writes=())
                link.send(buffer.memory.view(self._store.gradient_dtype), what)
            self.landings.give(buffer, busy=[])

    def all_losses(self, pass_: Pass, own: Sequence[float]) -> Sequence[float]:
        step, share = pass_.step, pass_.share
        assert share is not None, f"step {step} was dispatched without a share"
        losses = dict(zip(share.micro_batches, own, strict=True))
        gathered = self._gather(losses, f"the losses of step {step}")
        sums = [gathered[index] for index in range(share.total_micro_batches)]
        self._board.post(LOSSES(pass_.index), sums)
        return sums

    def all_squares(self, step: int, own: dict[int, float]) -> dict[int, float]:
        return self._gather(own, f"the norms of step {step}")

    def _gather(self, own: dict[int, float], what: str) -> dict[int, float]:
        """Gather the numbers of all machines, as exact doubles."""
        begin_s = time.perf_counter()
        with self._talks.inside(f"{what} from all machines"):
            gathered = self._channel.gather(sorted(own.items()), what)
        self.waited_s += time.perf_counter() - begin_s
        return {index: value for of_one in gathered for index, value in of_one}

    # Weights. Without a `decision` they were written anew between steps.

    def send_weights(
        self, peer: int, bundle: Bundle, version: int, decision: Decision | None, task: Task
    ) -> None:
        if decision is not None and not decision.applies:
            return
        weights, what = bundle.version(version), self._words_of_weights(bundle, version)
        link = self._group.links.sender(peer, Purpose.WEIGHTS)
        with self._talks.inside(f"{self._group.machines[peer]} to take {what}"):
            self._board.observer.touched(reads=[weights], writes=())
            link.send(weights, what)

    def receive_weights(
        self,
        bundle: Bundle,
        version: int,
        decision: Decision | None,
        copy_version: Callable[[Bundle, int], None],
        task: Task,
    ) -> None:
        if decision is not None and not decision.applies:
            copy_version(bundle, version - 1)
            return
        weights, what = bundle.version(version), self._words_of_weights(bundle, version)
        link = self._group.links.receiver(bundle.owner, Purpose.WEIGHTS)
        with self._talks.inside(f"{what} from {self._group.machines[bundle.owner]}"):
            self._board.observer.touched(reads=(), writes=[weights])
            link.receive(weights, what)

    def _words_of_part(self, bundle: Bundle, step: int, part: int) -> str:
        return f"part {part} of step {step}'s gradient of {self._layers(bundle)}"

    def _words_of_weights(self, bundle: Bundle, version: int) -> str:
        return f"version {version} of the weights of {self._layers(bundle)}"

    def _layers(self, bundle: Bundle) -> str:
        return ", ".join(self._store.layer_names[layer] for layer in bundle.layers)

    def _sent_bytes(self) -> int:
        return sum(sender.bytes_sent for sender in self._links)

    def take_bytes(self) -> int:
        before, self._counted_bytes = self._counted_bytes, self._sent_bytes()
        return self._counted_bytes - before

    # Faults, and one end for all.

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


def make_exchange(
    store: HostStore,
    tasks: Tasks,
    pool: HostPool,
    group: MachineGroup | None,
    on_failure: Callable[[PipelineError], None],
    is_in_a_step: Callable[[], bool],
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
        return StepExchange(store, tasks.board, pool)
    return GroupExchange(store, tasks, pool, group, on_failure, is_in_a_step)
