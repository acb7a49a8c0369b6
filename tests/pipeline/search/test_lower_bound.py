"""The lower bound is below the best of all plans, and not far below."""

from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import costs, limits
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.memory import MemoryLimits
from torchround.pipeline.search.lower_bound import lower_bound_s
from torchround.pipeline.search.planning_problem import PlanningProblem
from torchround.pipeline.search.systematic_search import search_all


@given(
    costs=costs(max_layers=5),
    devices=st.integers(1, 6),
    micro_batches=st.integers(1, 6),
    update=st.sampled_from(["sync", "async"]),
    limits=limits(400, 1500),
    all_rounds=st.booleans(),
)
def test_no_plan_is_faster_than_the_bound(costs, devices, micro_batches, update, limits, all_rounds):
    problem = PlanningProblem(costs, devices, micro_batches, update, limits)
    choices = range(1, micro_batches + 1) if all_rounds else (micro_batches,)
    found = search_all(problem, choices)
    if found is not None:
        best, _ = found
        bound_s = lower_bound_s(problem, choices, float("inf"))
        assert bound_s <= problem.exact_s(best) * (1 + 1e-9) + 1e-12


def test_the_bound_knows_that_filling_and_draining_take_time():
    """The case: ten equal layers of 1 + 2 s, of which memory allows one per stage, 4 devices, 8 micro-batches, no hops."""
    layers = tuple(LayerCost(f"block.{i}", 1.0, 2.0, weight_bytes=10) for i in range(10))
    problem = PlanningProblem(Costs(layers), 4, 8, "sync", MemoryLimits(device_bytes=20))
    work_s = 8 * (9 * 1 + 10 * 3) / 4
    # Devices wait for 0, 1, 2, 3 forward layers and are done 0, 1, 2, 3 backward layers before the end.
    assert abs(lower_bound_s(problem, (1,), float("inf")) - (work_s + (6 * 1 + 6 * 2) / 4)) < 1e-9
