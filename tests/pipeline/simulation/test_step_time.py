"""The exact step time, also in `bounded` and with waits for links, against the event simulator and known times."""

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, costs, in_both_ways, partitions, simulated_step_s
from torchround.pipeline.costs import Costs, KeptCost, LayerCost, stage_seconds
from torchround.pipeline.partition import Partition, StageKind
from torchround.pipeline.simulation.bounded_time import bounded_step_seconds
from torchround.pipeline.simulation.kept_link import KeptLink, LinkWaits
from torchround.pipeline.simulation.step_time import LayerSums, stage_times, step_seconds
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import simulate

SIZES = {"num_devices": st.integers(1, 9), "num_micro_batches": st.integers(1, 8)}


@given(
    data=st.data(),
    costs=costs(updates=False, jobs=True),
    recompute=st.sampled_from(["stage", "layer"]),
    link=LINKS,
    **SIZES,
)
def test_a_single_step_takes_as_long_as_in_the_simulator(data, costs, recompute, link, num_devices, num_micro_batches):
    """Stages may keep activations, and wait for the link because of them."""
    partition = data.draw(partitions(costs.num_layers))
    rounds = data.draw(st.integers(1, num_micro_batches))
    waits = None if link is None else LinkWaits(costs, link, recompute, num_micro_batches)
    sizes = num_devices, num_micro_batches, rounds
    tasks = dispatch_tasks(partition, costs, *sizes, recompute=recompute, link_waits=waits)
    # Not `makespan_s`, which does not count a last stage that takes no time but waits for its gradient.
    simulated = max(simulate(tasks, num_devices).end_s)
    times = stage_times(partition, costs, recompute, waits, rounds)
    assert step_seconds(times, *sizes, "sync") == pytest.approx(simulated, rel=1e-9, abs=1e-12)


@given(data=st.data(), costs=costs(max_layers=5, jobs=True), update=st.sampled_from(["sync", "async"]))
def test_the_steady_state_is_the_mean_over_many_simulated_steps(data, costs, update):
    partition = data.draw(partitions(costs.num_layers))
    num_devices, num_micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rounds = data.draw(st.integers(1, num_micro_batches))
    simulated = simulated_step_s(partition, costs, num_devices, num_micro_batches, rounds, update)
    times = stage_times(partition, costs)
    exact = step_seconds(times, num_devices, num_micro_batches, rounds, update)
    assert exact == pytest.approx(simulated, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize(("optimizer_s", "sync_s", "async_s"), [(2.0, 5.0, 2.5), (10.0, 13.0, 10.0)])
def test_an_async_step_waits_for_the_update_of_the_step_before_the_last(optimizer_s, sync_s, async_s):
    """Two steps are in flight, each takes 3 s and its update 2 s: one ends every 2.5 s. One thread updates, so no step is
    shorter than an update."""
    times = LayerSums(Costs((LayerCost("only", 1.0, 2.0, optimizer_s=optimizer_s),))).times((), 1, ())
    assert step_seconds(times, 8, 1, 1, "async") == pytest.approx(async_s)
    assert step_seconds(times, 8, 1, 1, "sync") == pytest.approx(sync_s)


@given(data=st.data(), costs=costs(), devices=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_the_transition_matrix_grows_as_the_steps_that_are_simulated(data, costs, devices, micro_batches):
    times = stage_times(data.draw(partitions(costs.num_layers)), costs)
    arguments = (times, devices, micro_batches, data.draw(st.integers(1, micro_batches)), "async")
    without_waiting_s, waited_s = in_both_ways(step_seconds, *arguments)
    assert without_waiting_s == pytest.approx(waited_s, rel=1e-9, abs=1e-12)


# Steps in `bounded`: the exact time against the event simulator, and what its waits must and must not do.


@given(data=st.data(), costs=costs(max_layers=6), recompute=st.sampled_from(["stage", "layer"]))
def test_the_steady_state_of_bounded_is_the_mean_over_many_simulated_steps(data, costs, recompute):
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
def test_the_transition_matrix_of_bounded_grows_as_the_steps_that_are_simulated(data, costs, devices, micro_batches):
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


def test_a_head_that_shares_the_embeddings_weights_waits_for_the_embeddings_gradient():
    """Three devices, one micro-batch: the fused stage of a step reads what the backward of the step before completes."""
    layers = (LayerCost("embedding", 1.0, 2.0), LayerCost("head", 1.0, 2.0))
    partition = Partition((1,), 1, (1,))
    own, shared = (LayerSums(Costs(layers, shared=groups)) for groups in ((), ((0, 1),)))
    assert bounded_step_seconds(own, partition, 1, 3, 1) == pytest.approx(3.0)
    assert bounded_step_seconds(shared, partition, 1, 3, 1) == pytest.approx(5.0)


# Waits for the link: what keeping adds to a stage beside the transfers that it has anyway.


def blocks(kept_bytes, boundary_bytes=0, weight_bytes=0):
    """Build three blocks of 1 s and 2 s and a head; each block can keep a part that is half of its forward."""
    parts = (KeptCost("down", kept_bytes, 0.5),)
    block = LayerCost("block", 1.0, 2.0, weight_bytes=weight_bytes, boundary_bytes=boundary_bytes, keepable=parts)
    return Costs((block, block, block, LayerCost("head", 1.0, 2.0))).keeping([("down",)] * 3 + [()])


# Stages: two blocks forward, one block forward, the head, one block backward (2.5 s), two blocks backward (5 s).
STAGES = Partition((2, 1), 1, (1, 2))


@pytest.mark.parametrize(
    ("costs", "waits"),
    [
        (blocks(10), [0, 0, 0, 0, 0]),  # 1 s of transfer for each second of forward: just hidden
        (blocks(12), [0.4, 0.2, 0, 0, 0]),
        (blocks(30), [4, 2, 0, 0.5, 1]),
        # Outputs of 0.2 s go down too; a backward stage brings up its gradient, and its input unless that is the tokens.
        (blocks(10, boundary_bytes=2), [0.2, 0.2, 0, 0, 0]),
        # Weights of 2 s for each micro-batch of the round go up.
        (blocks(10, weight_bytes=40), [2, 1, 0, 0.5, 1]),
    ],
)
def test_a_stage_waits_for_what_its_computation_does_not_hide(costs, waits):
    assert LinkWaits(costs, KeptLink(10.0), "stage", 2).of(STAGES, 1) == pytest.approx(waits)


@given(data=st.data(), costs=costs(), recompute=st.sampled_from(["stage", "layer"]))
def test_a_stage_takes_the_longer_of_its_computation_and_its_kept_bytes_if_nothing_else_moves(data, costs, recompute):
    idle = {"weight_bytes": 0, "gradient_bytes": 0, "boundary_bytes": 0}
    costs = replace(costs, layers=tuple(replace(layer, **idle) for layer in costs.layers))
    partition = data.draw(partitions(costs.num_layers))
    waits = LinkWaits(costs, KeptLink(20.0), recompute, 4).of(partition, 2)
    for stage, wait_s in zip(partition.stages(), waits, strict=True):
        kept = sum(layer.kept_bytes for layer in costs.layers[stage.start : stage.stop])
        computed_s = sum(stage_seconds(costs, stage, recompute))
        link_s = 0.0 if stage.kind is StageKind.FUSED else kept / 20.0
        assert computed_s + wait_s == pytest.approx(max(computed_s, link_s), abs=1e-9)
