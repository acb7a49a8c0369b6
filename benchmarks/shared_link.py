"""What turns on a shared link do to a step: recorded runs of the engine, replayed on devices with a link."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from benchmarks.frame import Benchmark, Report
from benchmarks.timed_layers import costs_of, empty_micro_batches, timed_model
from torchround.config import AdamWTable
from torchround.engine.device import CpuDevice, Stream
from torchround.engine.engine import Engine
from torchround.engine.settings import EngineSettings
from torchround.engine.store.bundles import ALIGNMENT_ELEMENTS, POLICIES
from torchround.engine.store.host_store import HostStore
from torchround.engine.watch.race_checker import AccessLog, Entry
from torchround.pipeline.partition import Partition

# Time of a layer while recording, so that threads run ahead of each other as little as on devices.
SLEEP_S = 0.0005
PARTITION = Partition((2,) * 7, 3, (2,) * 7)
# Two layers in fp32; a layer's 8 weights are padded to the alignment of parameters.
STAGE_BYTES = 2 * ALIGNMENT_ELEMENTS * 4


class Replay:
    """Times for a recording. `link_of` maps each weight upload stream, by actor, to its link.

    `rate` is the number of bytes that a link moves in the time of one operation; `carries` is the factor on it when
    several devices copy at once.
    """

    def __init__(
        self, entries: Sequence[Entry], link_of: dict[str, int], rate: float, carries: float
    ) -> None:
        self._queues: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._queues[entry.actor].append(entry)
        self._next = dict.fromkeys(self._queues, 0)
        self._link_of, self._rate, self._carries = link_of, rate, carries
        self._signalled: set[object] = set()
        self._blocked: dict[object, set[str]] = defaultdict(set)
        self._computing: dict[str, float] = {}  # actor -> when it is done
        self._uploading: dict[str, float] = {}  # actor -> bytes left
        self._now = 0.0

    def duration(self) -> float:
        """Return the time of the whole recording, in operations."""
        ready = set(self._queues)
        while ready or self._computing or self._uploading:
            while ready:
                ready |= self._advance(ready.pop())
            ready = self._pass_time() if self._computing or self._uploading else set()
        stuck = [actor for actor, queue in self._queues.items() if self._next[actor] < len(queue)]
        assert not stuck, f"the recording waits for signals that it never gives: {stuck}"
        return self._now

    def _advance(self, actor: str) -> set[str]:
        """Advance until an entry takes time or waits for a signal. Return the actors whose signal was given here."""
        woken: set[str] = set()
        for entry in self._queues[actor][self._next[actor] :]:
            if entry.action == "wait" and entry.token not in self._signalled:
                self._blocked[entry.token].add(actor)
                break
            self._next[actor] += 1
            if entry.action == "signal":
                self._signalled.add(entry.token)
                woken |= self._blocked.pop(entry.token, set())
            elif entry.action == "access" and actor in self._link_of:
                self._uploading[actor] = sum(region.stop - region.start for region in entry.reads)
                break
            elif entry.action == "access" and actor.endswith(Stream.COMPUTE.value) and entry.reads:
                self._computing[actor] = self._now + _operations(entry)
                break
        return woken

    def _pass_time(self) -> set[str]:
        """Move to the next end of a computation or an upload, and return its actors."""
        rates = {actor: self._rate_of(actor) for actor in self._uploading}
        ends = self._computing | {
            actor: self._now + left / rates[actor] for actor, left in self._uploading.items()
        }
        then = min(ends.values())
        self._uploading = {
            actor: left - (then - self._now) * rates[actor] for actor, left in self._uploading.items()
        }
        self._now = then
        ended = {actor for actor, end in ends.items() if end <= then + 1e-9}
        for actor in ended:
            self._computing.pop(actor, None)
            self._uploading.pop(actor, None)
        return ended

    def _rate_of(self, actor: str) -> float:
        beside = sum(self._link_of[other] == self._link_of[actor] for other in self._uploading)
        return self._rate * (self._carries / beside if beside > 1 else 1.0)


def _operations(entry: Entry) -> float:
    """Return the time of a computation: one operation, and half of one for one of the two layers of a stage's backward."""
    written = sum(region.stop - region.start for region in entry.writes)
    return min(written / STAGE_BYTES, 1.0) if written else 1.0


