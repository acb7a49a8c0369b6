"""Clipping, loss scales and bounds of spikes against torch, plain simulations and NumPy, and their saved states."""

import json
import math
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.optim import SpikeBounds, clip_scale, sum_of_squares
from torchround.optim.stability import GROWTH_INTERVAL_STEPS, HIGHEST_SCALE, INITIAL_SCALE, LOWEST_SCALE, LossScaling


@given(norm_factor=st.floats(1e-3, 1e3), max_norm=st.floats(1e-3, 1e3), seed=st.integers(0, 99))
def test_scale_is_that_of_clip_grad_norm(norm_factor, max_norm, seed):
    parameter = torch.nn.Parameter(torch.zeros(257))
    gradient = torch.randn(257, generator=torch.Generator().manual_seed(seed)) * norm_factor
    parameter.grad = gradient.clone()
    total_norm = torch.nn.utils.clip_grad_norm_([parameter], max_norm)
    assert torch.linalg.vector_norm(gradient) == total_norm
    # torch adds up squares in fp32, in an order of its own; the root halves the error: 16 roundings of 2^-24 in all.
    torch.testing.assert_close(gradient * clip_scale(total_norm, max_norm), parameter.grad, rtol=1e-6, atol=0)


def test_a_norm_within_the_bound_and_a_bound_of_zero_change_nothing():
    assert clip_scale(0.5, max_norm=1.0) == 1.0
    assert clip_scale(1e9, max_norm=0.0) == 1.0
    assert clip_scale(torch.tensor(8.0, dtype=torch.float64), max_norm=2.0) == pytest.approx(0.25)


@settings(max_examples=20, deadline=None)
@given(
    numel=st.integers(0, 20_000), dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16])
)
def test_sum_of_squares_is_the_exact_sum_and_leaves_the_data_alone(numel, dtype):
    flat = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    before = flat.clone()
    total = sum_of_squares(flat)
    assert torch.equal(flat, before)
    assert total.dtype == torch.float64 and total.shape == ()
    assert total.item() == pytest.approx(math.fsum(x * x for x in flat.tolist()), rel=1e-13)


def test_sum_of_squares_has_the_same_bits_on_any_number_of_threads():
    # float64, so that every square is rounded and the order of additions shows.
    flat = torch.randn(3_000_017, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = torch.get_num_threads()
    totals = set()
    try:
        for threads in (1, 2, 3, 4):
            torch.set_num_threads(threads)
            totals.add(sum_of_squares(flat).item())
    finally:
        torch.set_num_threads(before)
    assert len(totals) == 1


def test_a_large_finite_gradient_has_a_finite_norm_and_others_do_not():
    assert math.isfinite(sum_of_squares(torch.full((5000,), 3e38)).item())
    for bad in (math.inf, math.nan):
        flat = torch.zeros(10_000)
        flat[9_999] = bad
        assert not math.isfinite(sum_of_squares(flat).item())


# As many good steps as double the scale, and one less.
RUNS = [[True], [False], [False] * GROWTH_INTERVAL_STEPS, [False] * (GROWTH_INTERVAL_STEPS - 1)]
overflow_runs = st.lists(st.sampled_from(RUNS), min_size=1, max_size=12).map(lambda runs: [*chain(*runs)])


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


@given(overflows=overflow_runs)
def test_the_scale_of_a_step_is_fixed_by_the_results_two_steps_before(overflows):
    assert scales_of(overflows, LossScaling(dynamic=True)) == expected_scales(overflows)


def test_it_stays_within_its_bounds():
    assert scales_of([True] * 100, LossScaling(dynamic=True))[-1] == LOWEST_SCALE
    assert scales_of(RUNS[2] * 10, LossScaling(dynamic=True))[-1] == HIGHEST_SCALE


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
