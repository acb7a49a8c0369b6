"""metrics.jsonl: whole lines only, no step twice, and no written line lost."""

import json

import pytest

from tests.support.disks import files_limited_to
from tests.support.step_records import ENGINE, record
from torchround.observe.metrics_file import MetricsFile


def steps_in(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    lines = path.read_text().splitlines()
    return [json.loads(line, parse_constant=refuse)["step"] for line in lines]


def write(path, steps, after_step=0):
    file = MetricsFile(path, after_step)
    for step in steps:
        file.log(record(step))
    file.close()


def test_a_record_is_one_object_with_the_documented_keys(tmp_path):
    path = tmp_path / "outputs" / "run" / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(record(1, mfu=0.5))
    file.log(record(2, validation_loss=2.5))
    file.log(record(3, loss=float("nan"), grad_norm=float("inf"), validation_loss=1000.0))
    file.log(record(4, **ENGINE))
    file.close()
    assert steps_in(path) == [1, 2, 3, 4]
    first, second, third, fourth = map(json.loads, path.read_text().splitlines())
    assert third["loss"] is third["grad_norm"] is third["validation_perplexity"] is None
    assert first["mfu"] == 0.5 and first["device_peak_gib"] is None and first["tokens"] == 4096
    validated = {"validation_loss": 2.5, "validation_perplexity": pytest.approx(12.182, abs=1e-3)}
    assert second == {**first, "step": 2, "mfu": None, **validated}
    engine = fourth["engine"]
    assert list(fourth)[-1] == "engine" and fourth["device_peak_gib"] == 2.0
    assert engine["device_peak_gib"] == [2.0, 2.0] and engine["optimizer_exposed_s"] == 0.01
    assert engine["uploaded_gib"] == [1.5, 1.5] and engine["host_allocations"] == 0


def test_a_resume_drops_the_later_steps_and_repeats_none(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 5))
    write(path, range(1, 16))  # a new run keeps no line of an earlier attempt
    write(path, range(11, 21), after_step=10)
    assert steps_in(path) == list(range(1, 21))
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl"}


@pytest.mark.parametrize(
    "rest", ['{"step": 4, "loss"', '{"step": 4}', "[4]\n", '{"loss": 1}\n', '{"step": "4"}\n', "\x00\xff\n"]
)
def test_half_lines_and_foreign_lines_are_dropped(tmp_path, rest):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, 4))
    with open(path, "ab") as file:
        file.write(rest.encode("latin-1"))
    write(path, range(4, 6), after_step=100)
    assert steps_in(path) == [1, 2, 3, 4, 5]


def test_a_failed_write_leaves_no_half_line_and_the_next_write_adds_its_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    file.log(record(1))
    with files_limited_to(path.stat().st_size + 20):
        for step in (2, 3):
            with pytest.raises(OSError):
                file.log(record(step))
    file.log(record(4))
    with files_limited_to(path.stat().st_size + 20):
        with pytest.raises(OSError):
            file.log(record(5))
        assert steps_in(path) == [1, 2, 3, 4]
    file.close()
    file.close()
    assert steps_in(path) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("earlier_steps", [3, 5], ids=["nothing to drop", "two steps to drop"])
def test_a_disk_that_is_full_at_the_start_costs_no_line(tmp_path, earlier_steps):
    path = tmp_path / "metrics.jsonl"
    write(path, range(1, earlier_steps + 1))
    before = path.read_bytes()
    with files_limited_to(20):
        file = MetricsFile(path, after_step=3)
        for step in (4, 5):
            with pytest.raises(OSError):
                file.log(record(step))
        assert path.read_bytes() == before
    file.log(record(6))
    assert steps_in(path) == [1, 2, 3, 4, 5, 6]
    file.close()
    assert {file.name for file in tmp_path.iterdir()} == {"metrics.jsonl"}


def test_a_file_that_can_only_be_opened_at_the_end_has_every_line(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.write_text("a file where the folder should be")
    file = MetricsFile(path)
    with pytest.raises(OSError):
        file.log(record(1))
    path.parent.unlink()
    file.close()
    file.close()
    assert steps_in(path) == [1]
