"""The loss scale against a plain simulation, its delay, its bounds, and its continuation from a saved state."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.optim import stability
from torchround.optim.stability import HIGHEST_SCALE, INITIAL_SCALE, LOWEST_SCALE, LossScaling

overflow_runs = st.lists(st.booleans(), min_size=1, max_size=60)


@pytest.fixture(autouse=True, scope="module")
def short_interval():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stability, "GROWTH_INTERVAL_STEPS", 5)
        yield


def scales_of(overflows, scaling, first=0):
    scales = []
    for step, overflowed in enumerate(overflows, start=first):
        scales.append(scaling.scale_of(step))
        scaling.record(step, overflowed)
    return scales


def expected_scales(overflows, interval):
    """Compute the scales from the rule's description and the whole history."""
    scales = []
    for step in range(len(overflows)):
        scale, good = INITIAL_SCALE, 0
        for earlier in range(step - 1):  # results up to step - 2
            if overflows[earlier]:
                scale, good = max(LOWEST_SCALE, min(scale, scales[earlier] / 2)), 0
                continue
            good += 1
            if good == interval:
                scale, good = min(scale * 2, HIGHEST_SCALE), 0
        scales.append(scale)
    return scales


@settings(max_examples=100, deadline=None)
@given(overflows=overflow_runs)
def test_the_scale_of_a_step_is_fixed_by_the_results_two_steps_before(overflows):
    assert scales_of(overflows, LossScaling(dynamic=True)) == expected_scales(overflows, 5)


def test_two_overflows_under_the_same_scale_halve_it_once():
    scales = scales_of([True, True, False, False, True, False, False], LossScaling(dynamic=True))
    assert scales == [INITIAL_SCALE / division for division in (1, 1, 2, 2, 2, 2, 4)]


def test_it_stays_within_its_bounds():
    assert scales_of([True] * 100, LossScaling(dynamic=True))[-1] == LOWEST_SCALE
    assert scales_of([False] * 100, LossScaling(dynamic=True))[-1] == HIGHEST_SCALE


@settings(max_examples=50, deadline=None)
@given(overflows=overflow_runs, data=st.data())
def test_a_saved_state_continues_with_the_same_scales(overflows, data):
    stop = data.draw(st.integers(0, len(overflows)))
    whole = scales_of(overflows, LossScaling(dynamic=True))
    stopped = LossScaling(dynamic=True)
    scales_of(overflows[:stop], stopped)
    state = json.loads(json.dumps(stopped.state_dict(stop)))
    resumed = LossScaling(dynamic=True)
    resumed.load_state_dict(stop, state)
    assert scales_of(overflows[stop:], resumed, first=stop) == whole[stop:]


def test_a_state_with_scaling_is_of_no_use_without_it_and_the_other_way_round():
    fixed, dynamic = LossScaling(dynamic=False), LossScaling(dynamic=True)
    fixed.load_state_dict(7, dynamic.state_dict(0))
    dynamic.load_state_dict(7, {})
    assert (fixed.scale_of(7), dynamic.scale_of(7)) == (1.0, INITIAL_SCALE)
    assert scales_of([True, False, True], fixed, first=7) == [1.0] * 3 and fixed.state_dict(10) == {}
