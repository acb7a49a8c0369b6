"""The exact step time, also in `bounded` and with waits for links, against the event simulator and known times."""

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, costs, exact_step_s, in_both_ways, partitions, simulated_step_s
from torchround.planning.costs import Costs, KeptCost, LayerCost
from torchround.planning.partition import Partition, StageKind
from torchround.planning.stage_times import KeptLink, LayerSums
from torchround.simulate.dispatch import dispatch_tasks
from torchround.simulate.events import simulate

SIZES = {"devices": st.integers(1, 9), "micro_batches": st.integers(1, 8)}
RECOMPUTE = st.sampled_from(["stage", "layer"])


@st.composite
def runs(draw, update, most_devices=5, most_micro_batches=4, **settings):
    drawn = draw(costs(jobs=update != "bounded", **settings))
    partition = draw(partitions(drawn.num_layers))
    devices, micro_batches = draw(st.integers(1, most_devices)), draw(st.integers(1, most_micro_batches))
    if update != "bounded":
        return (partition, drawn, devices, micro_batches, draw(st.integers(1, micro_batches)), update), 0
    if drawn.num_layers > 1 and draw(st.booleans()):
        group = draw(st.sets(st.integers(0, drawn.num_layers - 1), min_size=2, max_size=2))
        drawn = replace(drawn, shared=(tuple(sorted(group)),))
    return (partition, drawn, devices, micro_batches, 1, update), draw(
        st.integers(0, drawn.num_layers - partition.fused)
    )


