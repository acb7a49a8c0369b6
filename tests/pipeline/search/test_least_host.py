"""Of plans that are about as fast, the one of least host memory is chosen."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.published_models import by_night, published_costs
from tests.support.random_costs import all_partitions, costs, limits
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import GIB, MemoryLimits
from torchround.pipeline.planner import InfeasiblePlanError, make_plan
from torchround.pipeline.search.least_host import AS_FAST
from torchround.pipeline.search.partition_batch import Candidate
from torchround.pipeline.search.planning_problem import PlanningProblem


@pytest.mark.parametrize(
    ("model", "update", "share"),
    by_night([("qwen3_32b", "async", 0.75), ("qwen3_32b", "sync", 0.6), ("qwen3_235b_lora", "sync", 0.5)]),
)
def test_a_hundredth_of_a_step_saves_a_large_part_of_the_boundaries(model, update, share):
    layer_times = published_costs(model)
    limit = MemoryLimits(device_bytes=24 * GIB)
    fastest = make_plan(layer_times, 8, 128, update, 1, limit, as_fast=0.0)
    plan = make_plan(layer_times, 8, 128, update, 1, limit)
    assert plan.step_s <= fastest.step_s * (1 + AS_FAST)
    assert plan.host_activation_bytes <= share * fastest.host_activation_bytes


@given(
    costs=costs(max_layers=7),
    devices=st.integers(1, 5),
    micro_batches=st.integers(1, 6),
    update=st.sampled_from(["sync", "async"]),
    limits=limits(400, 1500),
    rounds=st.sampled_from([1, "auto"]),
)
def test_the_plan_is_about_as_fast_as_the_fastest_and_needs_no_more_of_the_host(
    costs, devices, micro_batches, update, limits, rounds
):
    arguments = (costs, devices, micro_batches, update, rounds, limits)
    try:
        fastest = make_plan(*arguments, as_fast=0.0)
    except InfeasiblePlanError:
        return
    plan = make_plan(*arguments)
    assert plan.rounds == fastest.rounds
    assert plan.host_activation_bytes <= fastest.host_activation_bytes
    problem = PlanningProblem(costs, devices, micro_batches, update, limits)
    problem.idle_weight = 0.5 if update == "async" else 0.0
    ranks = [problem.rank_s(Candidate(found.partition, found.rounds)) for found in (fastest, plan)]
    slack = 1e-9 + (0 if update == "sync" else 0.5 * AS_FAST)  # small models are ranked without idle time
    assert ranks[1] <= ranks[0] * (1 + AS_FAST + slack) + 1e-12


def test_equal_layers_are_joined_until_a_step_would_take_too_long():
    """No plan of two devices that is within 1 % needs fewer boundaries, by trying all of them."""
    layers = tuple(LayerCost(f"block.{i}", 1.0, 2.0, boundary_bytes=1) for i in range(7))
    layer_times = Costs(layers, 0.01)
    plan = make_plan(layer_times, 2, 64, "sync", 1)
    problem = PlanningProblem(layer_times, 2, 64, "sync", MemoryLimits())
    every = [Candidate(partition, 1) for partition in all_partitions(7)]
    fastest_s = min(problem.exact_s(candidate) for candidate in every)
    as_fast = [c for c in every if problem.exact_s(c) <= fastest_s * (1 + AS_FAST)]
    assert plan.host_activation_bytes == min(problem.host_bytes(candidate) for candidate in as_fast)
