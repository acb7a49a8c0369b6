"""Bounds on loss and gradient norm against NumPy's medians, and their continuation from a saved state."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.optim import SpikeBounds

WINDOW = 5
positive = st.floats(min_value=1e-3, max_value=1e3)
histories = st.lists(st.tuples(positive, positive), min_size=WINDOW, max_size=20)


def bounded(history, factor=3.0):
    bounds = SpikeBounds(factor, WINDOW)
    for loss, norm in history:
        bounds.record(loss, norm)
    return bounds


def expected_bound(values, factor):
    median = np.median(values)
    return median + factor * max(np.median(np.abs(np.array(values) - median)), 0.01 * median)


@settings(max_examples=100, deadline=None)
@given(history=histories, side=st.sampled_from([0, 1]))
def test_the_bound_is_the_median_and_so_many_median_deviations_of_the_last_good_steps(history, side):
    last = history[-WINDOW:]
    limit = expected_bound([values[side] for values in last], 3.0)
    other = min(values[1 - side] for values in last)
    for value, is_spike in ((limit * (1 - 1e-9), False), (limit * (1 + 1e-9), True)):
        values = (value, other) if side == 0 else (other, value)
        spike = bounded(history).spike(*values)
        assert (spike is not None) == is_spike
        assert spike is None or spike.name == ("loss", "gradient norm")[side]
        assert spike is None or spike.bound == pytest.approx(limit)


def test_nothing_is_a_spike_before_there_were_enough_good_steps():
    history = [(1.0, 1.0)] * WINDOW
    assert bounded(history[1:]).spike(1e9, 1e9) is None
    assert bounded(history).spike(1e9, 1e9) is not None


def test_steps_all_alike_are_no_reason_to_call_the_next_rounding_a_spike():
    bounds = bounded([(2.0, 1.0)] * WINDOW)
    assert bounds.spike(2.05, 1.02) is None
    assert str(bounds.spike(2.07, 1.0)) == "the loss 2.07 is above 2.06 (median 2)"


@settings(max_examples=50, deadline=None)
@given(history=histories, stop=st.integers(0, 20), value=positive)
def test_going_on_from_a_saved_state_has_the_same_bounds(history, stop, value):
    resumed = SpikeBounds(3.0, WINDOW)
    resumed.load_state_dict(json.loads(json.dumps(bounded(history[:stop]).state_dict())))
    for loss, norm in history[stop:]:
        resumed.record(loss, norm)
    assert resumed.spike(value, value) == bounded(history).spike(value, value)


def test_without_a_factor_nothing_is_bounded_and_nothing_kept():
    bounds = bounded([(1.0, 1.0)] * WINDOW, factor=0.0)
    assert bounds.spike(1e9, 1e9) is None and bounds.state_dict() == {}
    bounds.load_state_dict(bounded([(1.0, 1.0)] * WINDOW).state_dict())
    assert bounds.spike(1e9, 1e9) is None
