"""Schedules of other papers against their closed forms and published figures, and the properties that all share."""

from itertools import combinations, pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.published_models import PARTITIONS, published_costs
from torchround.planning.costs import Costs, LayerCost
from torchround.planning.partition import Partition, SpanKind
from torchround.simulate.bound import ScheduleError, SimulationSetup, fastest_split
from torchround.simulate.schedules import RULES, simulate_schedule

pytestmark = pytest.mark.thorough
QWEN_1_7B, LLAMA_8B, *_, QWEN_235B = PARTITIONS


def measured(name, costs, devices, micro_batches, **settings):
    return simulate_schedule(name, SimulationSetup(costs, devices, micro_batches, **settings))


def uniform(name, devices, micro_batches, chunks=1, forward_s=1.0, backward_s=2.0, **settings):
    """Simulate equal stages that keep one byte for each micro-batch: T_F = T_B = T_W = 1 unless said otherwise."""
    layer = LayerCost("layer", forward_s, backward_s, activation_bytes=1)
    costs = Costs((layer,) * (devices * chunks))
    return measured(name, costs, devices, micro_batches, recompute=False, chunks=chunks, **settings)


def peak(report):
    return max(report.peak_activation_bytes)


@pytest.mark.parametrize("name", RULES)
@given(
    layers=st.lists(
        st.builds(
            LayerCost,
            name=st.just("layer"),
            forward_s=st.sampled_from([0.0, 0.5, 1.0, 3.0]),
            backward_s=st.sampled_from([0.5, 2.0, 4.0]),
            activation_bytes=st.integers(1, 9),
            boundary_bytes=st.integers(0, 3),
        ),
        min_size=1,
        max_size=6,
    ),
    recompute=st.booleans(),
    micro_batches=st.integers(1, 9),
    devices=st.integers(1, 4),
)
def test_every_schedule_does_all_its_work_once_and_gives_all_memory_back(
    name, layers, devices, micro_batches, recompute
):
    result = measured(name, Costs(tuple(layers), hop_s=0.1), devices, micro_batches, recompute=recompute)
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
    slowest_layer_s = max(layer.forward_s + layer.backward_s for layer in layers)
    assert result.makespan_s >= micro_batches * slowest_layer_s * (1 - 1e-9)


# Layers per virtual stage in RoundPipe's artifact (the head is one more in the last), and the bubbles in % of its
# figure 15, with 8 devices and 16 micro-batches.
@pytest.mark.parametrize(
    ("model", "name", "stages", "bubble"),
    [
        (QWEN_1_7B, "gpipe", [3, 3, 4, 4, 4, 4, 4, 2], 36.13),
        (QWEN_1_7B, "1f1b", [3, 3, 4, 4, 4, 4, 4, 2], 35.19),
        (LLAMA_8B, "interleaved_1f1b", [1] * 32, 30.64),
        (QWEN_235B, "looped_bfs", [0] + [1] * 94 + [0], 4.39),
    ],
)
def test_schedules_reproduce_their_published_bubbles(model, name, stages, bubble):
    report = measured(name, published_costs(model), 8, 16, stages=(*stages[:-1], stages[-1] + 1))
    assert 100 * report.bubble == pytest.approx(bubble, abs=0.006)


def test_roundpipe_sync_counts_the_update_that_its_next_step_waits_for():
    found = []
    for optimizer_s in (0.5, 0.0):
        costs = Costs(tuple(LayerCost(f"{i}", 1.0, 2.0, optimizer_s=optimizer_s) for i in range(4)))
        found.append(measured("roundpipe_sync", costs, 2, 4, partition=Partition((3,), 1, (1, 1, 1))))
    assert found[0].makespan_s == pytest.approx(found[1].makespan_s + 3 * 0.5)


