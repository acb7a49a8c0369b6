"""GPipe, 1F1B, interleaved 1F1B and Looped BFS against closed forms and the published simulation."""

from pathlib import Path

import pytest

from torchround.pipeline.baselines import SCHEDULES, ScheduleReport, SimulationSetup, measure_schedule
from torchround.pipeline.costs import Costs, LayerCost

COSTS = Path(__file__).parents[3] / "docs" / "costs"

# RoundPipe artifact: layers per virtual stage (the head is one more in the last), then bubble in % of GPipe,
# 1F1B, interleaved 1F1B and Looped BFS (RoundPipe, figure 15) with 8 devices and 16 micro-batches.
ONE_STAGE_PER_DEVICE = {
    "qwen3_1.7b": [3, 3, 4, 4, 4, 4, 4, 2],
    "llama3_8b": [4] * 8,
    "gpt_oss_20b": [3] * 8,
    "qwen3_32b": [8] * 8,
    "qwen3_235b_lora": [11, 12, 12, 12, 12, 12, 12, 11],
}
LOOPED = {
    "qwen3_1.7b": [1] * 18 + [2] * 5 + [0],
    "llama3_8b": [1] * 32,
    "gpt_oss_20b": [1] * 24,
    "qwen3_32b": [1] * 64,
    "qwen3_235b_lora": [0] + [1] * 94 + [0],
}
PUBLISHED_BUBBLE = {
    "qwen3_1.7b": {"gpipe": 36.13, "1f1b": 35.19, "interleaved_1f1b": 27.75, "looped_bfs": 25.01},
    "llama3_8b": {"gpipe": 42.08, "1f1b": 42.08, "interleaved_1f1b": 30.64, "looped_bfs": 29.20},
    "gpt_oss_20b": {"gpipe": 41.73, "1f1b": 41.73, "interleaved_1f1b": 30.94, "looped_bfs": 30.39},
    "qwen3_32b": {"gpipe": 34.88, "1f1b": 34.88, "interleaved_1f1b": 15.15, "looped_bfs": 13.68},
    "qwen3_235b_lora": {"gpipe": 31.18, "1f1b": 31.21, "interleaved_1f1b": 5.96, "looped_bfs": 4.39},
}


def uniform(name: str, devices: int, micro_batches: int, chunks: int = 1) -> ScheduleReport:
    """Simulate equal stages: forward 1 s, backward 2 s, one byte kept per stage and micro-batch."""
    costs = Costs(tuple(LayerCost(f"layer.{i}", 1.0, 2.0, activation_bytes=1) for i in range(devices * chunks)))
    setup = SimulationSetup(costs, devices, micro_batches, recompute=False, chunks=chunks)
    return measure_schedule(SCHEDULES[name](setup))


def published(model: str, schedule: str) -> ScheduleReport:
    stages = list((LOOPED if schedule in ("interleaved_1f1b", "looped_bfs") else ONE_STAGE_PER_DEVICE)[model])
    stages[-1] += 1
    costs = Costs.from_json((COSTS / f"rtx4090_{model}.json").read_text())
    return measure_schedule(SCHEDULES[schedule](SimulationSetup(costs, 8, 16, stages=tuple(stages))))


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 4), (4, 8), (8, 16)])
def test_gpipe_and_1f1b_take_three_times_micro_batches_plus_fill(
    schedule: str, devices: int, micro_batches: int
) -> None:
    report = uniform(schedule, devices, micro_batches)
    assert report.makespan_s == pytest.approx(3 * (micro_batches + devices - 1))
    assert report.bubble == pytest.approx((devices - 1) / (micro_batches + devices - 1))


@pytest.mark.parametrize(("devices", "micro_batches"), [(4, 4), (4, 8), (8, 16)])
def test_1f1b_keeps_fewer_micro_batches_the_later_the_stage_and_gpipe_keeps_all(
    devices: int, micro_batches: int
) -> None:
    assert uniform("1f1b", devices, micro_batches).peak_activation_bytes == tuple(range(devices, 0, -1))
    assert uniform("gpipe", devices, micro_batches).peak_activation_bytes == (micro_batches,) * devices


