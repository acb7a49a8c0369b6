"""The exchange between machines, simulated beside the steps of a plan: when gradients and new weights arrive.

Each machine runs its share of the step's micro-batches by the same plan. A gradient leaves for its owner once its stage has
ended. The owners update once all gradients have arrived, because the norm is over all of them. Each one updates its
bundles in forward order and sends their new weights to the others. A stage waits for the weights of its layers.

Each machine has one link out and one link in. A link carries its messages one after the other, in the order in which they
are ready. A message has arrived once it has passed its sender's and its receiver's link. Latency is not counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torchround.pipeline.machine_shares import assign_owners
from torchround.pipeline.partition import Partition, StageKind
from torchround.pipeline.simulation.step_time import StageTimes, run_slots

# Steps of `async` before its step time is taken, as delays settle within a few steps. The mean is taken over this many
# steps for each device, because steps can repeat with a period of as many steps as there are devices.
WARM_UP_STEPS, STEPS_PER_DEVICE = 24, 4


@dataclass(frozen=True)
class ExchangedBundle:
    """Trained parameters that travel together.

    - `numel`: their number, padding included.
    - `layers`: the layers that use them, in rising order.
    - `update_s`: seconds of one update on the owner's host.
    """

    numel: int
    layers: tuple[int, ...]
    update_s: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """The data that several machines exchange in a step, and their links.

    - `bytes_per_s`: the rate of each machine's link, each way; infinite if the exchange is to take no time.
    - `gradient_bytes`, `weight_bytes`: bytes per parameter of one part of its gradient, and of its new weights.
    """

    bundles: tuple[ExchangedBundle, ...]
    num_machines: int
    bytes_per_s: float
    gradient_bytes: float
    weight_bytes: float

    def owners(self) -> tuple[int, ...]:
        """Return the machine that owns each bundle."""
        return assign_owners([bundle.numel for bundle in self.bundles], self.num_machines)

    def wire_bytes(self, rounds: int) -> tuple[float, float]:
        """Count the bytes of one step on the busiest link: of gradients, and of new weights."""
        gradients, weights = self._links(), self._links()
        for bundle, owner in zip(self.bundles, self.owners(), strict=True):
            for _ in range(rounds * len(bundle.layers)):
                gradients.to_owner(owner, bundle.numel * self.gradient_bytes, 0.0)
            weights.from_owner(owner, bundle.numel * self.weight_bytes, 0.0)
        return gradients.busiest_bytes(), weights.busiest_bytes()

    def _links(self) -> "_Links":
        return _Links(self.num_machines, self.bytes_per_s)


def exchange_step_seconds(
    partition: Partition,
    times: StageTimes,
    round_sizes: Sequence[int],
    num_devices: int,
    update: str,
    exchange: Exchange,
) -> float:
    """Compute the seconds per step of several machines in the steady state.

    `round_sizes` are the micro-batches of each round of the machine with the largest share, which the others wait
    for. `update` is `"sync"` or `"async"`. Raises `ValueError` for another one.
    """
    if update not in ("sync", "async"):
        raise ValueError(f'update = "{update}" must be "sync" or "async" on several machines')
    run = _Run(partition, times, round_sizes, num_devices, exchange)
    return run.sync_s() if update == "sync" else run.async_s()


class _Links:
    """The links of all machines: when each is free again, and how many bytes it has carried."""

    def __init__(self, num_machines: int, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_s = {"out": [0.0] * num_machines, "in": [0.0] * num_machines}
        self._bytes = {"out": [0.0] * num_machines, "in": [0.0] * num_machines}

    def to_owner(self, owner: int, nbytes: float, ready_s: float) -> float:
        """Carry a message from each other machine to the owner; return when all have arrived."""
        return self._carry("out", "in", owner, nbytes, ready_s)

    def from_owner(self, owner: int, nbytes: float, ready_s: float) -> float:
        """Carry a message from the owner to each other machine; return when all have arrived."""
        return self._carry("in", "out", owner, nbytes, ready_s)

    def busiest_bytes(self) -> float:
        """Return the bytes of the link that has carried most."""
        return max(max(of_way) for of_way in self._bytes.values())

    def _carry(self, of_others: str, of_owner: str, owner: int, nbytes: float, ready_s: float) -> float:
        num_machines = len(self._free_s["out"])
        ends = [self._use(of_owner, owner, (num_machines - 1) * nbytes, ready_s)]
        ends += [
            self._use(of_others, other, nbytes, ready_s) for other in range(num_machines) if other != owner
        ]
        return max(ends)

    def _use(self, way: str, machine: int, nbytes: float, ready_s: float) -> float:
        end_s = max(self._free_s[way][machine], ready_s) + nbytes / self._rate
        self._free_s[way][machine] = end_s
        self._bytes[way][machine] += nbytes
        return end_s


@dataclass(frozen=True)
class _Message:
    """A part of a gradient on its way to its owner, or new weights on their way back."""

    ready_s: float
    bundle: int
    is_gradient: bool


class _Run:
    """Consecutive steps of all machines, of which the one with the largest share is timed."""

    def __init__(
        self,
        partition: Partition,
        times: StageTimes,
        round_sizes: Sequence[int],
        num_devices: int,
        exchange: Exchange,
    ) -> None:
        self._stages = partition.stages()
        self._times, self._sizes, self._num_devices = times, round_sizes, num_devices
        self._exchange, self._owners = exchange, exchange.owners()
        self._links = _Links(exchange.num_machines, exchange.bytes_per_s)
        # The stage, of those with gradients, that completes a layer's gradient.
        self._stage_of = {
            layer: index
            for index, stage in enumerate(self._stages)
            if stage.kind is not StageKind.FORWARD
            for layer in range(stage.start, stage.stop)
        }

    def sync_s(self) -> float:
        """Compute the seconds from the moment at which all gradients of a step are there to that of the next step."""
        weights = self._updates(0.0)
        arrived = self._arrived(weights, self._carry(weights))
        ends = run_slots(self._times, self._sizes, [0.0] * self._num_devices, self._ready_s(arrived))
        return max(*ends, *self._carry(self._gradients(ends)))

    def async_s(self) -> float:
        """Compute the mean seconds of a step once delays have settled."""
        free, arrived = [0.0] * self._num_devices, [0.0] * len(self._owners)
        weights: list[_Message] = []
        updated_s = 0.0
        complete = [0.0]
        measured = STEPS_PER_DEVICE * self._num_devices
        for _ in range(WARM_UP_STEPS + measured):
            # Step t reads what step t - 2 has made. The weights of step t - 1 travel beside the gradients of step t.
            ends = run_slots(self._times, self._sizes, free, self._ready_s(arrived))
            arrivals = self._carry([*weights, *self._gradients(ends)])
            complete.append(max(*ends, *arrivals[len(weights) :]))
            arrived = self._arrived(weights, arrivals) if weights else arrived
            weights = self._updates(max(complete[-1], updated_s))
            updated_s = max((message.ready_s for message in weights), default=0.0)
        return (complete[-1] - complete[-1 - measured]) / measured

    def _updates(self, start_s: float) -> list[_Message]:
        """List the new weights that the owners make from `start_s` on, each owner in forward order."""
        busy_until_s = [start_s] * self._exchange.num_machines
        messages = []
        for index in sorted(range(len(self._owners)), key=lambda index: self._exchange.bundles[index].layers):
            owner = self._owners[index]
            busy_until_s[owner] += self._exchange.bundles[index].update_s
            messages.append(_Message(busy_until_s[owner], index, False))
        return messages

    def _gradients(self, ends: Sequence[float]) -> list[_Message]:
        """List the parts of all gradients, each ready when its stage ends; `ends` are those of a step's slots."""
        return [
            _Message(ends[first + self._stage_of[layer]], index, True)
            for first in range(0, len(ends), len(self._stages))
            # A stage hands its deepest layer's gradient down first.
            for index, bundle in reversed(list(enumerate(self._exchange.bundles)))
            for layer in reversed(bundle.layers)
        ]

    def _carry(self, messages: Sequence[_Message]) -> list[float]:
        """Carry messages in the order in which they are ready; return when each one has arrived everywhere."""
        arrivals = [0.0] * len(messages)
        for index in sorted(range(len(messages)), key=lambda index: messages[index].ready_s):
            message = messages[index]
            owner, numel = self._owners[message.bundle], self._exchange.bundles[message.bundle].numel
            if message.is_gradient:
                nbytes = numel * self._exchange.gradient_bytes
                arrivals[index] = self._links.to_owner(owner, nbytes, message.ready_s)
            else:
                nbytes = numel * self._exchange.weight_bytes
                arrivals[index] = self._links.from_owner(owner, nbytes, message.ready_s)
        return arrivals

    def _arrived(self, weights: Sequence[_Message], arrivals: Sequence[float]) -> list[float]:
        """Return when each bundle's new weights have arrived; `arrivals` begins with those of `weights`."""
        arrived = [0.0] * len(self._owners)
        for message, arrived_s in zip(weights, arrivals, strict=False):
            arrived[message.bundle] = arrived_s
        return arrived

    def _ready_s(self, arrived: Sequence[float]) -> list[float]:
        """Return when the weights of each stage have arrived."""
        of_layer = [0.0] * max(stage.stop for stage in self._stages)
        for bundle, arrived_s in zip(self._exchange.bundles, arrived, strict=True):
            for layer in bundle.layers:
                of_layer[layer] = max(of_layer[layer], arrived_s)
        return [max(of_layer[stage.start : stage.stop]) for stage in self._stages]
