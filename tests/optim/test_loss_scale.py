"""The loss scale against a plain simulation, its delay, its bounds, and its continuation from a saved state."""

import json
from itertools import chain

from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.optim.stability import GROWTH_INTERVAL_STEPS, HIGHEST_SCALE, INITIAL_SCALE, LOWEST_SCALE, LossScaling

# Five runs of good steps double the scale.
RUN = [False] * (GROWTH_INTERVAL_STEPS // 5)
overflow_runs = st.lists(st.sampled_from([[True], RUN]), min_size=1, max_size=30).map(lambda runs: [*chain(*runs)])


def scales_of(overflows, scaling, first=0):
    scales = []
    for step, overflowed in enumerate(overflows, start=first):
        scales.append(scaling.scale_of(step))
        scaling.record(step, overflowed)
    return scales


def expected_scales(overflows):
    """Compute the scales from the rule's description: the result of a step counts from the second one after it."""
    scales, scale, good = [], INITIAL_SCALE, 0
    for step in range(len(overflows)):
        if step >= 2 and overflows[step - 2]:
            scale, good = max(LOWEST_SCALE, min(scale, scales[step - 2] / 2)), 0
        elif step >= 2:
            good += 1
            if good == GROWTH_INTERVAL_STEPS:
                scale, good = min(scale * 2, HIGHEST_SCALE), 0
        scales.append(scale)
    return scales


@settings(max_examples=25, deadline=None)
@given(overflows=overflow_runs)
def test_the_scale_of_a_step_is_fixed_by_the_results_two_steps_before(overflows):
    assert scales_of(overflows, LossScaling(dynamic=True)) == expected_scales(overflows)


def test_two_overflows_under_the_same_scale_halve_it_once():
    scales = scales_of([True, True, False, False, True, False, False], LossScaling(dynamic=True))
    assert scales == [INITIAL_SCALE / division for division in (1, 1, 2, 2, 2, 2, 4)]


def test_it_stays_within_its_bounds():
    assert scales_of([True] * 100, LossScaling(dynamic=True))[-1] == LOWEST_SCALE
    assert scales_of(RUN * 50, LossScaling(dynamic=True))[-1] == HIGHEST_SCALE


@settings(max_examples=25, deadline=None)
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