@given(data=st.data(), costs=costs(updates=False, jobs=True), recompute=RECOMPUTE, link=LINKS, **SIZES)
def test_a_single_step_takes_as_long_as_in_the_simulator(data, costs, recompute, link, devices, micro_batches):
    """Stages may keep activations, and wait for the link because of them."""
    partition = data.draw(partitions(costs.num_layers))
    run = partition, costs, devices, micro_batches, data.draw(st.integers(1, micro_batches))
    tasks = dispatch_tasks(*run, recompute=recompute, link=link)
    # Not `makespan_s`, which does not count a last stage that takes no time but waits for its gradient.
    simulated = max(simulate(tasks, devices).end_s)
    assert exact_step_s(*run, "sync", recompute, link) == pytest.approx(simulated, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("update", ["sync", "async", "bounded"])
@given(data=st.data(), recompute=RECOMPUTE)
def test_the_steady_state_is_the_mean_over_many_simulated_steps(update, data, recompute):
    run, stale = data.draw(runs(update, max_layers=4))
    simulated = simulated_step_s(*run, recompute=recompute, stale_layers=stale)
    assert exact_step_s(*run, recompute, stale_layers=stale) == pytest.approx(simulated, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("update", ["async", "bounded"])
@given(data=st.data())
def test_the_transition_matrix_grows_as_the_steps_that_are_simulated(update, data):
    run, stale = data.draw(runs(update, most_devices=6))
    without_waiting_s, waited_s = in_both_ways(partial(exact_step_s, stale_layers=stale), *run)
    assert without_waiting_s == pytest.approx(waited_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize(("optimizer_s", "sync_s", "async_s"), [(2.0, 5.0, 2.5), (10.0, 13.0, 10.0)])
def test_an_async_step_waits_for_the_update_of_the_step_before_the_last(optimizer_s, sync_s, async_s):
    """Two steps of 3 s are in flight: one ends every 2.5 s. One thread updates, so none is shorter than an update."""
    run = Partition((), 1, ()), Costs((LayerCost("only", 1.0, 2.0, optimizer_s=optimizer_s),)), 8, 1, 1
    assert exact_step_s(*run, "async") == pytest.approx(async_s)
    assert exact_step_s(*run, "sync") == pytest.approx(sync_s)


@given(data=st.data(), costs=costs(updates=False), devices=st.integers(1, 6), micro_batches=st.integers(1, 6))
def test_more_stale_layers_never_make_a_step_longer(data, costs, devices, micro_batches):
    """No step beats `async`. Recomputations that wait for their inputs are left out: each stale layer takes its own."""
    partition, sums = data.draw(partitions(costs.num_layers)), LayerSums(costs)
    run, counts = (partition, costs, devices, micro_batches, 1), range(costs.num_layers - partition.fused + 1)
    assume(all(max(sums.times(partition, "bounded", 1, stale).boundary_from) < 0 for stale in counts))
    seconds = [exact_step_s(*run, "bounded", stale_layers=stale) for stale in counts]
    for more, fewer in zip(seconds[1:], seconds[:-1], strict=True):
        assert more <= fewer * (1 + 1e-9) + 1e-12
    assert seconds[-1] >= exact_step_s(*run, "async") * (1 - 1e-9) - 1e-12


@pytest.mark.parametrize(("stale", "shared", "seconds"), [(0, (), 6.0), (1, (), 3.0), (1, ((0, 1),), 5.0)])
def test_the_forward_of_a_stale_layer_runs_beside_the_backward_of_the_step_before(stale, shared, seconds):
    """Three devices, one micro-batch: forward 1 s, fused 3 s, 2 s of backward after a recomputation that is early.

    Without a stale layer they follow each other. With one, a fused stage waits for the one of the step before alone, but
    a head that shares the embedding's weights waits for the embedding's gradient.
    """
    costs = Costs((LayerCost("first", 1.0, 2.0), LayerCost("last", 1.0, 2.0)), shared=shared)
    run = Partition((1,), 1, (1,)), costs, 3, 1, 1, "bounded"
    assert exact_step_s(*run, stale_layers=stale) == pytest.approx(seconds)


PLAIN = Costs((LayerCost("a", 1.0, 2.0), LayerCost("b", 3.0, 5.0), LayerCost("c", 7.0, 11.0)))
PART_OF = LayerCost("block", 4.0, 8.0, keepable=(KeptCost("attention", 10, 1.0), KeptCost("down", 20, 2.0)))
KEEPING = Costs((PART_OF, PART_OF, LayerCost("head", 5.0, 11.0))).keeping([("down",), ("attention", "down"), ()])
COARSE, FINE, WHOLE = Partition((2,), 1, (2,)), Partition((1,), 2, (1,)), Partition((), 3, ())


@pytest.mark.parametrize(
    ("costs", "partition", "recompute", "early_s", "late_s"),
    [
        (PLAIN, COARSE, "stage", [0, 0, 4], [4, 7 + 11, 7]),
        (PLAIN, FINE, "stage", [0, 0, 1], [1, 3 + 7 + 5 + 11, 2]),
        # One layer's activations at a time: all but the last layer are computed once more.
        (PLAIN, COARSE, "layer", [0, 0, 4], [4, 7 + 11, 7 + 1]),
        (PLAIN, FINE, "layer", [0, 0, 1], [1, 26 + 3, 2]),
        # A backward stage skips what its layers keep, and no other stage does.
        (KEEPING, COARSE, "stage", [0, 0, 2 + 1], [8, 16, 16]),
        (KEEPING, FINE, "stage", [0, 0, 2], [4, 4 + 8 + 5 + 11, 8]),
        # The second recomputation of the first layer skips the same parts.
        (KEEPING, COARSE, "layer", [0, 0, 3], [8, 16, 16 + 2]),
        (KEEPING, WHOLE, "layer", [0], [13 + 27 + 8]),
    ],
)
def test_a_stage_costs_its_layers_and_recomputes_where_it_must(costs, partition, recompute, early_s, late_s):
    assert LayerSums(costs, recompute).seconds(partition) == (early_s, late_s)


# Waits for the link: what keeping adds to a stage beside the transfers that it has anyway.
def blocks(kept_bytes, boundary_bytes=0, weight_bytes=0):
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
    computed = LayerSums(costs).times(STAGES).total_s
    waited = LayerSums(costs, "stage", KeptLink(10.0), 2).times(STAGES).total_s
    assert waited == pytest.approx([computed_s + wait_s for computed_s, wait_s in zip(computed, waits, strict=True)])


@given(data=st.data(), costs=costs(), recompute=RECOMPUTE)
def test_a_stage_takes_the_longer_of_its_computation_and_its_kept_bytes_if_nothing_else_moves(data, costs, recompute):
    idle = {"weight_bytes": 0, "gradient_bytes": 0, "boundary_bytes": 0}
    costs = replace(costs, layers=tuple(replace(layer, **idle) for layer in costs.layers))
    partition = data.draw(partitions(costs.num_layers))
    computed = LayerSums(costs, recompute).times(partition).total_s
    waited = LayerSums(costs, recompute, KeptLink(20.0), 4).times(partition, rounds=2).total_s
    for stage, computed_s, seconds in zip(partition.stages(), computed, waited, strict=True):
        kept = sum(layer.kept_bytes for layer in costs.layers[stage.start : stage.stop])
        link_s = 0.0 if stage.kind is StageKind.FUSED else kept / 20.0
        assert seconds == pytest.approx(max(computed_s, link_s), abs=1e-9)
