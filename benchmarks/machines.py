"""What the exchange between machines adds to a step: real engines and real gloo, timed layers, a throttled network."""

import argparse
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed import TCPStore

from benchmarks.frame import Benchmark, Option, Report, in_turns, median_ratio
from benchmarks.timed_layers import empty_micro_batches, steady_step_s, timed_model
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice
from torchround.engine.engine import Engine
from torchround.engine.exchange import share_weights
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import Ownership
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
from torchround.planning.update_modes import MODES

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
STAGE_BLOCKS = 3.0
MOST_RATIO = 1.05
# The published step is of this mode. In "sync", the last stages of a step end together, and what they exchange is exposed.
CHECKED_UPDATE = "async"


@dataclass(frozen=True)
class Setup:
    """The run that all machines share. Sizes are in parameters, times in seconds, both already scaled."""

    sizes: tuple[int, ...]
    costs: Costs
    plan: Plan
    steps: int
    bytes_per_s: float
    chunk_bytes: int


def measure(options: argparse.Namespace) -> Report:
    """Measure one machine and several, in turns."""
    with ProcessPoolExecutor(max(options.machines), mp_context=get_context("spawn")) as machines:
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
    counts = [1, *options.machines]
    works = {f"{count}": partial(run, setup, count, machines) for count in counts}
    step_s = in_turns(works, options.turns)
    return {
        "simulated_step_s": setup.plan.step_s,
        "step_s": {name: statistics.median(seconds) for name, seconds in step_s.items()},
        "over_one_machine": {
            name: median_ratio(seconds, step_s["1"]) for name, seconds in step_s.items() if name != "1"
        },
    }


def make_setup(options: argparse.Namespace, update: str) -> Setup:
    """Scale the model and plan one machine's step."""
    block = int((ALL_PARAMETERS - 2 * TOKEN_PARAMETERS) / BLOCKS)
    sizes = [TOKEN_PARAMETERS, *[block] * options.blocks, TOKEN_PARAMETERS]
    times = [EMBEDDING_S, *[BLOCK_S] * options.blocks, HEAD_S]
    costs = Costs(
        tuple(
            LayerCost(
                f"layer.{index}",
                options.time_scale * forward_s,
                options.time_scale * backward_s,
                activation_bytes=round(1000 * forward_s / BLOCK_S[0]),
            )
            for index, (forward_s, backward_s) in enumerate(times)
        )
    )
    limits = MemoryLimits(device_bytes=int(1000 * STAGE_BLOCKS))
    micro_batches = MICRO_BATCHES_PER_DEVICE * options.devices
    return Setup(
        sizes=tuple(int(size * options.byte_scale) for size in sizes),
        costs=costs,
        plan=make_plan(costs, options.devices, micro_batches, update, rounds=1, limits=limits),
        steps=options.steps,
        bytes_per_s=options.gbit * 1e9 / 8 * LINE_SHARE * options.byte_scale / options.time_scale,
        # A block is some chunks long, as it is in a real run.
        chunk_bytes=max(int(2 * block * options.byte_scale / 8), 1 << 12) // 8 * 8,
    )


def run(setup: Setup, num_machines: int, machines: ProcessPoolExecutor) -> float:
    """Run each machine in a process of its own; return the seconds of the slowest one's step."""
    store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    calls = [
        machines.submit(run_machine, setup, rank, num_machines, store.port) for rank in range(num_machines)
    ]
    return max(call.result() for call in calls)


def run_machine(setup: Setup, rank: int, num_machines: int, port: int) -> float:
    """Train the timed layers on one machine of a run; return the seconds of a step in the steady state."""
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
        return train(setup, group)


def train(setup: Setup, group: MachineGroup | None) -> float:
    """Train as a run does: alone, or with an exchange beside the step."""
    rank, size = (group.rank, group.size) if group is not None else (0, 1)
    # Weights that no computation uses are exchanged like others.
    model, plan = timed_model(setup.costs, unused_parameters=setup.sizes), setup.plan
    ownership = Ownership(rank, size) if group is not None else None
    store = HostStore(model, torch.bfloat16, mode=MODES[plan.update], ownership=ownership)
    store.initialize(model, seed=0)
    if group is not None:
        share_weights(store, group)
    share = step_share(plan.num_micro_batches * size, plan.rounds, rank, size)
    micro_batches = empty_micro_batches(plan.num_micro_batches)
    num_labels = size * sum(micro_batch.num_labels() for micro_batch in micro_batches)
    devices = [CpuDevice(index) for index in range(plan.num_devices)]
    settings = EngineSettings(rounds=plan.rounds)
    parts = model, store, devices, plan.partition
    with Engine(*parts, optimizer=AdamWTable(), settings=settings, machines=group) as engine:
        step_s, _ = steady_step_s(
            engine, lambda: engine.forward_backward(micro_batches, share, num_labels), setup.steps
        )
        engine.drain()
    return step_s


# The network.


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
        work = self.group.recv(tensors, peer, tag)
        return ThrottledArrival(work, tensors[0].nbytes, self.incoming, time.monotonic())


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


def missed_bounds(figures: Report) -> list[str]:
    """List each number of machines whose exchange is not hidden in the mode of the published step."""
    checked = figures["updates"].get(CHECKED_UPDATE)
    return [
        f"{CHECKED_UPDATE}: a step on {name} machines takes {ratio:.3f} times that of one"
        for name, ratio in (checked["over_one_machine"] if checked else {}).items()
        if ratio > MOST_RATIO
    ]


def headline(figures: Report) -> tuple[str, str]:
    """Name the steps of several machines."""
    cells = "; ".join(
        f"{update} " + ", ".join(f"{ratio:.3f} ({name})" for name, ratio in found["over_one_machine"].items())
        for update, found in figures["updates"].items()
    )
    return (
        f"steps of several machines over {figures['gbit_per_s']:g} GbE, in steps of one: {cells}",
        f"bound of {CHECKED_UPDATE}: {MOST_RATIO}",
    )


MACHINES = Benchmark(
    """What the exchange between machines adds to a step: real engines and real gloo, timed layers, a throttled network.

Layers take the published times of Llama-3.1-8B on RTX 4090s, with as many micro-batches for each device as the published
step of 21.6 s has, and have its sizes. Both are scaled down. Each machine is a process whose senders share a card of the
network's rate, and so do its receivers. --check asks that an `async` step on several machines takes at most 1.05 times
that of one.""",
    {
        "--machines": Option([2, 4], "numbers of machines"),
        "--gbit": Option(25.0, "the network's line rate in Gb/s, each way"),
        "--updates": Option(["async", "sync"], "age of the weights", ["async", "sync"]),
        "--devices": Option(2, "virtual devices of each machine"),
        "--blocks": Option(BLOCKS, "blocks of the model"),
        "--time-scale": Option(0.25, "factor on all times of the model"),
        "--byte-scale": Option(1 / 1024, "factor on all sizes of the model"),
        "--steps": Option(4, "measured steps of each run"),
        "--turns": Option(3, "runs of each, of which the median counts"),
    },
    measure,
    headline,
    "--machines 2 --updates sync --blocks 4 --time-scale 0.02 --byte-scale 1e-5 --steps 1 --turns 1",
    missed_bounds,
)
