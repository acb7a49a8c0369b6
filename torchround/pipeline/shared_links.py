"""Devices that share a link to the host: how to find them from measured rates, and when each may use the link.

GPUs below one PCIe switch disturb each other's copies (PipeOffload appendix D). If two of them together move
clearly less than one after the other, they take turns. If they only share the link fairly, turns would gain
nothing.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

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
        first, second = (
            rate / self.alone[device] for device, rate in zip(pair, self.together[pair], strict=True)
        )
        return first, second

    def turns_gain(self, pair: Pair) -> float:
        """Compute the bytes moved in turns per byte moved together in the same time."""
        in_turns = 2 / sum(1 / self.alone[device] for device in pair)
        return in_turns / sum(self.together[pair])


@dataclass(frozen=True)
class SharedLink:
    """Devices that share a link, with the means over its pairs of the share that each keeps and of the gain of turns."""

    devices: tuple[int, ...]
    kept: float
    turns_gain: float

    @property
    def takes_turns(self) -> bool:
        return self.turns_gain >= TURNS_AT_LEAST

    def __str__(self) -> str:
        verdict = "take turns" if self.takes_turns else "take no turns, which would gain nothing"
        named = " + ".join(map(str, self.devices))
        return f"{named} share one (each keeps {self.kept:.0%} of its rate beside another) and {verdict}"


@dataclass(frozen=True)
class LinkUse:
    """The groups of devices that take turns, and a line that says why. Both are empty if nothing was measured."""

    turns: tuple[tuple[int, ...], ...] = ()
    text: str = ""


def find_shared_links(rates: LinkRates) -> list[SharedLink]:
    """Find the links that several devices share, in the order of their first devices.

    A device belongs to a link only if it shares with all of the link's devices. So one disturbed measurement
    may separate two devices, but cannot join two links.
    """
    groups: list[list[int]] = []
    for device in range(len(rates.alone)):
        for group in groups:
            if all(_share(rates, (other, device)) for other in group):
                group.append(device)
                break
        else:
            groups.append([device])
    return [_link(rates, group) for group in groups if len(group) > 1]


def use_of_links(rates: LinkRates) -> LinkUse:
    """Decide from the measured rates which devices take turns."""
    links = find_shared_links(rates)
    found = "; ".join(str(link) for link in links) or "no two devices share one"
    pairs = len(rates.alone) * (len(rates.alone) - 1) // 2
    left_out = pairs - len(rates.together)
    skipped = f"; {left_out} of {pairs} pairs not measured for lack of time" if left_out else ""
    slowest, fastest = (pick(rates.alone) / 1e9 for pick in (min, max))
    return LinkUse(
        tuple(link.devices for link in links if link.takes_turns),
        f"links    {slowest:.1f} to {fastest:.1f} GB/s to a device alone; {found}{skipped}",
    )


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


def _share(rates: LinkRates, pair: Pair) -> bool:
    return pair in rates.together and max(rates.kept(pair)) < KEPT_WHEN_SHARED


def _link(rates: LinkRates, devices: list[int]) -> SharedLink:
    pairs = list(combinations(devices, 2))
    kept = sum(sum(rates.kept(pair)) / 2 for pair in pairs) / len(pairs)
    gain = sum(rates.turns_gain(pair) for pair in pairs) / len(pairs)
    return SharedLink(tuple(devices), kept, gain)
