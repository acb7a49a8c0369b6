"""Finds races in a recorded run: two conflicting accesses that no event, stream or hand-over orders.

An `AccessLog` records copies and launches with the shared buffers they read and write, events, and the host's
hand-overs and accesses. Its actors are threads and streams. Each actor carries a vector clock: a signal
stores the actor's clock under its token, a wait joins it. Two accesses are ordered if the later actor had
heard of the earlier one. The verdict depends on what was synchronised, not on what happened to run first, so
one run on the CPU speaks for every timing on CUDA.
"""

import itertools
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from torch import Tensor

from torchround.engine.board import Observer
from torchround.engine.device import Device, Event, Stream
from torchround.engine.tasks import Task

Clock = dict[str, int]


class Region(NamedTuple):
    """Bytes `[start, stop)` of one allocation."""

    allocation: int
    start: int
    stop: int

    @staticmethod
    def of(tensor: Tensor) -> "Region":
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() - storage.data_ptr()
        return Region(storage.data_ptr(), start, start + tensor.numel() * tensor.element_size())

    def overlaps(self, other: "Region") -> bool:
        return self.start < other.stop and other.start < self.stop

    def covers(self, other: "Region") -> bool:
        return self.start <= other.start and other.stop <= self.stop


class Entry(NamedTuple):
    """One action of one actor. A signal and a wait with the same token order the two actors; regions are accesses."""

    actor: str
    action: Literal["signal", "wait", "access"]
    token: object = None
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class AccessLog(Observer):
    """The log of one engine run: an observer of its host hand-overs and a watcher of its devices, in causal order."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.tokens = itertools.count()

    def posted(self, token: object) -> None:
        self.signal(_this_thread(), token)

    def waited(self, token: object) -> None:
        self.wait(_this_thread(), token)

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        self.access(_this_thread(), reads, writes)

    def signal(self, actor: str, token: object) -> None:
        """Record that everything `actor` did so far comes before every wait for `token`."""
        self.entries.append(Entry(actor, "signal", token))

    def wait(self, actor: str, token: object) -> None:
        """Record that everything `actor` does from now on comes after the signal with `token`."""
        self.entries.append(Entry(actor, "wait", token))

    def access(self, actor: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> Entry:
        entry = Entry(actor, "access", None, tuple(map(Region.of, reads)), tuple(map(Region.of, writes)))
        self.entries.append(entry)
        return entry

    def begins(
        self, device: Device, stream: Stream, reads: Iterable[Tensor], writes: Iterable[Tensor], copied_bytes: int
    ) -> None:
        self.access(self._enqueue(device, stream), reads, writes)

    def recorded(self, device: Device, stream: Stream, event: Event, what: str) -> Event:
        found = _RecordedEvent(event, self)
        self.signal(self._enqueue(device, stream), found.token)
        return found

    def waits(self, device: Device, stream: Stream, event: Event, what: str) -> Event:
        actor = self._enqueue(device, stream)
        if not isinstance(event, _RecordedEvent):
            return event
        self.wait(actor, event.token)
        return event.inner

    def _enqueue(self, device: Device, stream: Stream) -> str:
        """Return the stream's actor, ordered after everything its host thread did so far."""
        # A stream runs nothing before the host has enqueued it, so enqueuing is a
        # signal that the stream waits for.
        actor = f"{device.name} {stream.value}"
        token = ("enqueue", next(self.tokens))
        self.signal(_this_thread(), token)
        self.wait(actor, token)
        return actor


class _RecordedEvent:
    def __init__(self, inner: Event, log: AccessLog) -> None:
        self.inner = inner
        self.token = ("event", next(log.tokens))
        self._log = log

    def synchronize(self) -> None:
        self.inner.synchronize()
        self._log.wait(_this_thread(), self.token)

    def query(self) -> bool:
        # Orders nothing: a thread that continues because of the answer calls `synchronize` as well.
        return self.inner.query()


def _this_thread() -> str:
    return threading.current_thread().name


class Access(NamedTuple):
    """One actor's access to a region. `moment` is the actor's own time, `index` the entry's index in the log."""

    actor: str
    moment: int
    index: int
    region: Region
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"[{self.index}] {self.actor} {verb} bytes {self.region.start}..{self.region.stop}"


def find_races(entries: Iterable[Entry]) -> list[tuple[Access, Access]]:
    """A race is two accesses to overlapping bytes, at least one of them a write, that nothing orders."""
    moments: Counter[str] = Counter()
    heard: dict[str, Clock] = defaultdict(dict)  # of others; signals share it, so it is replaced and never changed
    signals: dict[object, tuple[str, int, Clock]] = {}
    history: dict[int, list[Access]] = defaultdict(list)
    races = []
    for index, entry in enumerate(entries):
        actor = entry.actor
        moments[actor] += 1  # each entry is a new moment of its actor
        if entry.action == "signal":
            signals[entry.token] = actor, moments[actor], heard[actor]
        elif entry.action == "wait":
            other, moment, theirs = signals[entry.token]
            # An actor that has heard of a moment has heard of all that came before it.
            if other != actor and heard[actor].get(other, 0) < moment:
                heard[actor] = _joined(heard[actor], theirs)
                heard[actor][other] = moment
        for regions, writes in ((entry.reads, False), (entry.writes, True)):
            for region in regions:
                access = Access(actor, moments[actor], index, region, writes)
                races += _check(history[region.allocation], access, heard[actor])
    return races


def _joined(clock: Clock, other: Clock) -> Clock:
    less, joined = (clock, dict(other)) if len(clock) < len(other) else (other, dict(clock))
    for actor, moment in less.items():
        if joined.get(actor, 0) < moment:
            joined[actor] = moment
    return joined


def _check(history: list[Access], access: Access, heard: Clock) -> list[tuple[Access, Access]]:
    races, kept = [], []
    actor, _, _, region, writes = access
    for earlier in history:
        ordered = earlier.actor == actor or earlier.moment <= heard.get(earlier.actor, 0)
        if not ordered:
            kept.append(earlier)
            if (earlier.writes or writes) and earlier.region.overlaps(region):
                races.append((earlier, access))
        # An earlier access may be forgotten if each later one that it would race
        # with races with `access` too.
        elif not ((writes or not earlier.writes) and region.covers(earlier.region)):
            kept.append(earlier)
    history[:] = [*kept, access]
    return races


def tasks_apart(entries):
    """A task's declared accesses then alone order it with the tasks before it."""
    tasks = Counter()
    for entry in entries:
        number = tasks[entry.actor]
        actor = f"{entry.actor}, task {number}" if number else entry.actor
        yield Entry(actor, entry.action, entry.token, entry.reads, entry.writes)
        tasks[entry.actor] += (
            entry.action == "signal" and isinstance(entry.token, Task) and entry.token.worker is not None
        )