@pytest.mark.parametrize(("p", "m", "v"), [(4, 8, 2), (5, 15, 3), (8, 24, 4)])
@pytest.mark.parametrize(("f", "b"), [(1.0, 2.0), (1.25, 1.5)])
def test_equal_stages_have_the_bubble_and_the_activations_of_the_papers(p, m, v, f, b):
    """Idle seconds of a device beyond the work, and what each rank keeps; w = b / 2, f >= w. PipeOffload, section 3."""
    w, half = b / 2, -(-p // 2)
    rows = {
        # name: (chunks, idle seconds, kept by rank; None where no closed form holds)
        "gpipe": (1, (p - 1) * (f + b), [m] * p),
        "1f1b": (1, (p - 1) * (f + b), [p - rank for rank in range(p)]),
        "interleaved_1f1b": (v, (p - 1) * (f + b), None),
        "looped_bfs": (v, (p - 1) * (f + b), None),
        "zb_h1": (1, (p - 1) * (f + w - w), None),
        "gis": (v, (p - 1) * (f + w), [p * (v - 1) + p - rank for rank in range(p)]),
        "gis_h": (v, (p - 1) * (f + w) + (p - half) * (v - 1) * f, None),
    }
    for name, (chunks, idle_s, kept) in rows.items():
        size = m if name != "gis_h" else half * (m // half)  # whole groups
        report = uniform(name, p, size, chunks, f, b)
        assert report.makespan_s == pytest.approx(size * chunks * (f + b) + idle_s), name
        assert kept is None or list(report.peak_activation_bytes) == kept, name
    assert uniform("interleaved_1f1b", p, m, v).peak_activation_bytes[0] == p * v + p - 1
    assert peak(uniform("zb_h1", p, m, 1, f, b)) == p
    assert peak(uniform("gis_h", p, half * (m // half), v)) == half * (v - 1) + p
    if f == w:
        report = uniform("zb_h2", p, m)
        assert report.bubble == pytest.approx(0, abs=1e-9) and report.drift == 0 and peak(report) == 2 * p - 1


@pytest.mark.parametrize(("devices", "chunks"), [(4, 2), pytest.param(8, 4, marks=pytest.mark.nightly)])
def test_offloading_keeps_the_activations_of_table_1_and_transfers_take_turns_between_their_tasks(devices, chunks):
    """Early chunks live longest. Those on their way out or in come on top of what stays: a constant for any d and v."""
    found = [uniform("po_f", devices, 4 * devices, chunks, offload_chunks=moved) for moved in range(chunks + 1)]
    for moved, report in enumerate(found):
        stays = devices * sum(range(chunks - moved + 1)) / chunks
        assert stays <= peak(report) <= stays + 4, moved
        # 1F1B binds one stage, as large as all of a device's chunks.
        assert report.makespan_s < chunks * 3 * (5 * devices - 1)
    for name, moved in (("po_h", -(-chunks // 2)), ("po_f", chunks)):
        assert uniform(name, devices, 4 * devices, chunks).timeline == found[moved].timeline, name
    timeline = found[-1].timeline
    for device in range(devices):
        order = timeline.of_device(device, "offload")
        assert all(timeline.end_s[a] <= timeline.start_s[b] + 1e-9 for a, b in pairwise(order))
    spans = zip(timeline.tasks, timeline.start_s, timeline.end_s, strict=True)
    when = {(task.kind, task.layers, task.micro_batch): (start, end) for task, start, end in spans}
    reloads = [key[1:] for key in when if key[0] is SpanKind.RELOAD]
    assert reloads, "nothing was offloaded"
    for key in reloads:
        kinds = (SpanKind.FORWARD, SpanKind.OFFLOAD, SpanKind.RELOAD, SpanKind.BACKWARD)
        assert all(one[1] <= other[0] for one, other in pairwise([when[(kind, *key)] for kind in kinds]))


def test_mobius_uploads_weights_one_chunk_ahead():
    costs = Costs((LayerCost("layer", 5.0, 2.0, weight_bytes=10),) * 4)
    line = measured("mobius", costs, 1, 1, pcie_bytes_per_s=10.0).timeline
    uploads = [line.start_s[i] for i, task in enumerate(line.tasks) if task.kind is SpanKind.WEIGHTS]
    # 1 s each, forwards at 1, 6, 11, 16: the third upload finds room when the first chunk is done at 6. The
    # last chunk stays for its backward (2 s, the head does not recompute) and the others come once more.
    assert uploads == pytest.approx([0, 1, 6, 11, 16, 23, 30])


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
        unresolved = [1 if kind is SpanKind.FORWARD else -1 for kind in kinds]
        # Admission q_i < N + 1 - i with i from 1 leaves at most N + 1 - i unresolved after it.
        assert max(sum(unresolved[: end + 1]) for end in range(len(unresolved))) <= stages - device
    assert report.drift <= -(-(stages - 1) // accumulate)
    assert all(peak <= stages - device for device, peak in enumerate(report.peak_activation_bytes))
    assert report.makespan_s >= 6 * slowest_s * (1 - 1e-9)
    if len(set(layers)) == 1:
        assert report.drift == -(-(stages - 1) // accumulate)
        assert report.makespan_s == pytest.approx(6 * slowest_s) and report.bubble == pytest.approx(0, abs=1e-9)


def test_drift_counts_updates_of_a_stage_whose_forward_takes_no_time():
    costs = Costs((LayerCost("first", 0.0, 2.0), LayerCost("second", 1.0, 1.0), LayerCost("third", 1.0, 1.0)))
    assert measured("async_1f1b", costs, 3, 6, recompute=False).drift == 2


@given(st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.5]), min_size=1, max_size=8), st.data())
def test_no_other_cut_has_a_faster_slowest_stage(seconds, data):
    stages = data.draw(st.integers(1, len(seconds)))

    def slowest(counts):
        bounds = [sum(counts[:stage]) for stage in range(stages + 1)]
        return max(sum(seconds[start:stop]) for start, stop in pairwise(bounds))

    counts = fastest_split(seconds, stages)
    assert len(counts) == stages and sum(counts) == len(seconds) and min(counts) >= 1
    cuts = combinations(range(1, len(seconds)), stages - 1)
    every = [tuple(b - a for a, b in pairwise((0, *cut, len(seconds)))) for cut in cuts]
    assert slowest(counts) == pytest.approx(min(map(slowest, every)))


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("gis", {"group": 1}, "group of 1 "),
        ("gis", {"group": 5}, "group of 5 "),
        ("po_f", {"offload_ratio": 1.5}, r"1\.50 x"),
        ("po_f", {"offload_chunks": 3}, "offload_chunks = 3 must be between 0 and 2"),
        ("1f1b", {"stages": (3, 3, 2)}, "3 stages do not divide among 4 devices"),
        ("1f1b", {"stages": (1, 1, 1, 1)}, "stages hold 4 layers, the costs 8"),
    ],
)
def test_a_schedule_that_cannot_be_built_is_refused(name, settings, message):
    with pytest.raises(ScheduleError, match=message):
        uniform(name, 4, 8, 2, **settings)
