"""GIS, GIS-H, PO-H and PO-F against PipeOffload's Table 1 and section 3: memory in chunks, bubble in units."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.pipeline.baselines import SCHEDULES, ScheduleError, ScheduleReport, SimulationSetup, measure_schedule
from torchround.pipeline.baselines.split_backward import uniform_grid
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.timeline import TaskKind


def uniform(name: str, devices: int, chunks: int, micro_batches: int, **fields: float) -> ScheduleReport:
    """Simulate chunks of one byte of activations, T_F = T_B = T_W = 1 unless the fields say otherwise."""
    forward_s, backward_s = fields.pop("forward_s", 1.0), fields.pop("backward_s", 2.0)
    layer = LayerCost("layer", forward_s, backward_s, activation_bytes=1)
    layers = (layer,) * (devices * chunks)
    setup = SimulationSetup(Costs(layers), devices, micro_batches, recompute=False, chunks=chunks, **fields)  # type: ignore[arg-type]
    return measure_schedule(SCHEDULES[name](setup))


def forwards_before_first_backward(report: ScheduleReport, device: int) -> int:
    kinds = [report.timeline.tasks[index].kind for index in report.timeline.of_device(device)]
    return kinds.index(TaskKind.BACKWARD)


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (8, 4), (4, 3), (5, 3), (8, 1)])
def test_gis_warms_up_with_fewer_forwards_and_keeps_at_most_all_chunks(devices: int, chunks: int) -> None:
    report = uniform("gis", devices, chunks, 3 * devices)
    expected = [devices * (chunks - 1) + devices - rank for rank in range(devices)]
    assert [forwards_before_first_backward(report, rank) for rank in range(devices)] == expected
    assert list(report.peak_activation_bytes) == expected
    assert max(expected) == devices * chunks


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (8, 3), (5, 4)])
def test_a_smaller_group_trades_memory_for_bubble(devices: int, chunks: int) -> None:
    for group in range(-(-devices // 2), devices + 1):
        micro_batches = 3 * group
        report = uniform("gis", devices, chunks, micro_batches, group=group)
        assert max(report.peak_activation_bytes) == group * (chunks - 1) + devices
        extra = (devices - group) * (chunks - 1)
        assert report.makespan_s - 3 * micro_batches * chunks == pytest.approx(2 * (devices - 1) + extra)


@pytest.mark.parametrize("backward_s", [2.0, 2.5, 3.0])
@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (8, 4)])
def test_bubbles_of_table_1(devices: int, chunks: int, backward_s: float) -> None:
    micro_batches, t_f, t_b, t_w = 3 * devices, 1.0, backward_s / 2, backward_s / 2
    work_s = micro_batches * chunks * (t_f + t_b + t_w)

    def bubble_s(name: str) -> float:
        return uniform(name, devices, chunks, micro_batches, backward_s=backward_s).makespan_s - work_s

    # 1F1B binds one stage, as large as all of a device's chunks.
    assert bubble_s("1f1b") == pytest.approx(chunks * (devices - 1) * (t_f + t_b + t_w))
    assert bubble_s("interleaved_1f1b") == pytest.approx((devices - 1) * (t_f + t_b + t_w))
    assert bubble_s("gis") == pytest.approx((devices - 1) * (t_f + t_b))
    half = (chunks - 1) * devices / 2 * (t_f + t_b - t_w)
    assert bubble_s("gis_h") == pytest.approx((devices - 1) * (t_f + t_b) + half)
    for name in ("po_h", "po_f"):
        assert bubble_s(name) < chunks * (devices - 1) * (t_f + t_b + t_w)


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (8, 2), (8, 4), (8, 8)])
def test_activation_memory_of_table_1(devices: int, chunks: int) -> None:
    micro_batches, model = 4 * devices, devices * chunks

    def peak(name: str) -> int:
        return max(uniform(name, devices, chunks, micro_batches).peak_activation_bytes)

    assert peak("1f1b") == model
    assert peak("interleaved_1f1b") == model + devices - 1
    assert peak("gis") == model
    assert peak("gis_h") == (chunks + 1) / (2 * chunks) * model
    # Chunks on their way out or in come on top of what stays: a constant for any d and v.
    stays = (chunks + 2) / (8 * chunks) * model
    assert stays <= peak("po_h") <= stays + 3
    assert peak("po_f") <= 4


def test_full_offload_keeps_a_constant_number_of_chunks_for_any_model() -> None:
    peaks = {max(uniform("po_f", 4, chunks, 12).peak_activation_bytes) for chunks in (1, 2, 4, 8, 16)}
    assert peaks <= {2, 3, 4}


def test_forwards_that_are_shorter_than_planned_do_not_pile_up_before_their_offload() -> None:
    report = uniform("po_f", 8, 4, 16, forward_s=0.2, backward_s=2.8)
    assert max(report.peak_activation_bytes) <= 4


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
def test_offload_within_its_budget_costs_no_time_in_the_steady_state(ratio: float) -> None:
    few, many = (uniform("po_f", 4, 2, count, offload_ratio=ratio).makespan_s for count in (16, 32))
    assert many - few == pytest.approx(16 * 2 * 3)


def test_a_stream_that_cannot_keep_up_is_refused_with_its_ratio() -> None:
    with pytest.raises(ScheduleError, match=r"1\.50 x its compute .*2 of 2 chunks"):
        uniform("po_f", 4, 2, 8, offload_ratio=1.5)
    uniform("po_h", 4, 2, 8, offload_ratio=1.5)  # half of the chunks leave it time


def test_transfer_time_comes_from_bytes_where_a_rate_is_known() -> None:
    timeline = uniform("po_f", 4, 2, 8, pcie_bytes_per_s=4.0).timeline
    durations = {task.duration_s for task in timeline.tasks if task.stream == "offload"}
    assert durations == {0.25}


def test_offload_and_reload_of_a_device_never_overlap_and_enclose_the_time_on_the_host() -> None:
    timeline = uniform("po_f", 4, 3, 12).timeline
    for device in range(4):
        order = timeline.of_device(device, "offload")
        assert order, "nothing was offloaded"
        assert all(timeline.end_s[a] <= timeline.start_s[b] + 1e-9 for a, b in pairwise(order))
    when = {
        (task.kind, task.layers, task.micro_batch): (start, end)
        for task, start, end in zip(timeline.tasks, timeline.start_s, timeline.end_s, strict=True)
    }
    reloads = [key for key in when if key[0] is TaskKind.RELOAD]
    for kind, layers, micro_batch in reloads:
        assert when[TaskKind.FORWARD, layers, micro_batch][1] <= when[TaskKind.OFFLOAD, layers, micro_batch][0]
        assert when[TaskKind.OFFLOAD, layers, micro_batch][1] <= when[kind, layers, micro_batch][0]
        assert when[kind, layers, micro_batch][1] <= when[TaskKind.BACKWARD, layers, micro_batch][0]


def test_groups_outside_their_range_are_refused() -> None:
    for group in (1, 5):
        with pytest.raises(ScheduleError, match=f"group of {group} .* between 2 and 4"):
            uniform("gis", 4, 2, 8, group=group)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 10), st.integers(1, 6), st.integers(1, 9))
def test_the_uniform_grid_has_one_task_per_unit_and_respects_every_dependency(
    devices: int, micro_batches: int, chunks: int
) -> None:
    grid = uniform_grid(devices, micro_batches, chunks)
    start = {item.action: item.start for planned in grid for item in planned}
    assert len(start) == 3 * devices * micro_batches * chunks
    for planned in grid:
        assert len({item.start for item in planned}) == len(planned)
    last = devices * chunks - 1
    for action, time in start.items():
        if action.kind is TaskKind.FORWARD and action.stage > 0:
            assert time > start[type(action)(action.kind, action.stage - 1, action.micro_batch)]
        if action.kind is TaskKind.BACKWARD:
            assert time > start[type(action)(TaskKind.FORWARD, action.stage, action.micro_batch)]
            if action.stage < last:
                assert time > start[type(action)(action.kind, action.stage + 1, action.micro_batch)]
        if action.kind is TaskKind.WEIGHT_GRADIENT:
            assert time > start[type(action)(TaskKind.BACKWARD, action.stage, action.micro_batch)]
