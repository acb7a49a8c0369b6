"""Devices that share a link to the host: turns at its use, and the measurement that finds which devices share one.

GPUs below one PCIe switch disturb each other's copies (PipeOffload appendix D). If two of them together move
clearly less than one after the other, they take turns. If they only share the link fairly, turns would gain
nothing.

The measurement runs at the start of a run. It copies what a run copies, a piece of pinned weights into device
memory, on the stream that uploads weights: each device alone, then every pair together. Times are the
devices' own.
"""

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Literal

import torch
from torch import Tensor

from torchround.engine.device import Device, Event, Stream
from torchround.engine.store.host_store import HostStore

# Turns of a device that are remembered: more than a thread gets ahead of the others. No device waits for a
# turn that is forgotten.
REMEMBERED = 256

# One measurement times COPIES copies of PROBE_BYTES, 3 ms at 25 GB/s, so that starting them does not count.
# The better one of REPEATS measurements counts.
PROBE_BYTES = 16 * 2**20
COPIES = 4
REPEATS = 2
# Less than this takes too short a time to measure, and is too short for turns to matter.
LEAST_BYTES = 2**20
# After so many seconds no further pair is measured.
BUDGET_S = 1.0

# Two devices share a link if each keeps less than this share of its solo rate while the other copies too.
KEPT_WHEN_SHARED = 0.85
# Devices take turns if turns move at least this many times what they move together. Waiting for a turn costs
# up to 5 % of a step at equal rates; from about this gain on, turns make up for it
# (benchmarks/shared_link.py).
TURNS_AT_LEAST = 1.15

Pair = tuple[int, int]


class LinkTurns:
    """The order in which devices that share a link to the host upload chunks of weights: one after the other.

    `groups` are the devices that share a link, by index. A device outside all groups takes no turns.

    A turn adds waits between streams and nothing else, so results cannot depend on it. It cannot hang either:
    a chunk waits only for events that are recorded already, so on the devices everything waits for what was
    enqueued before it, and no thread waits for another thread's turn. A device that is late, slow or dead in
    its turn delays no other.

    The order is that of transfer windows over the whole run (`LinkWindows`), not that of
    enqueueing: threads run far ahead of their devices, so a chunk for the next micro-batch would wait for the
    last one of a stage. A chunk waits for the others' chunks of its own window and of earlier ones, as far as
    they are enqueued. If two chunks have the same window, the one that is enqueued second waits.
    """

    def __init__(self, groups: Sequence[Sequence[int]]) -> None:
        self._others = {
            device: [other for other in group if other != device] for group in groups for device in group
        }
        self._taken: dict[int, deque[tuple[int, Event]]] = {
            device: deque(maxlen=REMEMBERED) for device in self._others
        }
        self._lock = threading.Lock()

    @contextmanager
    def turn(self, index: int, device: Device, window: int) -> Iterator[None]:
        """Make the weight uploads that device `index` enqueues in the block its turn at `window`."""
        if index not in self._others:
            yield
            return
        for event in self._before(index, window):
            device.wait(Stream.WEIGHT_UPLOAD, event, "its turn on the link")
        yield
        event = device.record(Stream.WEIGHT_UPLOAD, "the end of its turn on the link")
        with self._lock:
            self._taken[index].append((window, event))

    def _before(self, index: int, window: int) -> list[Event]:
        """Return, for each other device of the group, the end of its last turn up to `window`."""
        with self._lock:
            return [
                event
                for other in self._others[index]
                for event in [_last_up_to(window, self._taken[other])]
                if event is not None
            ]


def _last_up_to(window: int, taken: deque[tuple[int, Event]]) -> Event | None:
    return next((event for turn, event in reversed(taken) if turn <= window), None)


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


def find_link_use(
    share_links: bool | Literal["auto"], devices: Sequence[Device], store: HostStore
) -> LinkUse:
    """Decide which devices take turns, as `engine.share_links` says. Nothing may be allocated on the devices yet."""
    if len(devices) == 1 or share_links is False:
        return LinkUse()
    all_devices = tuple(range(len(devices)))
    if share_links is True:
        return LinkUse(
            (all_devices,), f"links    devices 0 to {all_devices[-1]} take turns (engine.share_links)"
        )
    if not all(device.has_link for device in devices):
        return LinkUse()
    source = _largest_weights(store)
    if source.numel() < LEAST_BYTES:
        return LinkUse((), f"links    not measured: {source.numel()} bytes of weights are too few")
    return use_of_links(measure_rates(devices, source))


def measure_rates(devices: Sequence[Device], source: Tensor) -> LinkRates:
    """Measure the rates at which the devices copy `source`, uint8, from the host, alone and in pairs.

    Gives back what it allocates on the devices. Pairs with neighbouring numbers come first: time may run out,
    and neighbours are the likeliest to share a switch.
    """
    deadline_s = time.monotonic() + BUDGET_S
    targets = [device.allocate(source.numel()) for device in devices]

    def rates(*indices: int) -> list[float]:
        """Return the bytes per second of each of these devices while all of them copy."""
        best = min((_copy_seconds(devices, targets, source, indices) for _ in range(REPEATS)), key=sum)
        return [COPIES * source.numel() / seconds for seconds in best]

    all_devices = range(len(devices))
    for index in all_devices:
        # A device's first copy also sets things up, which the link's rate must not include.
        _copy_seconds(devices, targets, source, [index])
    alone = [rates(index)[0] for index in all_devices]
    together = {}
    for first, second in sorted(combinations(all_devices, 2), key=lambda pair: (pair[1] - pair[0], pair)):
        if time.monotonic() >= deadline_s:
            break
        one, other = rates(first, second)
        together[first, second] = one, other
    for device in devices:
        device.finish()
        device.release()
    return LinkRates(alone, together)


def _copy_seconds(
    devices: Sequence[Device], targets: Sequence[Tensor], source: Tensor, indices: Sequence[int]
) -> list[float]:
    """Let these devices copy at the same time. Returns the seconds that each one's copies took, and waits for all."""
    chosen = [devices[index] for index in indices]
    starts = [device.mark(Stream.WEIGHT_UPLOAD) for device in chosen]
    for _ in range(COPIES):
        for index, device in zip(indices, chosen, strict=True):
            device.copy(Stream.WEIGHT_UPLOAD, targets[index], source)
    ends = [device.mark(Stream.WEIGHT_UPLOAD) for device in chosen]
    return [max(end.seconds_since(start), 1e-9) for start, end in zip(starts, ends, strict=True)]


def _largest_weights(store: HostStore) -> Tensor:
    """Return up to `PROBE_BYTES` of the store's largest device weights. Mapped weights are no pinned memory."""
    buffers = [weights for bundle in store.bundles for weights in bundle.device_weights]
    return max(buffers, key=torch.Tensor.numel).view(torch.uint8)[:PROBE_BYTES]
