"""The exchange between machines, simulated beside the steps of a plan: when gradients and new weights arrive.

Each machine runs its share of the step's micro-batches by the same plan. A gradient leaves for its owner once its stage has
ended. The owners update once all gradients have arrived, because the norm is over all of them. Each one updates its
bundles in forward order and sends their new weights to the others. A stage waits for the weights of its layers. In
`bounded` each bundle is updated once its own gradients have arrived, and the forward of stale layers waits for nothing.

Each machine has one link out and one link in. A link carries its messages one after the other, in the order in which they
are ready. A message has arrived once it has passed its sender's and its receiver's link. Latency is not counted.
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchround.planning.machine_shares import assign_owners, step_share
from torchround.planning.memory import size_text
from torchround.planning.partition import Partition, split_evenly
from torchround.planning.plan import Plan
from torchround.planning.run_question import RunQuestion
from torchround.planning.stage_times import LayerSums, StageTimes, completing_stage
from torchround.planning.step_time import run_stages

# Steps without a flush before their step time is taken, as delays settle within a few steps. The mean is taken over this many
# steps for each device, because steps can repeat with a period of as many steps as there are devices. Messages can
# overtake each other, so a step is not linear in the (max, +) algebra, and a matrix does not tell its steady state.
WARM_UP_STEPS, STEPS_PER_DEVICE = 24, 4
# Share of a network's line rate that carries data.
USABLE_RATE = 0.9


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

    def wire_bytes(self, rounds: int) -> tuple[float, float]:
        """Count the bytes of one step on the busiest link: of gradients, and of new weights."""
        busiest = []
        for is_gradient in (True, False):
            # A link of one byte per second is busy for as many seconds as it carries bytes.
            links = _Links(replace(self, bytes_per_s=1.0))
            for index, (bundle, _) in enumerate(links.owned):
                uses = rounds * len(bundle.layers) if is_gradient else 1
                links.carry([_Message(0.0, index, is_gradient)] * uses)
            busiest.append(max(links.out_s + links.in_s))
        return busiest[0], busiest[1]


@dataclass(frozen=True)
class _Message:
    """A part of a gradient on its way to its owner, or new weights on their way back."""

    ready_s: float
    bundle: int
    is_gradient: bool


class _Links:
    """The links of all machines: when each one is free again."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.out_s, self.in_s = [0.0] * exchange.num_machines, [0.0] * exchange.num_machines
        owners = assign_owners([bundle.numel for bundle in exchange.bundles], exchange.num_machines)
        # The bundles with their owners, in forward order.
        self.owned = sorted(zip(exchange.bundles, owners, strict=True), key=lambda pair: pair[0].layers)

    def carry(self, messages: Sequence[_Message]) -> list[float]:
        """Carry messages in the order in which they are ready; return when each one has arrived everywhere."""
        exchange, arrivals = self.exchange, [0.0] * len(messages)
        for index in sorted(range(len(messages)), key=lambda index: messages[index].ready_s):
            message = messages[index]
            (bundle, owner), of_owner, of_others = self.owned[message.bundle], self.out_s, self.in_s
            nbytes = bundle.numel * exchange.weight_bytes
            if message.is_gradient:
                of_owner, of_others = of_others, of_owner
                nbytes = bundle.numel * exchange.gradient_bytes
            # The owner's link carries the messages of all other machines.
            for machine in range(exchange.num_machines):
                free_s, copies = (of_owner, exchange.num_machines - 1) if machine == owner else (of_others, 1)
                begin_s = max(free_s[machine], message.ready_s)
                free_s[machine] = begin_s + copies * nbytes / exchange.bytes_per_s
                arrivals[index] = max(arrivals[index], free_s[machine])
        return arrivals