def record(options: argparse.Namespace, update: str, turns: Sequence[Sequence[int]]) -> list[Entry]:
    """Record a run of `options.steps` steps."""
    log = AccessLog()
    model = timed_model(costs_of([(SLEEP_S, SLEEP_S)] * PARTITION.num_layers))
    store = HostStore(model, policy=POLICIES[update])
    store.initialize(model, seed=0)
    devices = [CpuDevice(index) for index in range(options.devices)]
    for device in devices:
        device.watchers.append(log)
    settings = EngineSettings(turns=turns)
    with Engine(
        model, store, devices, PARTITION, optimizer=AdamWTable(), settings=settings, observer=log
    ) as engine:
        for _ in range(options.steps):
            engine.forward_backward(empty_micro_batches(options.microbatches))
            engine.step(0.0)
        engine.drain()
    return log.entries


def compare(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Compare step times, in operations, by update, link and length of uploads."""
    numbers = range(options.devices)
    links = [
        tuple(numbers[start : start + options.per_link])
        for start in range(0, options.devices, options.per_link)
    ]
    link_of = {
        f"cpu:{device} {Stream.WEIGHT_UPLOAD.value}": link
        for link, group in enumerate(links)
        for device in group
    }
    for update in options.updates:
        recorded = {
            name: [record(options, update, turns) for _ in range(options.runs)]
            for name, turns in (("together", ()), ("in_turns", links))
        }
        for carries, share in product(options.carries, options.uploads):
            rate = STAGE_BYTES / (share * options.microbatches)
            figures: dict[str, Any] = {"update": update, "carries": carries, "upload": share}
            for name, runs in recorded.items():
                steps = [Replay(run, link_of, rate, carries).duration() / options.steps for run in runs]
                figures[name] = [round(min(steps), 2), round(max(steps), 2)]
            yield figures


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the shape of the runs and of the links."""
    parser.add_argument("--devices", type=int, default=4, help="virtual devices")
    parser.add_argument("--per-link", type=int, default=2, help="devices that share a link")
    parser.add_argument("--microbatches", type=int, default=8, help="micro-batches per step")
    parser.add_argument("--steps", type=int, default=5, help="steps of a recorded run")
    parser.add_argument(
        "--runs", type=int, default=3, help="recordings of each kind, of which the range is given"
    )
    parser.add_argument("--updates", nargs="+", choices=["sync", "async"], default=["sync", "async"])
    parser.add_argument(
        "--carries",
        type=float,
        nargs="+",
        default=[1.0, 0.85, 0.7],
        help="what a link carries for several devices at once, over what it carries for one",
    )
    parser.add_argument(
        "--uploads",
        type=float,
        nargs="+",
        default=[0.25, 0.5, 0.75, 1.0],
        help="time that a stage's weights take alone, over the time of its forward",
    )


def headline(figures: Report) -> tuple[str, str]:
    """Name what turns change at each `carries`, by the middle of each range."""
    changes: dict[float, list[float]] = defaultdict(list)
    for row in figures["rows"]:
        changes[row["carries"]].append(100 * (sum(row["in_turns"]) / sum(row["together"]) - 1))
    found = "; ".join(
        f"carries {carries:g}: {min(each):+.0f} to {max(each):+.0f} %" for carries, each in changes.items()
    )
    return f"turns change a step by: {found}", "the same runs without turns"


SHARED_LINK = Benchmark(
    """What turns on a shared link do to a step: recorded runs of the engine, replayed on devices with a link.

Each run is recorded on virtual devices, with turns and without: every copy, launch, event and hand-over. The replay
keeps that order and gives it times: an operation on a compute stream takes 1, uploads of weights share their link
equally, everything else takes none. A link that carries 1 is fair; on one that carries less, copies disturb each
other. The replay reads no clock, but recordings differ in how far threads were ahead, so a range is given.""",
    add_options,
    lambda options: {"rows": list(compare(options))},
    headline,
    "--devices 2 --microbatches 4 --steps 2 --runs 1 --updates sync --carries 0.3 --uploads 1.5",
)
