"""Steps in `bounded`: the exact time against the event simulator, and what its waits must and must not do."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.random_costs import costs, in_both_ways, partitions, simulated_step_s
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.partition import Partition
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds
from torchround.pipeline.simulation.step_time import LayerSums, step_seconds


@given(data=st.data(), costs=costs(max_layers=6), recompute=st.sampled_from(["stage", "layer"]))
def test_the_steady_state_is_the_mean_over_many_simulated_steps(data, costs, recompute):
    partition = data.draw(partitions(costs.num_layers))
    if costs.num_layers > 1 and data.draw(st.booleans()):
        group = data.draw(st.sets(st.integers(0, costs.num_layers - 1), min_size=2, max_size=2))
        costs = replace(costs, shared=(tuple(sorted(group)),))
    devices, micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    stale = data.draw(st.integers(0, costs.num_layers - partition.fused))
    exact = bounded_step_seconds(LayerSums(costs, recompute), partition, stale, devices, micro_batches)
    run = partition, costs, devices, micro_batches, 1, "bounded"
    assert exact == pytest.approx(simulated_step_s(*run, recompute=recompute, stale_layers=stale), rel=1e-6, abs=1e-9)


@given(data=st.data(), costs=costs(), devices=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_the_transition_matrix_grows_as_the_steps_that_are_simulated(data, costs, devices, micro_batches):
    partition = data.draw(partitions(costs.num_layers))
    stale = data.draw(st.integers(0, costs.num_layers - partition.fused))
    arguments = (LayerSums(costs), partition, stale, devices, micro_batches)
    without_waiting_s, waited_s = in_both_ways(bounded_step_seconds, *arguments)
    assert without_waiting_s == pytest.approx(waited_s, rel=1e-9, abs=1e-12)


@given(data=st.data(), costs=costs(updates=False), devices=st.integers(1, 6), micro_batches=st.integers(1, 6))
def test_more_stale_layers_never_make_a_step_longer(data, costs, devices, micro_batches):
    """No step beats `async`. Recomputations that wait for their inputs are left out: each stale layer takes its own."""
    partition, sums = data.draw(partitions(costs.num_layers)), LayerSums(costs)
    split = costs.num_layers - partition.fused
    counts = partition.forward, partition.fused, partition.backward
    assume(all(max(sums.times(*counts, stale).boundary_from) < 0 for stale in range(split + 1)))
    seconds = [bounded_step_seconds(sums, partition, stale, devices, micro_batches) for stale in range(split + 1)]
    for more, fewer in zip(seconds[1:], seconds[:-1], strict=True):
        assert more <= fewer * (1 + 1e-9) + 1e-12
    least_s = step_seconds(sums.times(*counts), devices, micro_batches, 1, "async")
    assert seconds[-1] >= least_s * (1 - 1e-9) - 1e-12


def test_the_forward_of_a_stale_layer_runs_beside_the_backward_of_the_step_before():
    """Three devices, one micro-batch: forward 1 s, fused 3 s, 2 s of backward after a recomputation that is early.

    Without a stale layer they follow each other. With one, a fused stage waits for the one of the step before alone.
    """
    costs = Costs((LayerCost("first", 1.0, 2.0), LayerCost("last", 1.0, 2.0)))
    partition, sums = Partition((1,), 1, (1,)), LayerSums(costs)
    assert bounded_step_seconds(sums, partition, 0, 3, 1) == pytest.approx(6.0)
    assert bounded_step_seconds(sums, partition, 1, 3, 1) == pytest.approx(3.0)


def test_a_layers_update_holds_up_only_stages_that_read_it():
    """The update of the last layer takes 1.5 s, beside the backward of the first one: no step waits for it."""
    costs = Costs((LayerCost("first", 1.0, 2.0), LayerCost("last", 1.0, 2.0, optimizer_s=1.5)))
    partition = Partition((1,), 1, (1,))
    free = Costs(tuple(LayerCost(layer.name, layer.forward_s, layer.backward_s) for layer in costs.layers))
    waits, without = (bounded_step_seconds(LayerSums(each), partition, 0, 3, 1) for each in (costs, free))
    assert waits == pytest.approx(without)
    whole = step_seconds(LayerSums(costs).times((1,), 1, (1,)), 3, 1, 1, "sync")
    assert whole > without


def test_a_head_that_shares_the_embeddings_weights_waits_for_the_embeddings_gradient():
    """Three devices, one micro-batch: the fused stage of a step reads what the backward of the step before completes."""
    layers = (LayerCost("embedding", 1.0, 2.0), LayerCost("head", 1.0, 2.0))
    partition = Partition((1,), 1, (1,))
    own, shared = (LayerSums(Costs(layers, shared=groups)) for groups in ((), ((0, 1),)))
    assert bounded_step_seconds(own, partition, 1, 3, 1) == pytest.approx(3.0)
    assert bounded_step_seconds(shared, partition, 1, 3, 1) == pytest.approx(5.0)
