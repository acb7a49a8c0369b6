"""The schedule benchmark's bounds, and its simulation of a slow device, without running for minutes."""

import pytest

from benchmarks.schedule import missed_bounds
from benchmarks.timed_layers import BLOCK_BYTES, simulated_step_s, sleep_costs, with_updates
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.planner import make_plan


def figures(async_bubble, sync_points):
    return {"async": {"measured": {"bubble": async_bubble}}, "sync": {"difference_points": sync_points}}


def test_bounds_hold_for_long_layers_only():
    assert missed_bounds({"scales": {"5": figures(0.02, 1.5), "1": figures(0.5, 9.0)}}) == []
    [bubble, points] = missed_bounds({"scales": {"5": figures(0.0201, 1.51)}})
    assert "async bubble 2.01 %" in bubble and "1.51 points" in points


@pytest.mark.parametrize("update", ["sync", "async"])
def test_what_is_simulated_is_what_was_planned_and_a_slow_device_costs_more(update):
    costs = with_updates(sleep_costs(16, scale=1.0), [1e-4] * 17)
    limits = MemoryLimits(device_bytes=3 * BLOCK_BYTES)
    plan = make_plan(costs, 4, 8, update, limits=limits)
    equal_s = simulated_step_s(costs, plan)
    assert equal_s == pytest.approx(plan.step_s, rel=1e-6)
    assert simulated_step_s(costs, plan, [1.0] * 4) == pytest.approx(equal_s)
    slow_s = simulated_step_s(costs, plan, [0.5, 1.0, 1.0, 1.0])
    assert equal_s < slow_s <= 2 * equal_s * (1 + 1e-9)
    assert simulated_step_s(costs, plan, [0.5] * 4) == pytest.approx(2 * equal_s, rel=0.01)
