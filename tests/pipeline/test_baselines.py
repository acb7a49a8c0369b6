"""Schedules of other papers against their closed forms and published figures, and the properties that all share."""

import json
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.published_models import published_costs, published_partition
from torchround.pipeline.baselines import SCHEDULES, ScheduleError, SimulationSetup, measure_schedule, simulate_schedule
from torchround.pipeline.baselines.device_bound import bind_stages
from torchround.pipeline.costs import Costs, LayerCost
from torchround.pipeline.partition import Partition
from torchround.pipeline.timeline import TaskKind

BOUND = sorted(set(SCHEDULES) - {"roundpipe_sync", "roundpipe_async"})
SIZES = {"micro_batches": st.integers(1, 9), "devices": st.integers(1, 4)}


def measured(name, costs, devices, micro_batches, **settings):
    return measure_schedule(SCHEDULES[name](SimulationSetup(costs, devices, micro_batches, **settings)))


def uniform(name, devices, micro_batches, chunks=1, forward_s=1.0, backward_s=2.0, **settings):
    """Simulate equal stages that keep one byte for each micro-batch: T_F = T_B = T_W = 1 unless said otherwise."""
    layer = LayerCost("layer", forward_s, backward_s, activation_bytes=1)
    costs = Costs((layer,) * (devices * chunks))
    return measured(name, costs, devices, micro_batches, recompute=False, chunks=chunks, **settings)


def peak(report):
    return max(report.peak_activation_bytes)


# All schedules.


