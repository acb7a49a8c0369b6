"""Clipping against torch's own, and a norm that is the same on any number of threads."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.optim import clip_scale, sum_of_squares


@settings(max_examples=25, deadline=None)
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
