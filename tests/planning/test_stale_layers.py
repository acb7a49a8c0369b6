"""Plans of bounded updates: the fewest stale layers that cost no time, within every limit."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.published_models import PARTITIONS, by_night, published_costs
from tests.support.random_costs import all_partitions, costs, exact_step_s, short_search
from torchround.planning.choices import AS_SHORT
from torchround.planning.costs import Costs, KeptCost, LayerCost
from torchround.planning.host_buffers import HostBatch
from torchround.planning.memory import MemoryLimits
from torchround.planning.partition import Partition, PlanError
from torchround.planning.plan import Plan
from torchround.planning.plan_report import step_transfers
from torchround.planning.planner import InfeasiblePlanError, evaluate_plan, make_plan

SIZES = {"devices": st.integers(1, 4), "micro_batches": st.integers(1, 5)}


def split_of(partition):
    return partition.num_layers - partition.fused


@given(costs=costs(max_layers=5, updates=False), **SIZES)
def test_no_plan_and_no_number_of_stale_layers_gives_a_shorter_step(costs, devices, micro_batches):
    """Every partition is tried by hand, without kept activations; the plan may take 0.1 % longer to have fewer stale layers."""
    costs = costs.keeping([])
    run = costs, devices, micro_batches, 1, "bounded"
    every = [exact_step_s(each, *run, stale_layers=split_of(each)) for each in all_partitions(costs.num_layers)]
    plan = make_plan(costs, devices, micro_batches, "bounded", as_fast=0.0)
    assert plan.rounds == 1
    assert plan.step_s <= min(every) * (1 + AS_SHORT) + 1e-12
    if plan.stale_layers:
        fewer = plan.stale_layers - 1
        longer_s = exact_step_s(plan.partition, *run, stale_layers=fewer)
        assert longer_s > min(every), "fewer stale layers would do"


@given(costs=costs(max_layers=5), stale=st.integers(0, 4), **SIZES)
def test_a_given_number_of_stale_layers_is_kept(costs, stale, devices, micro_batches):
    if stale >= costs.num_layers:
        with pytest.raises(PlanError, match="engine.stale_layers"):
            make_plan(costs, devices, micro_batches, "bounded", stale_layers=stale)
        return
    costs = costs.keeping([])
    plan = make_plan(costs, devices, micro_batches, "bounded", stale_layers=stale, as_fast=0.0)
    assert plan.stale_layers == stale <= split_of(plan.partition)
    possible = [other for other in all_partitions(costs.num_layers) if split_of(other) >= stale]
    run = costs, devices, micro_batches, 1, "bounded"
    best_s = min(exact_step_s(other, *run, stale_layers=stale) for other in possible)
    assert plan.step_s == pytest.approx(best_s, rel=1e-9, abs=1e-12)


@given(costs=costs(max_layers=5, updates=False), share=st.floats(0.3, 1.0), stale=st.sampled_from([None, 1]), **SIZES)
def test_a_plan_counts_the_inputs_of_its_stale_layers(costs, share, stale, devices, micro_batches):
    costs = costs.keeping([])
    if costs.num_layers == 1:
        return
    free = make_plan(costs, devices, micro_batches, "bounded", stale_layers=stale)
    limit = int(share * free.host_activation_bytes)
    try:
        plan = make_plan(
            *(costs, devices, micro_batches, "bounded"), limits=MemoryLimits(host_bytes=limit), stale_layers=stale
        )
    except InfeasiblePlanError as error:
        assert "are missing" in str(error)
        return
    batch = HostBatch((0,) * micro_batches, (costs,))
    counted = batch.boundary_bytes(plan.partition, 1, devices, "bounded", plan.stale_layers)
    assert plan.host_activation_bytes == counted <= limit


@short_search()
def test_within_a_tight_host_limit_no_stale_layers_are_no_faster():
    """The most stale layers that fit leave little room for the plan."""
    costs = published_costs("qwen3_1_7b")
    costs = replace(costs, layers=tuple(replace(layer, boundary_bytes=1) for layer in costs.layers))
    run = costs, 8, 16, "bounded"
    limits = MemoryLimits(host_bytes=int(0.4 * make_plan(*run).host_activation_bytes))
    assert make_plan(*run, limits=limits).step_s <= make_plan(*run, limits=limits, stale_layers=0).step_s


def test_the_stale_layers_of_a_given_partition_are_the_fewest_without_a_longer_step():
    costs = published_costs("gpt_oss_20b")
    partition = Partition((4,) * 6, 1, (1,) * 24)
    plan = evaluate_plan(partition, 1, costs, 8, 16, "bounded")
    steps = [exact_step_s(partition, costs, 8, 16, 1, "bounded", stale_layers=stale) for stale in range(25)]
    assert plan.stale_layers == next(k for k in range(25) if steps[k] <= steps[24] * (1 + AS_SHORT)) > 0
    assert plan.step_s == steps[plan.stale_layers] < steps[0]
    assert evaluate_plan(partition, 1, costs, 8, 16, "bounded", stale_layers=3).step_s == steps[3]
    with pytest.raises(InfeasiblePlanError, match="stale layers"):
        evaluate_plan(Partition((1,), 24, (1,)), 1, costs, 8, 16, "bounded", stale_layers=3)


def test_a_stale_layer_keeps_no_activations():
    """Its forward has made them with older weights than its backward computes with; the first layer after it may."""
    layer = LayerCost("block", 1.0, 2.0, keepable=(KeptCost("attention", 8, 0.5),))
    costs = Costs((layer,) * 6).keeping([("attention",)] * 6)
    plan = evaluate_plan(Partition((4,), 2, (2, 2)), 1, costs, 2, 4, "bounded", stale_layers=3)
    assert plan.kept == ((), (), (), ("attention",), (), ())
    assert [stage.seconds for stage in plan.stages] == [4.0, 6.0, 5.5, 6.0]


def test_a_plan_of_bounded_updates_has_one_round_and_its_stale_layers_in_its_file():
    costs = published_costs("gpt_oss_20b")
    with pytest.raises(PlanError, match="rounds = 2"):
        make_plan(costs, 8, 16, "bounded", rounds=2)
    plan = evaluate_plan(Partition((4,) * 6, 1, (4,) * 6), 1, costs, 8, 16, "bounded", stale_layers=3)
    assert Plan.from_json(plan.to_json()) == plan and "3 stale layers" in plan.summary()


def test_the_transfers_of_a_plan_count_the_inputs_that_stale_layers_keep():
    """Layers 1 to 3 start anew: their inputs go down once more after the forward, and up before the backward."""
    costs = published_costs("gpt_oss_20b")
    partition = Partition((4,) * 6, 1, (4,) * 6)

    def moved(k):
        plan = evaluate_plan(partition, 1, costs, 8, 16, "bounded", stale_layers=k)
        return [sum(way) for way in zip(*step_transfers(plan, costs, 0.5), strict=True)]

    extra = [some - none for none, some in zip(moved(0), moved(3), strict=True)]
    assert extra == [16 * 3 * costs.layers[0].boundary_bytes] * 2


@pytest.mark.parametrize("model", by_night(PARTITIONS))
def test_a_published_model_has_next_to_no_bubble_on_eight_devices(model):
    plan = make_plan(published_costs(model), 8, 16, "bounded", limits=MemoryLimits(device_bytes=24 * 2**30))
    assert plan.bubble <= 0.01
    assert 0 < plan.stale_layers < split_of(plan.partition)