def exchange_step_seconds(
    times: StageTimes,
    round_sizes: Sequence[int],
    num_devices: int,
    exchange: Exchange,
    stale_layers: int = 0,
) -> float:
    """Compute the seconds per step of several machines in the steady state.

    `round_sizes` are the micro-batches of each round of the machine with the largest share, which the others wait
    for. `stale_layers` is the number in `bounded`.
    """
    if times.mode.updates_by_layer:
        return _bounded_step_seconds(times, round_sizes, num_devices, exchange, stale_layers)
    has_flush, links, partition = times.mode.has_flush, _Links(exchange), times.partition
    # Nothing is on its way at a flush, so each step is like the first.
    warm_up, measured = (0, 1) if has_flush else (WARM_UP_STEPS, STEPS_PER_DEVICE * num_devices)
    free, complete, updated_s = [0.0] * num_devices, [0.0], 0.0
    weights = _new_weights(links, 0.0) if has_flush else []
    # The arrivals of the versions that are there or on their way, oldest first.
    older = max(1, times.mode.versions - 1)
    arrived = deque([[0.0] * len(links.owned)] * older, maxlen=older)
    for _ in range(warm_up + measured):
        if has_flush:
            arrived.append(links.carry(weights))
            weights = []
        # With V > 1 versions, step t reads what step t - V has made. The weights of step t - 1 travel beside its gradients.
        ends = run_stages(times, round_sizes, free, _weights_ready(links, partition, arrived[0]))
        arrivals = links.carry([*weights, *_gradients(links, partition, ends)])
        complete.append(max([*ends, *arrivals[len(weights) :]]))
        if weights:
            arrived.append(arrivals[: len(weights)])
        weights = _new_weights(links, max(complete[-1], updated_s))
        updated_s = max((message.ready_s for message in weights), default=0.0)
    return (complete[-1] - complete[-1 - measured]) / measured


def _bounded_step_seconds(
    times: StageTimes, round_sizes: Sequence[int], num_devices: int, exchange: Exchange, stale_layers: int
) -> float:
    """Compute the seconds per step of `bounded`, as if each step's new weights travelled behind all its gradients."""
    links, partition, num_forward = _Links(exchange), times.partition, len(times.partition.forward)
    free, complete, measured = [0.0] * num_devices, [0.0], STEPS_PER_DEVICE * num_devices
    arrived, busy_s = [0.0] * len(links.owned), [0.0] * exchange.num_machines
    for _ in range(WARM_UP_STEPS + measured):
        # The forward of stale layers reads weights that are there since the step before.
        there = [
            0.0 if bundle.layers[0] < stale_layers else arrived_s
            for (bundle, _), arrived_s in zip(links.owned, arrived, strict=True)
        ]
        ready_s = _weights_ready(links, partition, there)[:num_forward]
        ready_s += _weights_ready(links, partition, arrived)[num_forward:]
        ends = run_stages(times, round_sizes, free, ready_s)
        gradients, whole_s = _gradients(links, partition, ends), [0.0] * len(links.owned)
        for message, arrived_s in zip(gradients, links.carry(gradients), strict=True):
            whole_s[message.bundle] = max(whole_s[message.bundle], arrived_s)
        weights = []
        for index, (bundle, owner) in reversed(list(enumerate(links.owned))):
            busy_s[owner] = max(busy_s[owner], whole_s[index]) + bundle.update_s
            weights.append(_Message(busy_s[owner], index, False))
        arrived = links.carry(weights)[::-1]
        complete.append(max(ends))
    return (complete[-1] - complete[-1 - measured]) / measured


def _new_weights(links: _Links, start_s: float) -> list[_Message]:
    """List the new weights that the owners make from `start_s` on, each owner in forward order."""
    busy_until_s, messages = [start_s] * links.exchange.num_machines, []
    for index, (bundle, owner) in enumerate(links.owned):
        busy_until_s[owner] += bundle.update_s
        messages.append(_Message(busy_until_s[owner], index, False))
    return messages


def _gradients(links: _Links, partition: Partition, ends: Sequence[float]) -> list[_Message]:
    """List the parts of all gradients, each ready when its stage ends; `ends` are those of a step's stages."""
    return [
        _Message(ends[first + completing_stage(partition, layer)], index, True)
        for first in range(0, len(ends), partition.num_stages)
        # A stage hands its deepest layer's gradient down first.
        for index, (bundle, _) in reversed(list(enumerate(links.owned)))
        for layer in reversed(bundle.layers)
    ]


