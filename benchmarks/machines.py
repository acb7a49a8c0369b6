"""What the exchange between machines adds to a step: real engines and real gloo, timed layers, a throttled network."""

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.frame import Benchmark, Report, in_turns, median_ratio
from benchmarks.timed_layers import costs_of, empty_micro_batches, timed_model
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.exchange import share_weights
from torchround.engine.results import StepResult
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import POLICIES, Ownership
from torchround.engine.store.host_store import HostStore
from torchround.machines import group as machines_group
from torchround.machines import links
from torchround.machines.group import Machine, MachineGroup
from torchround.machines.links import Link, Purpose
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.machine_shares import step_share
from torchround.planning.memory import MemoryLimits
from torchround.planning.plan import Plan
from torchround.planning.planner import make_plan

# Published layer times of Llama-3.1-8B on an RTX 4090, micro-batches of 4 x 2048 tokens: forward and backward seconds.
# The embedding is not among them and takes none here.
EMBEDDING_S, BLOCK_S, HEAD_S = (0.0, 0.0), (0.0185037, 0.0412066), (0.0372255, 0.074501)
BLOCKS = 32
TOKEN_PARAMETERS = 128256 * 4096  # of the embedding, and of the head
ALL_PARAMETERS = 8.03e9
# Eight such micro-batches on each device make the published step of 21.6 s, on 8 devices or on fewer.
MICRO_BATCHES_PER_DEVICE = 8
LINE_SHARE = 0.9  # of the line rate that TCP carries
LOOPBACK = "127.0.0.1"
WARM_UP_STEPS = 2
STAGE_BLOCKS = 3.0
MOST_RATIO = 1.05
# The published step is of this mode. In "sync", the last stages of a step end together, and what they exchange is exposed.
CHECKED_UPDATE = "async"
AT_END = "exchange at the end"


@dataclass(frozen=True)
class Setup:
    """What all machines of all runs share. Sizes are in parameters, times in seconds, both already scaled."""

    sizes: tuple[int, ...]
    seconds: tuple[tuple[float, float], ...]
    plan: Plan
    steps: int
    bytes_per_s: float
    chunk_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of all gradients or all weights in bf16."""
        return 2 * sum(self.sizes)


@dataclass(frozen=True)
class MachineRun:
    """What one machine measured: seconds of a step in the steady state, and the bytes that it sent in a step."""

    step_s: float
    sent_bytes: float


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the network, the machines, and by what time and bytes are scaled."""
    parser.add_argument("--machines", type=int, nargs="+", default=[2, 4], help="numbers of machines")
    parser.add_argument("--gbit", type=float, default=25.0, help="the network's line rate in Gb/s, each way")
    parser.add_argument("--updates", nargs="+", choices=["sync", "async"], default=["async", "sync"])
    parser.add_argument("--devices", type=int, default=2, help="virtual devices of each machine")
    parser.add_argument("--blocks", type=int, default=BLOCKS)
    parser.add_argument("--time-scale", type=float, default=0.25, help="factor on all times of the model")
    parser.add_argument("--byte-scale", type=float, default=1 / 1024, help="factor on all sizes of the model")
    parser.add_argument("--steps", type=int, default=4, help="measured steps of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each, of which the median counts")


def measure(options: argparse.Namespace) -> Report:
    """Measure one machine, several, and several that exchange at the end of the step, in turns."""
    most = max(options.machines)
    with ProcessPoolExecutor(most, mp_context=get_context("spawn")) as machines:
        return {
            "gbit_per_s": options.gbit,
            "time_scale": options.time_scale,
            "byte_scale": options.byte_scale,
            "micro_batches_per_machine": MICRO_BATCHES_PER_DEVICE * options.devices,
            "updates": {update: compare(options, update, machines) for update in options.updates},
        }


def compare(options: argparse.Namespace, update: str, machines: ProcessPoolExecutor) -> dict[str, Any]:
    """Measure the runs of one update mode, and give each as a multiple of one machine's step."""
    setup = make_setup(options, update)
    kinds = {"1": (1, False)}
    for count in options.machines:
        kinds[f"{count}"] = (count, False)
        kinds[f"{count}, {AT_END}"] = (count, True)
    works: dict[str, Callable[[], MachineRun]] = {
        name: lambda kind=kind: run(setup, *kind, machines)  # type: ignore[misc]
        for name, kind in kinds.items()
    }
    runs = in_turns(works, options.turns)
    step_s = {name: [found.step_s for found in of_kind] for name, of_kind in runs.items()}
    return {
        "simulated_step_s": setup.plan.step_s,
        "step_s": {name: statistics.median(seconds) for name, seconds in step_s.items()},
        "over_one_machine": {
            name: median_ratio(seconds, step_s["1"]) for name, seconds in step_s.items() if name != "1"
        },
        "exchange_s": {name: found[0].sent_bytes / setup.bytes_per_s for name, found in runs.items()},
    }


