"""Devices that share a link to the host: how to find them from measured rates, and when each may use the link.

GPUs below one PCIe switch disturb each other's copies (PipeOffload appendix D). If two of them together move
clearly less than one after the other, they take turns. If they only share the link fairly, turns would gain
nothing.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean

# Two devices share a link if each keeps less than this share of its solo rate while the other copies too.
KEPT_WHEN_SHARED = 0.85
# Devices take turns if turns move at least this many times what they move together. Waiting for a turn costs
# up to 5 % of a step at equal rates; from about this gain on, turns make up for it
# (benchmarks/shared_link.py).
TURNS_AT_LEAST = 1.15

Pair = tuple[int, int]


@dataclass(frozen=True)
class LinkRates:
    """Measured bytes per second from the host: each device `alone`, and both devices of a pair `(a, b)`, a < b, `together`.

    A pair that was not measured counts as sharing nothing.
    """

    alone: Sequence[float]
    together: Mapping[Pair, tuple[float, float]]

    def kept(self, pair: Pair) -> tuple[float, float]:
        """Compute the fraction of its solo rate that each device keeps when both copy at once."""
        (first, second), (one, other) = pair, self.together[pair]
        return one / self.alone[first], other / self.alone[second]

    def shares(self, pair: Pair) -> bool:
        """Return whether both devices lose clearly when both copy at once."""
        return pair in self.together and max(self.kept(pair)) < KEPT_WHEN_SHARED

    def turns_gain(self, pair: Pair) -> float:
        """Compute the bytes moved in turns per byte moved together in the same time."""
        in_turns = 2 / sum(1 / self.alone[device] for device in pair)
        return in_turns / sum(self.together[pair])


@dataclass(frozen=True)
class LinkUse:
    """The groups of devices that take turns, and a line that says why. Both are empty if nothing was measured."""

    turns: tuple[tuple[int, ...], ...] = ()
    text: str = ""


def find_shared_links(rates: LinkRates) -> list[tuple[int, ...]]:
    """Find the groups of devices that share a link, in the order of their first devices.

    A device belongs to a link only if it shares with all of the link's devices. So one disturbed measurement
    may separate two devices, but cannot join two links.
    """
    groups: list[tuple[int, ...]] = []
    for device in range(len(rates.alone)):
        for index, group in enumerate(groups):
            if all(rates.shares((other, device)) for other in group):
                groups[index] = (*group, device)
                break
        else:
            groups.append((device,))
    return [group for group in groups if len(group) > 1]


def use_of_links(rates: LinkRates) -> LinkUse:
    """Decide from the measured rates which devices take turns."""
    turns, found = [], []
    for devices in find_shared_links(rates):
        shared = list(combinations(devices, 2))
        kept = fmean(fmean(rates.kept(pair)) for pair in shared)
        verdict = "take no turns, which would gain nothing"
        if fmean(map(rates.turns_gain, shared)) >= TURNS_AT_LEAST:
            turns.append(devices)
            verdict = "take turns"
        named = " + ".join(map(str, devices))
        found.append(f"{named} share one (each keeps {kept:.0%} of its rate beside another) and {verdict}")
    pairs = len(rates.alone) * (len(rates.alone) - 1) // 2
    left_out = pairs - len(rates.together)
    skipped = f"; {left_out} of {pairs} pairs not measured for lack of time" if left_out else ""
    slowest, fastest = min(rates.alone) / 1e9, max(rates.alone) / 1e9
    links = "; ".join(found) or "no two devices share one"
    text = f"links    {slowest:.1f} to {fastest:.1f} GB/s to a device alone; {links}{skipped}"
    return LinkUse(tuple(turns), text)


class LinkWindows:
    """The order of all stage slots' transfer windows on a shared link, in time units of one window.

    All windows count as equally long, so devices can agree on turns without asking each other. Window `p` of
    a slot comes at time `start + p`. A slot starts one window after the previous slot, whose outputs it
    reads, and not before its device has finished its own last slot.
    """

    def __init__(self, num_devices: int) -> None:
        self._ends: deque[int] = deque([0] * num_devices, num_devices)
        self._start = -1

    def next(self, num_windows: int) -> int:
        """Return the time, in windows, at which the next slot of the dispatch sequence starts."""
        self._start = max(self._start + 1, self._ends[0])
        self._ends.append(self._start + num_windows)
        return self._start
