"""Finds races in a recorded run: two conflicting accesses that no event, stream or hand-over orders.

Each actor carries a vector clock. A signal stores the actor's clock under its token, a wait joins it, and two
accesses are ordered when the later actor had heard of the earlier one. This judges what was synchronised, not
what happened to run first, so one run on the CPU speaks for every timing on CUDA.
"""

import itertools
import threading
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from torch import Tensor

from torchround.engine.device import Device, DeviceWatcher, Event, Stream


class Action(Enum):
    """What an actor did. A signal and a wait with the same token order the two actors."""

    SIGNAL = "signal"
    WAIT = "wait"
    ACCESS = "access"


@dataclass(frozen=True)
class Region:
    """Bytes `[start, stop)` of one allocation."""

    allocation: int
    start: int
    stop: int

    @staticmethod
    def of(tensor: Tensor) -> "Region":
        storage = tensor.untyped_storage()
        start = tensor.data_ptr() - storage.data_ptr()
        return Region(storage.data_ptr(), start, start + tensor.numel() * tensor.element_size())


@dataclass(frozen=True)
class Entry:
    """One action of one actor; `token` for signals and waits, regions for accesses."""

    actor: str
    action: Action
    token: object = None
    reads: tuple[Region, ...] = ()
    writes: tuple[Region, ...] = ()


class AccessLog(DeviceWatcher):
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
        self.entries.append(Entry(actor, Action.SIGNAL, token))

    def wait(self, actor: str, token: object) -> None:
        self.entries.append(Entry(actor, Action.WAIT, token))

    def access(self, actor: str, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        regions = [tuple(Region.of(tensor) for tensor in group) for group in (reads, writes)]
        self.entries.append(Entry(actor, Action.ACCESS, None, *regions))

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Iterable[Tensor],
        writes: Iterable[Tensor],
        copied_bytes: int,
    ) -> None:
        self.access(self._enqueue(device, stream), reads, writes)

    def recorded(self, device: Device, stream: Stream, event: Event) -> Event:
        found = _RecordedEvent(event, self)
        self.signal(self._enqueue(device, stream), found.token)
        return found

    def waits(self, device: Device, stream: Stream, event: Event) -> Event:
        actor = self._enqueue(device, stream)
        if not isinstance(event, _RecordedEvent):
            return event
        self.wait(actor, event.token)
        return event.inner

    def _enqueue(self, device: Device, stream: Stream) -> str:
        """Return the stream's actor, ordered after everything its host thread did so far."""
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
        return self.inner.query()  # orders nothing: whoever goes on from here synchronizes


def _this_thread() -> str:
    return threading.current_thread().name


Clock = dict[str, int]


@dataclass(frozen=True)
class Access:
    """One actor's access to a region. `moment` is the actor's own time, `index` the place in the log."""

    actor: str
    moment: int
    index: int
    region: Region
    writes: bool

    def __str__(self) -> str:
        verb = "writes" if self.writes else "reads"
        return f"[{self.index}] {self.actor} {verb} bytes {self.region.start}..{self.region.stop}"


@dataclass(frozen=True)
class Race:
    """Two accesses to overlapping bytes, at least one a write, that nothing orders."""

    earlier: Access
    later: Access

    def __str__(self) -> str:
        return f"{self.earlier} | {self.later}"


def find_races(entries: Iterable[Entry]) -> list[Race]:
    """All races of a log, in log order."""
    clocks: dict[str, Clock] = defaultdict(dict)
    signals: dict[object, Clock] = {}
    history: dict[int, list[Access]] = defaultdict(list)
    races = []
    for index, entry in enumerate(entries):
        clock = clocks[entry.actor]
        clock[entry.actor] = clock.get(entry.actor, 0) + 1
        if entry.action is Action.SIGNAL:
            signals[entry.token] = dict(clock)
        elif entry.action is Action.WAIT:
            _join(clock, signals[entry.token])
        for regions, writes in ((entry.reads, False), (entry.writes, True)):
            for region in regions:
                access = Access(entry.actor, clock[entry.actor], index, region, writes)
                races += _check(history[region.allocation], access, clock)
    return races


def _check(history: list[Access], access: Access, clock: Clock) -> list[Race]:
    """Races of `access` with what came before, which it then joins."""
    races, kept = [], []
    for earlier in history:
        ordered = earlier.moment <= clock.get(earlier.actor, 0)
        if _overlap(earlier, access) and not ordered and (earlier.writes or access.writes):
            races.append(Race(earlier, access))
        if not (ordered and _supersedes(access, earlier)):
            kept.append(earlier)
    history[:] = [*kept, access]
    return races


def _join(clock: Clock, heard: Clock) -> None:
    for actor, moment in heard.items():
        clock[actor] = max(clock.get(actor, 0), moment)


def _overlap(one: Access, other: Access) -> bool:
    return one.region.start < other.region.stop and other.region.start < one.region.stop


def _supersedes(later: Access, earlier: Access) -> bool:
    """Whether whoever is ordered after `later` is also ordered after `earlier`, and conflicts with both."""
    covers = later.region.start <= earlier.region.start and earlier.region.stop <= later.region.stop
    return covers and (later.writes or not earlier.writes)
