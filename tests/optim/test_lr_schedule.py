"""Schedules against torch's own schedulers and closed forms."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, SequentialLR

from torchround.config.tables import LRScheduleTable
from torchround.optim import LRSchedule
from torchround.optim.lr_schedule import WSD_DECAY_FRACTION

DECAYS = ["none", "linear", "cosine", "wsd"]


def table(warmup, decay, floor):
    return LRScheduleTable(warmup_steps=warmup, decay=decay, min_lr_factor=floor)


def schedule(warmup, decay, floor, total, lr=3e-4):
    rate = LRSchedule(table(warmup, decay, floor), lr, total)
    return [rate(step) for step in range(total)]


def torch_rates(warmup, decay, floor, total, lr=3e-4):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    rise = LinearLR(optimizer, start_factor=1e-12, total_iters=warmup)
    span = total - warmup
    falls = {
        "none": ConstantLR(optimizer, factor=1.0),
        "linear": LinearLR(optimizer, start_factor=1.0, end_factor=floor, total_iters=span),
        "cosine": CosineAnnealingLR(optimizer, T_max=span, eta_min=floor * lr),
    }
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # SequentialLR itself uses a deprecated argument
        both = SequentialLR(optimizer, [rise, falls[decay]], milestones=[warmup])
        for _ in range(total):
            optimizer.step()
            both.step()
            rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.parametrize("decay", ["none", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [1, 10])
def test_rates_are_those_of_torch_schedulers(decay, warmup):
    ours = schedule(warmup, decay, floor=0.1, total=50)
    assert ours == pytest.approx(torch_rates(warmup, decay, floor=0.1, total=50), rel=1e-9)


def test_wsd_is_constant_and_then_linear_over_the_last_part():
    rates = schedule(warmup=10, decay="wsd", floor=0.2, total=110, lr=1.0)
    assert WSD_DECAY_FRACTION == 0.2
    assert rates[9:90] == pytest.approx([1.0] * 81)
    assert rates[90:] == pytest.approx([1.0 - 0.8 * k / 20 for k in range(1, 21)])


@settings(max_examples=40, deadline=None)
@given(decay=st.sampled_from(DECAYS), floor=st.floats(0, 1), total=st.integers(1, 60), data=st.data())
def test_warm_up_rises_linearly_from_above_zero_and_the_decay_falls_to_the_floor(decay, floor, total, data):
    warmup = data.draw(st.integers(0, total - 1))
    rates = schedule(warmup, decay, floor, total, lr=2.0)
    assert rates[:warmup] == pytest.approx([2.0 * t / warmup for t in range(1, warmup + 1)])
    after = rates[warmup:]
    assert after == sorted(after, reverse=True) and max(after) <= 2.0
    assert after[-1] == pytest.approx(2.0 if decay == "none" else 2.0 * floor, abs=1e-15)


def test_steps_past_the_end_keep_the_last_rate():
    rate = LRSchedule(table(2, "cosine", 0.1), 1.0, 10)
    assert rate(9) == rate(10) == rate(10_000) == pytest.approx(0.1)
    assert rate(5) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * 4 / 8)))