def make_setup(options: argparse.Namespace, update: str) -> Setup:
    """Scale the model and plan one machine's step."""
    block = int((ALL_PARAMETERS - 2 * TOKEN_PARAMETERS) / BLOCKS)
    sizes = [TOKEN_PARAMETERS, *[block] * options.blocks, TOKEN_PARAMETERS]
    times = [EMBEDDING_S, *[BLOCK_S] * options.blocks, HEAD_S]
    seconds = tuple(
        (options.time_scale * forward, options.time_scale * backward) for forward, backward in times
    )
    costs = Costs(
        tuple(
            LayerCost(f"layer.{index}", *pair, activation_bytes=round(1000 * pair[0] / seconds[1][0]))
            for index, pair in enumerate(seconds)
        )
    )
    limits = MemoryLimits(device_bytes=int(1000 * STAGE_BLOCKS))
    micro_batches = MICRO_BATCHES_PER_DEVICE * options.devices
    return Setup(
        sizes=tuple(int(size * options.byte_scale) for size in sizes),
        seconds=seconds,
        plan=make_plan(costs, options.devices, micro_batches, update, rounds=1, limits=limits),
        steps=options.steps,
        bytes_per_s=options.gbit * 1e9 / 8 * LINE_SHARE * options.byte_scale / options.time_scale,
        # A block is some chunks long, as it is in a real run.
        chunk_bytes=max(int(2 * block * options.byte_scale / 8), 1 << 12) // 8 * 8,
    )


def run(setup: Setup, num_machines: int, at_end: bool, machines: ProcessPoolExecutor) -> MachineRun:
    """Run each machine in a process of its own; the slowest one's step counts."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    calls = [
        machines.submit(run_machine, setup, rank, num_machines, at_end, store.port)
        for rank in range(num_machines)
    ]
    found = [call.result() for call in calls]
    return MachineRun(max(one.step_s for one in found), max(one.sent_bytes for one in found))


def run_machine(setup: Setup, rank: int, num_machines: int, at_end: bool, port: int) -> MachineRun:
    """Train the timed layers on one machine of a run."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        stack.enter_context(patch.object(links, "CHUNK_BYTES", setup.chunk_bytes))
        if num_machines == 1:
            return train(setup, None)
        store = TCPStore(LOOPBACK, port, is_master=False)
        outgoing, incoming = Card(setup.bytes_per_s), Card(setup.bytes_per_s)

        def throttled_link(peer: int, purpose: Purpose, groups: Sequence[Any], *rest: Any) -> Link:
            throttled: list[Any] = [ThrottledGroup(group, outgoing, incoming) for group in groups]
            return Link(peer, purpose, throttled, *rest)

        stack.enter_context(patch.object(machines_group, "Link", throttled_link))
        members = [Machine(number, f"process {number}") for number in range(num_machines)]
        group = MachineGroup(store, rank, members, address=LOOPBACK)
        stack.callback(group.close)
        return train_and_exchange(setup, group) if at_end else train(setup, group)


