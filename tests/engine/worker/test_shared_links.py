"""Shared links are found from rates on topologies with a known answer, and windows come as in a uniform pipeline."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchround.engine.worker.link_turns import LinkRates, LinkWindows, find_shared_links, use_of_links

DEVICE_RATE = 25e9
ERROR = 0.04  # of a measurement, either way
DISTURBED = 0.7  # what a link carries for several devices, of what it carries for one


def rates_of(switches, uplink=DISTURBED * DEVICE_RATE, device_rate=DEVICE_RATE, noise=lambda: 1.0):
    """Make the rates of devices that share a switch's uplink equally; `switches[d]` is the switch of device d."""
    together = {}
    for first, second in combinations(range(len(switches)), 2):
        shared = switches[first] == switches[second]
        rate = min(device_rate, uplink / 2) if shared else device_rate
        together[first, second] = rate * noise(), rate * noise()
    return LinkRates([device_rate * noise() for _ in switches], together)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=8), st.data())
def test_the_links_found_are_the_switches_of_any_topology(switches, data):
    rates = rates_of(switches, noise=lambda: data.draw(st.floats(1 - ERROR, 1 + ERROR)))
    groups = [tuple(d for d, s in enumerate(switches) if s == switch) for switch in set(switches)]
    shared = sorted(group for group in groups if len(group) > 1)
    assert sorted(find_shared_links(rates)) == sorted(use_of_links(rates).turns) == shared


@pytest.mark.parametrize(
    ("uplink_share", "shares", "takes_turns"),
    [(0.5, True, True), (0.85, True, True), (0.9, True, False), (1.6, True, False), (1.8, False, False)],
)
def test_devices_take_turns_only_if_turns_move_clearly_more_than_both_together(uplink_share, shares, takes_turns):
    """Turns cost something on a fairly shared link, and more on one that carries more than one device's rate."""
    rates = rates_of([0, 0], uplink=uplink_share * DEVICE_RATE)
    assert bool(find_shared_links(rates)) == shares
    assert bool(use_of_links(rates).turns) == takes_turns


def test_a_slow_device_beside_a_fast_one_does_not_hold_it_up():
    """A card with 4 lanes and one with 16 below a switch with 16: turns would leave the uplink idle."""
    rates = LinkRates([25e9, 6e9], {(0, 1): (19e9, 6e9)})
    assert find_shared_links(rates) == []


def test_pairs_that_were_not_measured_share_nothing_and_the_line_says_so():
    rates = rates_of([0, 0, 0])
    use = use_of_links(LinkRates(rates.alone, {(0, 1): rates.together[0, 1]}))
    assert use.turns == ((0, 1),) and "2 of 3 pairs not measured" in use.text


@given(st.integers(1, 6), st.integers(1, 9), st.integers(1, 30))
def test_windows_come_as_in_a_pipeline_of_equal_windows(num_devices, num_windows, num_slots):
    """Compare window by window: each follows the same window of the previous slot, and its device's previous window."""
    windows = LinkWindows(num_devices)
    starts = [windows.next(num_windows) for _ in range(num_slots)]
    free, before = [0] * num_devices, [-1] * num_windows
    for slot, start in enumerate(starts):
        device, times = slot % num_devices, []
        for window in range(num_windows):
            times.append(max(free[device], before[window] + 1))
            free[device] = times[-1] + 1
        before = times
        assert times == [start + window for window in range(num_windows)]
