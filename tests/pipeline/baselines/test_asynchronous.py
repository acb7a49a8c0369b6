"""Asynchronous 1F1B and PACI: steady state, admission, drift, and PACI's Table 2."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.pipeline.baselines import SCHEDULES, ScheduleReport, SimulationSetup, measure_schedule
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.timeline import TaskKind, Timeline

# PACI Table 2: stages, then per number of micro-batches the samples per GPU and second of 1F1B-flush and PACI.
TABLE_2 = {
    "1.5B": (8, {24: (11.80, 15.24), 32: (12.50, 15.23), 64: (13.60, 15.09)}),
    "6.2B": (8, {24: (3.50, 4.52), 32: (3.70, 4.51), 64: (4.03, 4.47)}),
    "14.6B": (16, {48: (1.40, 1.84), 64: (1.49, 1.84), 128: (1.64, 1.83)}),
    "28.3B": (32, {96: (0.76, 1.01), 128: (0.80, 0.99), 256: (0.88, 0.99)}),
}


def run(
    name: str, layers: list[tuple[float, float]], micro_batches: int, accumulate: int | None = None
) -> ScheduleReport:
    costs = Costs(tuple(LayerCost(f"{i}", f, b, activation_bytes=1) for i, (f, b) in enumerate(layers)))
    stages = (1,) * len(layers)
    setup = SimulationSetup(costs, len(layers), micro_batches, recompute=False, stages=stages, accumulate=accumulate)
    return measure_schedule(SCHEDULES[name](setup))


def most_unresolved(timeline: Timeline, device: int) -> int:
    """Count the most forwards whose backward has not ended, read off one device's tasks."""
    unresolved = highest = 0
    for index in timeline.of_device(device):
        unresolved += 1 if timeline.tasks[index].kind is TaskKind.FORWARD else -1
        highest = max(highest, unresolved)
    return highest


@pytest.mark.parametrize("name", ["async_1f1b", "paci"])
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_equal_stages_have_no_bubble_in_the_steady_state(name: str, devices: int) -> None:
    report = run(name, [(1.0, 2.0)] * devices, micro_batches=8)
    assert report.makespan_s == pytest.approx(8 * 3)
    assert report.bubble == pytest.approx(0, abs=1e-9)


def test_an_uneven_pipeline_runs_at_the_speed_of_its_slowest_stage() -> None:
    report = run("paci", [(1.0, 2.0), (2.0, 3.0), (1.0, 1.0), (1.0, 2.0)], micro_batches=8)
    assert report.makespan_s == pytest.approx(8 * 5)
    assert report.bubble == pytest.approx(1 - 13 / 20)


@pytest.mark.parametrize(("devices", "accumulate", "drift"), [(8, 1, 7), (8, 4, 2), (8, 8, 1), (4, 2, 2)])
def test_drift_of_equal_stages_reaches_pacis_bound(devices: int, accumulate: int, drift: int) -> None:
    assert drift == -(-(devices - 1) // accumulate)
    assert run("paci", [(1.0, 2.0)] * devices, 8, accumulate).drift == drift


def test_without_accumulation_the_drift_is_the_number_of_micro_batches_in_flight() -> None:
    report = run("async_1f1b", [(1.0, 2.0)] * 4, 8)
    assert report.drift == 3
    # A fast first stage runs ahead of slow ones; without PACI's rule it is held only by the N in the pipeline.
    assert run("async_1f1b", [(0.1, 0.1), (0.1, 0.1), (1.0, 1.0), (1.0, 1.0)], 8).drift == 3


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from([1.0, 2.0, 3.1])), min_size=1, max_size=6),
    st.integers(1, 5),
)
def test_pacis_bounds_hold_for_any_stage_times(layers: list[tuple[float, float]], accumulate: int) -> None:
    stages = len(layers)
    report = run("paci", layers, 6, accumulate)
    for device in range(stages):
        # Admission q_i < N + 1 - i with i from 1 leaves at most N + 1 - i unresolved after it.
        assert most_unresolved(report.timeline, device) <= stages - device
    assert report.drift <= -(-(stages - 1) // accumulate)
    assert list(report.peak_activation_bytes) <= [stages - device for device in range(stages)]
    slowest_s = max(f + b for f, b in layers)
    assert report.makespan_s >= 6 * slowest_s * (1 - 1e-9)


@pytest.mark.parametrize("model", TABLE_2)
def test_table_2_follows_from_its_1f1b_rows(model: str) -> None:
    devices, rows = TABLE_2[model]
    layers = [(1.0, 2.0)] * devices
    for micro_batches, (flush, asynchronous) in rows.items():
        flush_s = measure_schedule(SCHEDULES["1f1b"](_setting(layers, micro_batches))).makespan_s
        assert flush_s == pytest.approx(3 * (micro_batches + devices - 1))
        predicted = flush * flush_s / (3 * micro_batches)  # PACI's steady state takes 3 m, tested above
        assert predicted == pytest.approx(asynchronous, rel=0.01)


def _setting(layers: list[tuple[float, float]], micro_batches: int) -> SimulationSetup:
    costs = Costs(tuple(LayerCost(f"{i}", f, b) for i, (f, b) in enumerate(layers)))
    return SimulationSetup(costs, len(layers), micro_batches, recompute=False, stages=(1,) * len(layers))