@pytest.mark.parametrize("name", BOUND)
@given(
    layers=st.lists(
        st.builds(
            LayerCost,
            name=st.just("layer"),
            forward_s=st.sampled_from([0.5, 1.0, 3.0]),
            backward_s=st.sampled_from([0.5, 2.0, 4.0]),
            activation_bytes=st.integers(1, 9),
            boundary_bytes=st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    ),
    recompute=st.booleans(),
    **SIZES,
)
def test_every_schedule_does_all_its_work_once_and_gives_all_memory_back(
    name, layers, devices, micro_batches, recompute
):
    setup = SimulationSetup(Costs(tuple(layers), hop_s=0.1), devices, micro_batches, recompute=recompute)
    result = simulate_schedule(name, setup)
    line = result.timeline
    steps = 1 + max(task.step for task in line.tasks)
    again = recompute or name == "mobius"
    work_s = sum(layer.forward_s + layer.backward_s for layer in layers)
    work_s += sum(layer.forward_s for layer in layers[:-1]) if again else 0
    assert line.work_s == pytest.approx(steps * micro_batches * work_s)
    for device in range(devices):
        mine = [task for task in line.tasks if task.device == device]
        assert sum(task.holds_bytes - task.frees_bytes for task in mine) == 0
    assert 0 <= result.bubble < 1
    assert sum(result.bubble_by_kind.values()) == pytest.approx(result.bubble, abs=1e-9)
    assert all(share >= -1e-9 for share in result.bubble_by_kind.values())
    slowest_layer_s = max(layer.forward_s + layer.backward_s for layer in layers)
    assert result.makespan_s >= micro_batches * slowest_layer_s * (1 - 1e-9)
    assert json.loads(json.dumps(result.to_json()))["makespan_s"] == result.makespan_s


# Layers per virtual stage in RoundPipe's artifact (the head is one more in the last), and the bubbles in % of its
# figure 15, with 8 devices and 16 micro-batches; for one, the kinds of idle time in its log.
@pytest.mark.parametrize(
    ("model", "name", "stages", "bubble"),
    [
        ("qwen3_1_7b", "gpipe", [3, 3, 4, 4, 4, 4, 4, 2], 36.13),
        ("qwen3_1_7b", "1f1b", [3, 3, 4, 4, 4, 4, 4, 2], 35.19),
        ("llama3_1_8b", "interleaved_1f1b", [1] * 32, 30.64),
        ("qwen3_235b_lora", "looped_bfs", [0] + [1] * 94 + [0], 4.39),
    ],
)
def test_bound_schedules_reproduce_their_published_bubbles(model, name, stages, bubble):
    stages = (*stages[:-1], stages[-1] + 1)
    report = measured(name, published_costs(model), 8, 16, stages=stages)
    assert 100 * report.bubble == pytest.approx(bubble, abs=0.006)
    if name == "1f1b":
        shares = {kind: 100 * share for kind, share in report.bubble_by_kind.items()}
        expected = {"fill": 3.4166, "switch": 12.2226, "drain": 10.2792, "imbalance": 9.2722}
        assert shares == pytest.approx(expected, abs=1e-4)


def test_roundpipe_sync_reports_the_published_figures():
    result = measured(
        "roundpipe_sync", published_costs("qwen3_1_7b"), 8, 16, partition=published_partition("qwen3_1_7b")
    )
    assert result.makespan_s * 1e3 == pytest.approx(2286.017, abs=1e-3)
    shares = {kind: 100 * share for kind, share in result.bubble_by_kind.items()}
    # The artifact's log. It starts the second round on the device that is free first, not on the next in
    # line, so idle time moves between kinds by up to 0.7 points while the sum stays.
    expected = {"fill": 7.5105, "drain": 7.5075, "switch": 0.0, "imbalance": 4.0495}
    assert shares == pytest.approx(expected, abs=0.7)
    assert sum(shares.values()) == pytest.approx(19.0676, abs=1e-4)


def test_roundpipe_sync_counts_the_update_that_its_next_step_waits_for():
    found = []
    for optimizer_s in (0.5, 0.0):
        costs = Costs(tuple(LayerCost(f"{i}", 1.0, 2.0, optimizer_s=optimizer_s) for i in range(4)))
        found.append(measured("roundpipe_sync", costs, 2, 4, partition=Partition((3,), 1, (1, 1, 1))))
    assert found[0].makespan_s == pytest.approx(found[1].makespan_s + 3 * 0.5)
    assert sum(found[0].bubble_by_kind.values()) == pytest.approx(found[0].bubble)


# Schedules with one stage a device, or several.


@pytest.mark.parametrize(("devices", "micro_batches", "chunks"), [(4, 8, 2), (8, 16, 3)])
def test_1f1b_gpipe_and_their_interleaved_forms_have_their_bubble_and_memory(devices, micro_batches, chunks):
    for name, kept in (("1f1b", tuple(range(devices, 0, -1))), ("gpipe", (micro_batches,) * devices)):
        report = uniform(name, devices, micro_batches)
        assert report.makespan_s == pytest.approx(3 * (micro_batches + devices - 1))
        assert report.bubble == pytest.approx((devices - 1) / (micro_batches + devices - 1))
        assert report.peak_activation_bytes == kept
    for name in ("interleaved_1f1b", "looped_bfs"):
        report = uniform(name, devices, micro_batches, chunks)
        efficiency = micro_batches * chunks / (micro_batches * chunks + devices - 1)  # PACI equation 4
        assert 1 - report.bubble == pytest.approx(efficiency)
        assert report.makespan_s == pytest.approx(3 * (micro_batches * chunks + devices - 1))
    # PipeOffload section 3.1: d v + d - 1 chunks on rank 0.
    interleaved = uniform("interleaved_1f1b", devices, micro_batches, chunks)
    assert interleaved.peak_activation_bytes[0] == devices * chunks + devices - 1


@pytest.mark.parametrize(("devices", "micro_batches"), [(2, 4), (8, 24)])
def test_zero_bubble_schedules_have_the_bubble_and_the_memory_of_qi_et_al(devices, micro_batches):
    # The formula needs f >= w: device 0 has nothing to fill the (p - 1) b before its first backward with.
    for forward_s, backward_s in ((1.0, 2.0), (1.25, 1.5)):
        report = uniform("zb_h1", devices, micro_batches, forward_s=forward_s, backward_s=backward_s)
        bubble_s = report.makespan_s - micro_batches * (forward_s + backward_s)
        assert bubble_s == pytest.approx((devices - 1) * forward_s) and peak(report) == devices
    report = uniform("zb_h2", devices, micro_batches)
    assert report.bubble == pytest.approx(0, abs=1e-9) and report.drift == 0
    assert peak(report) == 2 * devices - 1


# PipeOffload: memory in chunks, bubble in units.


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), (5, 3), (8, 4)])
def test_gis_warms_up_with_fewer_forwards_and_a_smaller_group_trades_memory_for_bubble(devices, chunks):
    report = uniform("gis", devices, 3 * devices, chunks)
    expected = [devices * (chunks - 1) + devices - rank for rank in range(devices)]
    kinds = [[report.timeline.tasks[i].kind for i in report.timeline.of_device(rank)] for rank in range(devices)]
    assert [of_rank.index(TaskKind.BACKWARD) for of_rank in kinds] == expected == list(report.peak_activation_bytes)
    group = -(-devices // 2)
    report = uniform("gis", devices, 3 * group, chunks, group=group)
    assert peak(report) == group * (chunks - 1) + devices
    extra = (devices - group) * (chunks - 1)
    assert report.makespan_s - 3 * 3 * group * chunks == pytest.approx(2 * (devices - 1) + extra)
    for outside in (group - 1, devices + 1):
        with pytest.raises(ScheduleError, match=f"group of {outside} "):
            uniform("gis", devices, 8, chunks, group=outside)


@pytest.mark.parametrize(
    ("devices", "chunks", "backward_s"), [(4, 2, 3.0), pytest.param(8, 4, 2.0, marks=pytest.mark.nightly)]
)
def test_bubbles_and_activation_memory_of_table_1(devices, chunks, backward_s):
    micro_batches, t_f, t_b, t_w = 4 * devices, 1.0, backward_s / 2, backward_s / 2
    work_s, model = micro_batches * chunks * (t_f + t_b + t_w), devices * chunks
    names = ("1f1b", "interleaved_1f1b", "gis", "gis_h", "po_h", "po_f")
    found = {name: uniform(name, devices, micro_batches, chunks, backward_s=backward_s) for name in names}
    bubble_s = {name: report.makespan_s - work_s for name, report in found.items()}
    # 1F1B binds one stage, as large as all of a device's chunks.
    assert bubble_s["1f1b"] == pytest.approx(chunks * (devices - 1) * (t_f + t_b + t_w))
    assert bubble_s["interleaved_1f1b"] == pytest.approx((devices - 1) * (t_f + t_b + t_w))
    assert bubble_s["gis"] == pytest.approx((devices - 1) * (t_f + t_b))
    half = (chunks - 1) * devices / 2 * (t_f + t_b - t_w)
    assert bubble_s["gis_h"] == pytest.approx((devices - 1) * (t_f + t_b) + half)
    assert max(bubble_s["po_h"], bubble_s["po_f"]) < bubble_s["1f1b"]
    assert peak(found["interleaved_1f1b"]) == model + devices - 1 and peak(found["gis"]) == model
    assert peak(found["gis_h"]) == (chunks + 1) / (2 * chunks) * model
    # Chunks on their way out or in come on top of what stays: a constant for any d and v.
    stays = (chunks + 2) / (8 * chunks) * model
    assert stays <= peak(found["po_h"]) <= stays + 3 and peak(found["po_f"]) <= 4


# Waits for transfers and for updates.


def test_mobius_uploads_weights_one_chunk_ahead():
    costs = Costs((LayerCost("layer", 5.0, 2.0, weight_bytes=10),) * 4)
    line = measured("mobius", costs, 1, 1, pcie_bytes_per_s=10.0).timeline
    uploads = [line.start_s[i] for i, task in enumerate(line.tasks) if task.kind is TaskKind.WEIGHTS]
    # 1 s each, forwards at 1, 6, 11, 16: the third upload finds room when the first chunk is done at 6. The
    # last chunk stays for its backward (2 s, the head does not recompute) and the others come once more.
    assert uploads == pytest.approx([0, 1, 6, 11, 16, 23, 30])


def test_offloaded_activations_are_on_the_host_between_their_forward_and_backward():
    timeline = uniform("po_f", 4, 12, 3).timeline
    for device in range(4):
        order = timeline.of_device(device, "offload")
        assert all(timeline.end_s[a] <= timeline.start_s[b] + 1e-9 for a, b in pairwise(order))
    spans = zip(timeline.tasks, timeline.start_s, timeline.end_s, strict=True)
    when = {(task.kind, task.layers, task.micro_batch): (start, end) for task, start, end in spans}
    reloads = [key[1:] for key in when if key[0] is TaskKind.RELOAD]
    assert reloads, "nothing was offloaded"
    for key in reloads:
        kinds = (TaskKind.FORWARD, TaskKind.OFFLOAD, TaskKind.RELOAD, TaskKind.BACKWARD)
        assert all(one[1] <= other[0] for one, other in pairwise([when[(kind, *key)] for kind in kinds]))


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 1.7]), st.sampled_from([1.0, 2.0, 3.1])), min_size=1, max_size=6),
    st.integers(1, 5),
)
@example([(1.0, 2.0)] * 6, 2)
def test_pacis_bounds_hold_for_any_stage_times_and_equal_stages_have_no_bubble(layers, accumulate):
    stages, slowest_s = len(layers), max(f + b for f, b in layers)
    costs = Costs(tuple(LayerCost("layer", f, b, activation_bytes=1) for f, b in layers))
    settings = {"recompute": False, "stages": (1,) * stages, "accumulate": accumulate}
    report = measured("paci", costs, stages, 6, **settings)
    for device in range(stages):
        kinds = [report.timeline.tasks[index].kind for index in report.timeline.of_device(device)]
        unresolved = [1 if kind is TaskKind.FORWARD else -1 for kind in kinds]
        # Admission q_i < N + 1 - i with i from 1 leaves at most N + 1 - i unresolved after it.
        assert max(sum(unresolved[: end + 1]) for end in range(len(unresolved))) <= stages - device
    assert report.drift <= -(-(stages - 1) // accumulate)
    assert list(report.peak_activation_bytes) <= [stages - device for device in range(stages)]
    assert report.makespan_s >= 6 * slowest_s * (1 - 1e-9)
    if len(set(layers)) == 1:
        assert report.drift == -(-(stages - 1) // accumulate)
        assert report.makespan_s == pytest.approx(6 * slowest_s) and report.bubble == pytest.approx(0, abs=1e-9)


BYTES = st.integers(0, 20)


@st.composite
def problems(draw):
    layers = draw(st.integers(1, 8))
    seconds = draw(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=layers, max_size=layers))
    static, flying = (draw(st.lists(BYTES, min_size=layers, max_size=layers)) for _ in range(2))
    return (seconds, static, flying, draw(st.integers(1, layers)), draw(st.one_of(st.none(), st.integers(0, 120))))


@given(problems())
# The best overshoot of the first two stages must be given up for the best of all three.
@example(([0.0, 0.0, 1.0, 1.0, 0.0, 0.0], [0] * 6, [0, 0, 0, 1, 1, 4], 3, 0))
def test_no_other_cut_has_a_smaller_overshoot_or_a_faster_slowest_stage_at_the_same_overshoot(problem):
    seconds, static, flying, stages, limit = problem

    def score(counts):
        start, overshoot, slowest = 0, 0, 0.0
        for stage, count in enumerate(counts):
            part = slice(start, start + count)
            used = sum(static[part]) + (stages - stage) * sum(flying[part])
            overshoot = max(overshoot, 0 if limit is None else used - limit)
            slowest = max(slowest, sum(seconds[part]))
            start += count
        return overshoot, slowest

    counts = bind_stages(seconds, static, stages, limit, flying)
    assert len(counts) == stages and sum(counts) == len(seconds) and min(counts) >= 1
    cuts = combinations(range(1, len(seconds)), stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(seconds)))) for cut in cuts]
    assert score(counts) == pytest.approx(min(map(score, every)))


def test_stages_that_cannot_be_bound_and_streams_that_cannot_keep_up_are_refused():
    for seconds, memory, stages in (([1.0], [1], 2), ([1.0, 1.0], [1], 2), ([1.0], [1], 0)):
        with pytest.raises(ScheduleError):
            bind_stages(seconds, memory, stages, None)
    with pytest.raises(ScheduleError, match=r"1\.50 x"):
        uniform("po_f", 4, 8, 2, offload_ratio=1.5)
    uniform("po_h", 4, 8, 2, offload_ratio=1.5)  # half of the chunks leave it time
