"""The exact step time against the event-driven simulator, and against known makespans."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, costs, in_both_ways, partitions, simulated_step_s
from torchround.pipeline.costs import Costs, LayerCost, stage_seconds
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.simulation.kept_link import LinkWaits
from torchround.pipeline.simulation.simulator import simulate
from torchround.pipeline.simulation.step_time import LayerSums, stage_times, step_seconds

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


@given(data=st.data(), costs=costs(), recompute=st.sampled_from(["stage", "layer"]))
def test_running_sums_give_each_stage_the_seconds_of_its_layers(data, costs, recompute):
    partition = data.draw(partitions(costs.num_layers))
    times = stage_times(partition, costs, recompute)
    for index, stage in enumerate(partition.stages()):
        before_s, after_s = stage_seconds(costs, stage, recompute)
        assert times.total_s[index] == pytest.approx(before_s + after_s, abs=1e-9)
        assert times.entry_s[index] == pytest.approx(after_s + costs.hop_s, abs=1e-9)
        updated = sum(layer.optimizer_s for layer in costs.layers[: stage.stop])
        assert times.updated_after_s[index] == pytest.approx(updated, abs=1e-9)
    least = LayerSums(costs, recompute).work_s(partition.fused)
    assert least <= math.fsum(times.total_s) + 1e-9
