"""The exact step time against the event-driven simulator, and against known makespans."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.random_costs import LINKS, costs, partitions
from torchround.pipeline.costs import Costs, LayerCost, stage_seconds
from torchround.pipeline.simulation import step_time
from torchround.pipeline.simulation.dispatch import dispatch_tasks
from torchround.pipeline.simulation.kept_link import KeptLink, LinkWaits
from torchround.pipeline.simulation.simulator import simulate
from torchround.pipeline.simulation.step_time import LayerSums, StageTimes, stage_times, step_seconds

SIZES = {"num_devices": st.integers(1, 9), "num_micro_batches": st.integers(1, 8)}


def uniform(num_stages: int) -> StageTimes:
    return StageTimes([1.0] * num_stages, [1.0] * num_stages, [0.0] * num_stages, [-1] * num_stages, 0.0)


# The closed form of docs/schedules.md for equal stages, in numbers: N, M_R, R, S -> T.
@pytest.mark.parametrize(
    ("devices", "size", "rounds", "stages", "makespan"),
    [
        *[(2, 2, 1, 3, 4), (4, 4, 1, 6, 9), (4, 4, 2, 6, 15), (4, 4, 2, 13, 29), (4, 5, 2, 6, 18)],
        *[(8, 8, 2, 17, 41), (8, 8, 2, 34, 75), (8, 9, 1, 34, 46), (8, 16, 1, 34, 81)],
    ],
)
def test_uniform_stages_take_the_makespan_of_the_closed_form(
    devices: int, size: int, rounds: int, stages: int, makespan: int
) -> None:
    times = uniform(stages)
    assert step_seconds(times, devices, rounds * size, rounds, "sync") == makespan
    # The steady state of `async` with equal stages takes M S / N (docs/schedules.md).
    assert step_seconds(times, devices, rounds * size, rounds, "async") == pytest.approx(
        rounds * size * stages / devices, rel=1e-12
    )


@settings(max_examples=200, deadline=None)
@given(
    data=st.data(),
    costs=costs(updates=False, jobs=True),
    recompute=st.sampled_from(["stage", "layer"]),
    link=LINKS,
    **SIZES,
)
def test_a_single_step_takes_as_long_as_in_the_simulator(
    data: st.DataObject, costs: Costs, recompute: str, link: KeptLink | None, num_devices: int, num_micro_batches: int
) -> None:
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


@settings(max_examples=25, deadline=None)
@given(data=st.data(), costs=costs(max_layers=5, jobs=True), update=st.sampled_from(["sync", "async"]))
def test_the_steady_state_is_the_mean_over_many_simulated_steps(data: st.DataObject, costs: Costs, update: str) -> None:
    partition = data.draw(partitions(costs.num_layers))
    num_devices, num_micro_batches = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 4))
    rounds = data.draw(st.integers(1, num_micro_batches))
    settled, counted = 40, 120  # a multiple of every period that so few devices have
    tasks = dispatch_tasks(
        partition, costs, num_devices, num_micro_batches, rounds, update=update, steps=settled + counted
    )
    line = simulate(tasks, num_devices)
    ends = [0.0] * (settled + counted)
    for task, end in zip(tasks, line.end_s, strict=True):
        if task.device >= 0:
            ends[task.step] = max(ends[task.step], end)
    simulated = (ends[-1] - ends[settled - 1]) / counted
    times = stage_times(partition, costs)
    exact = step_seconds(times, num_devices, num_micro_batches, rounds, update)
    assert exact == pytest.approx(simulated, rel=1e-6, abs=1e-9)


def test_an_async_step_waits_for_the_update_of_the_step_before_the_last() -> None:
    """Two steps are in flight; each takes 3 s and its update 2 s, so one ends every 2.5 s."""
    costs = Costs((LayerCost("only", 1.0, 2.0, optimizer_s=2.0),))
    times = LayerSums(costs).times((), 1, ())
    assert step_seconds(times, 8, 1, 1, "async") == pytest.approx(2.5)
    assert step_seconds(times, 8, 1, 1, "sync") == pytest.approx(5.0)


def test_no_step_is_shorter_than_the_update() -> None:
    """One thread updates, for 10 s each time, so more steps in flight do not help."""
    times = LayerSums(Costs((LayerCost("only", 1.0, 2.0, optimizer_s=10.0),))).times((), 1, ())
    assert step_seconds(times, 8, 1, 1, "async") == pytest.approx(10.0)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), costs=costs(), devices=st.integers(1, 6), micro_batches=st.integers(1, 4))
def test_the_transition_matrix_grows_as_the_steps_that_are_simulated(
    data: st.DataObject, costs: Costs, devices: int, micro_batches: int
) -> None:
    """Waiting until the state repeats, and Karp's theorem without waiting, give one steady state."""
    times = stage_times(data.draw(partitions(costs.num_layers)), costs)
    arguments = (times, devices, micro_batches, data.draw(st.integers(1, micro_batches)), "async")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_time, "MAX_WARM_UP_STEPS", 0)
        from_matrix = step_seconds(*arguments)
        patch.setattr(step_time, "MAX_WARM_UP_STEPS", 200)
        assert step_seconds(*arguments) == pytest.approx(from_matrix, rel=1e-9, abs=1e-12)


@given(data=st.data(), costs=costs(), recompute=st.sampled_from(["stage", "layer"]))
@settings(max_examples=100, deadline=None)
def test_running_sums_give_each_stage_the_seconds_of_its_layers(
    data: st.DataObject, costs: Costs, recompute: str
) -> None:
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