class Card:
    """A network card of a given rate: each chunk occupies it for its bytes over the rate."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s, self._free_at_s = bytes_per_s, 0.0
        self._lock = threading.Lock()

    def carry(self, nbytes: int, wanted_since_s: float | None = None) -> None:
        """Sleep until the card has carried these bytes.

        A receiver gives the time at which it was ready for them: they may have been carried since then, in the time just
        before they arrived.
        """
        now_s, seconds = time.monotonic(), nbytes / self._bytes_per_s
        earliest_s = now_s if wanted_since_s is None else max(wanted_since_s, now_s - seconds)
        with self._lock:
            self._free_at_s = max(self._free_at_s, earliest_s) + seconds
            until_s = self._free_at_s
        time.sleep(max(0.0, until_s - now_s))


@dataclass(frozen=True)
class ThrottledGroup:
    """A gloo group whose messages pass through the cards of this machine."""

    group: Any
    outgoing: Card
    incoming: Card

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        """Send once the card has carried the bytes."""
        self.outgoing.carry(tensors[0].nbytes)
        return self.group.send(tensors, peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> "ThrottledArrival":
        """Expect a message."""
        return ThrottledArrival(
            self.group.recv(tensors, peer, tag), tensors[0].nbytes, self.incoming, time.monotonic()
        )


@dataclass(frozen=True)
class ThrottledArrival:
    """A message under way, which has arrived once the card has carried it."""

    work: Any
    nbytes: int
    card: Card
    wanted_since_s: float

    def wait(self, *timeout: Any) -> None:
        """Wait for the message."""
        self.work.wait(*timeout)
        self.card.carry(self.nbytes, self.wanted_since_s)


def open_engine(setup: Setup, group: MachineGroup | None) -> Engine:
    """Fill a store in bf16 and start an engine over the timed layers."""
    # Weights that no computation uses are exchanged like others.
    model, plan = timed_model(costs_of(setup.seconds), unused_parameters=setup.sizes), setup.plan
    ownership = Ownership(group.rank, group.size) if group is not None else None
    store = HostStore(model, torch.bfloat16, policy=POLICIES[plan.update], ownership=ownership)
    store.initialize(model, seed=0)
    if group is not None:
        share_weights(store, group)
    devices = [CpuDevice(index) for index in range(plan.num_devices)]
    settings = EngineSettings(rounds=plan.rounds)
    return Engine(
        model, store, devices, plan.partition, optimizer=AdamWTable(), settings=settings, machines=group
    )


def train(setup: Setup, group: MachineGroup | None) -> MachineRun:
    """Train as a run does: alone, or with an exchange beside the step. A step is dispatched before the last one ends."""
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    own = setup.plan.num_micro_batches
    share = step_share(own * size, setup.plan.rounds, rank, size)
    micro_batches = empty_micro_batches(own)
    num_labels = size * sum(micro_batch.num_labels() for micro_batch in micro_batches)
    results: list[StepResult] = []
    ends_s: list[float] = []
    with open_engine(setup, group) as engine:
        sent_bytes = bytes_sent(group)
        for _ in range(WARM_UP_STEPS + setup.steps + 1):
            results.append(engine.forward_backward(micro_batches, share, num_labels))
            engine.step(lr=1e-3)
            if len(results) > 1:
                results[-2].collect()
                ends_s.append(time.perf_counter())
        engine.drain()
        sent_bytes = bytes_sent(group) - sent_bytes
    step_s = (ends_s[-1] - ends_s[WARM_UP_STEPS - 1]) / setup.steps
    return MachineRun(step_s, sent_bytes / len(results))


def train_and_exchange(setup: Setup, group: MachineGroup) -> MachineRun:
    """Train alone, and send as many bytes as the exchange has: gradients after the backward, weights after the update."""
    micro_batches = empty_micro_batches(setup.plan.num_micro_batches)
    sent_bytes = bytes_sent(group)
    ends_s: list[float] = []
    with open_engine(setup, None) as engine:
        for _ in range(WARM_UP_STEPS + setup.steps):
            result = engine.forward_backward(micro_batches)
            result.wait()
            exchange(group, setup.total_bytes // group.size)
            engine.step(lr=1e-3)
            engine.drain()
            exchange(group, setup.total_bytes // group.size)
            ends_s.append(time.perf_counter())
    sent_bytes = (bytes_sent(group) - sent_bytes) / len(ends_s)
    return MachineRun((ends_s[-1] - ends_s[WARM_UP_STEPS - 1]) / setup.steps, sent_bytes)


def exchange(group: MachineGroup, num_bytes: int) -> None:
    """Send this many bytes to each peer and receive as many from each, all at once."""
    data = torch.zeros(num_bytes, dtype=torch.uint8)
    what = "an exchange at the end"
    group.with_each_peer(
        lambda peer: group.link(peer, Purpose.TRIAL).send(data, what),
        lambda peer: group.link(peer, Purpose.TRIAL).receive(torch.empty_like(data), what),
    )


def bytes_sent(group: MachineGroup | None) -> int:
    """Return the bytes that this machine has sent so far."""
    if group is None:
        return 0
    return sum(group.link(peer, purpose).bytes_sent for peer in group.peers for purpose in Purpose)


def missed_bounds(figures: Report) -> list[str]:
    """List each number of machines whose exchange is not hidden in the mode of the published step."""
    return [
        f"{update}: a step on {name} machines takes {ratio:.3f} times that of one"
        for update, of_update in figures["updates"].items()
        for name, ratio in of_update["over_one_machine"].items()
        if update == CHECKED_UPDATE and AT_END not in name and ratio > MOST_RATIO
    ]


def headline(figures: Report) -> tuple[str, str]:
    """Name the steps of several machines, and those with the exchange at the end."""

    def cells(at_end: bool) -> str:
        return "; ".join(
            f"{update} "
            + ", ".join(
                f"{ratio:.3f} ({name.split(',')[0]})"
                for name, ratio in of_update["over_one_machine"].items()
                if (AT_END in name) is at_end
            )
            for update, of_update in figures["updates"].items()
        )

    return (
        f"steps of several machines over {figures['gbit_per_s']:g} GbE, in steps of one: {cells(False)}",
        f"the same bytes at the end of the step: {cells(True)}",
    )


MACHINES = Benchmark(
    """What the exchange between machines adds to a step: real engines and real gloo, timed layers, a throttled network.

Layers take the published times of Llama-3.1-8B on RTX 4090s, with as many micro-batches for each device as the published
step of 21.6 s has, and have its sizes. Both are scaled down. Each machine is a process whose senders share a card of the
network's rate, and so do its receivers. Beside it, the same engines compute alone, send as many bytes once the backward
has ended, update, and send as many again before the next step, as data parallel training without overlap does. --check
asks that an `async` step on several machines takes at most 1.05 times that of one.""",
    add_options,
    measure,
    headline,
    "--machines 2 --updates sync --blocks 4 --time-scale 0.02 --byte-scale 1e-5 --steps 1 --turns 1",
    missed_bounds,
)