@pytest.mark.parametrize(("devices", "micro_batches", "chunks"), [(4, 8, 2), (8, 16, 3), (4, 12, 4)])
def test_interleaving_divides_the_bubble_by_the_chunks(devices: int, micro_batches: int, chunks: int) -> None:
    for schedule in ("interleaved_1f1b", "looped_bfs"):
        report = uniform(schedule, devices, micro_batches, chunks)
        assert report.makespan_s == pytest.approx(3 * (micro_batches * chunks + devices - 1))
        efficiency = micro_batches * chunks / (micro_batches * chunks + devices - 1)  # PACI equation 4
        assert 1 - report.bubble == pytest.approx(efficiency)
    # PipeOffload section 3.1: d v + d - 1 chunks on rank 0.
    interleaved = uniform("interleaved_1f1b", devices, micro_batches, chunks)
    assert interleaved.peak_activation_bytes[0] == devices * chunks + devices - 1


@pytest.mark.parametrize("model", PUBLISHED_BUBBLE)
def test_bound_schedules_reproduce_their_published_bubbles(model: str) -> None:
    for schedule, bubble in PUBLISHED_BUBBLE[model].items():
        assert published(model, schedule).bubble * 100 == pytest.approx(bubble, abs=0.006)


@pytest.mark.parametrize(
    ("model", "schedule", "fill", "switch", "drain", "imbalance"),
    [  # the artifact's log, in %
        ("qwen3_1.7b", "1f1b", 3.4166, 12.2226, 10.2792, 9.2722),
        ("llama3_8b", "gpipe", 2.9934, 18.8715, 9.3834, 10.8309),
        ("gpt_oss_20b", "interleaved_1f1b", 0.9219, 4.9852, 4.0773, 20.9570),
        ("qwen3_235b_lora", "looped_bfs", 0.5773, 1.8106, 1.9683, 0.0376),
    ],
)
def test_idle_time_splits_by_kind_as_published(
    model: str, schedule: str, fill: float, switch: float, drain: float, imbalance: float
) -> None:
    shares = {kind: 100 * share for kind, share in published(model, schedule).bubble_by_kind.items()}
    expected = {"fill": fill, "drain": drain, "switch": switch, "imbalance": imbalance}
    assert shares == pytest.approx(expected, abs=1e-4)


def test_mobius_without_transfer_time_is_looped_bfs_and_holds_one_stage() -> None:
    costs = Costs(
        tuple(LayerCost(f"{i}", 1.0, 2.0, activation_bytes=10, boundary_bytes=1) for i in range(8)), hop_s=0.1
    )
    setup = SimulationSetup(costs, 4, 8)
    looped, mobius = (measure_schedule(SCHEDULES[name](setup)) for name in ("looped_bfs", "mobius"))
    assert mobius.makespan_s == pytest.approx(looped.makespan_s)
    assert max(mobius.peak_activation_bytes) <= 11 < max(looped.peak_activation_bytes)


def test_mobius_waits_for_weights_that_cannot_be_uploaded_in_time() -> None:
    layers = tuple(LayerCost(f"{i}", 1.0, 2.0, weight_bytes=100, gradient_bytes=40) for i in range(4))
    setup = SimulationSetup(Costs(layers), 2, 1, pcie_bytes_per_s=10.0)
    # Device 1: two uploads of 10 s each before its second chunk's forward; chunk 3 runs forward and backward
    # in one stay. Its first chunk's weights (10 s) come again as soon as that chunk's slot is free.
    line = measure_schedule(SCHEDULES["mobius"](setup)).timeline
    first_forward = [line.start_s[i] for i, task in enumerate(line.tasks) if task.kind.value == "forward"]
    assert sorted(first_forward) == pytest.approx([10, 11, 20, 21])
    uploads = [i for i, task in enumerate(line.tasks) if task.kind.value == "weights"]
    assert len(uploads) == 2 * 3
    assert line.makespan_s > 20 + 10


def test_mobius_uploads_the_next_chunk_while_one_computes_and_no_further() -> None:
    layers = tuple(LayerCost(f"{i}", 5.0, 2.0, weight_bytes=10) for i in range(4))
    line = measure_schedule(SCHEDULES["mobius"](SimulationSetup(Costs(layers), 1, 1, pcie_bytes_per_s=10.0))).timeline
    uploads = [line.start_s[i] for i, task in enumerate(line.tasks) if task.kind.value == "weights"]
    # 1 s each, forwards at 1, 6, 11, 16: the third upload finds room when the first chunk is done at 6. The
    # last chunk stays for its backward (2 s, the head does not recompute) and the others come once more.
    assert uploads[:4] == pytest.approx([0, 1, 6, 11])
    assert uploads[4:] == pytest.approx([16, 23, 30])