def _weights_ready(links: _Links, partition: Partition, arrived: Sequence[float]) -> list[float]:
    """Compute when the weights of each stage have arrived."""
    of_layer = [0.0] * partition.num_layers
    for (bundle, _), arrived_s in zip(links.owned, arrived, strict=True):
        for layer in bundle.layers:
            of_layer[layer] = max(of_layer[layer], arrived_s)
    return [max(of_layer[start:stop]) for start, stop in partition.ranges]


# Several machines before a run: what they exchange in a step, and what of it is exposed. A plan takes it as hidden.


def usable_bytes_per_s(gbit_per_s: float) -> float:
    return USABLE_RATE * gbit_per_s * 1e9 / 8


@dataclass(frozen=True)
class ExchangeReport:
    """The exchange of one step.

    - `gradient_bytes`, `weight_bytes`: what the busiest link carries in one direction.
    - `step_s`: seconds per step with the exchange; if the link's rate is not known, as if it took no time.
    - `exposed_s`: seconds of it that the exchange adds.
    """

    gradient_bytes: float
    weight_bytes: float
    step_s: float
    exposed_s: float


def report_exchange(question: RunQuestion, plan: Plan) -> ExchangeReport:
    """Simulate the exchange of the question's machines beside the steps of a plan."""
    rate = question.machines.bytes_per_s or math.inf
    moved = exchange_of(question, rate).wire_bytes(len(round_sizes(question, plan.rounds)))
    hidden_s, step_s = (machine_step_seconds(question, plan, each) for each in (math.inf, rate))
    # Both are means of the same steps, so equal times may differ by rounding.
    return ExchangeReport(*moved, step_s, step_s - hidden_s if step_s > hidden_s * (1 + 1e-9) else 0.0)


def exchange_of(question: RunQuestion, bytes_per_s: float) -> Exchange:
    counts = question.parameters
    # An owner takes its share of the seconds in which one host updates all.
    per_parameter_s = sum(question.costs().values("optimizer_s")) / max(1, counts.trained)
    return Exchange(
        bundles=tuple(
            ExchangedBundle(bundle.numel, bundle.layers, bundle.numel * per_parameter_s)
            for bundle in counts.bundles
        ),
        num_machines=question.machines.count,
        bytes_per_s=bytes_per_s,
        gradient_bytes=question.gradient_bytes,
        weight_bytes=question.element_bytes,
    )


def round_sizes(question: RunQuestion, rounds: int) -> list[int]:
    """List the micro-batches of each round of the machine with the largest share."""
    share = step_share(question.step_micro_batches, rounds, 0, question.machines.count)
    return [len(part) for part in split_evenly(len(share.micro_batches), len(share.rounds))]


def machine_step_seconds(question: RunQuestion, plan: Plan, bytes_per_s: float) -> float:
    """Compute the seconds per step of the question's machines, each with this plan, over links of this rate."""
    sizes, link = round_sizes(question, plan.rounds), question.keep_rule().link
    sums = LayerSums(question.costs().keeping(plan.kept), question.recompute, link, sum(sizes))
    times = sums.times(plan.partition, question.update, len(sizes), plan.stale_layers)
    exchange = exchange_of(question, bytes_per_s)
    launches_s = sum(sizes) * question.costs().launch_s
    stepped_s = exchange_step_seconds(times, sizes, question.num_devices, exchange, plan.stale_layers)
    return max(stepped_s, launches_s)


def exchange_text(question: RunQuestion, plan: Plan) -> str:
    """Describe what several machines exchange in a step, and how much of it lengthens the step."""
    exchange, rate = report_exchange(question, plan), question.machines.bytes_per_s
    sizes = exchange.gradient_bytes, exchange.weight_bytes
    gradients, weights = (size_text(round(nbytes)) for nbytes in sizes)
    text = f"{gradients} of gradients out and {weights} of weights back per step on the busiest link"
    if rate is None:
        return text
    text += f", {sum(sizes) / rate:.3g} s at {rate * 8 / 1e9:.3g} Gb/s of data"
    if question.device is None:
        return text  # the devices' speed says how much of this is hidden
    tokens_per_s = question.global_batch_size * question.seq_len / exchange.step_s
    return (
        f"{text}, {exchange.exposed_s:.3g} s of it not hidden by compute; step {exchange.step_s:.4g} s, about "
        f"{tokens_per_s:,.0f} tokens/s of all machines"
    )
