"""Finds races in a recorded run: two conflicting accesses that no event, stream or hand-over orders.

Each actor carries a vector clock. A signal stores the actor's clock under its token, a wait joins it, and two
accesses are ordered when the later actor had heard of the earlier one. This judges what was synchronised, not
what happened to run first, so one run on the CPU speaks for every timing on CUDA.
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from torchround.engine.recording import Action, Entry, Region

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
