"""The picture of a run's losses: everything in its metrics is drawn, and a failure is only a warning."""

import json
import logging
import sys
from pathlib import Path

import pytest

from scripts import plot_loss
from tests.support.step_records import write_run
from torchround.observe.loss_curve import draw_curves, draw_run, read_losses

PNG = b"\x89PNG"


def test_the_curve_of_a_resumed_run_has_all_its_parts_and_no_step_twice(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 8))
    write_run(tmp_path, range(5, 11))  # resumed from the checkpoint after step 4
    curve = read_losses(tmp_path)
    assert curve.steps == list(range(1, 11))
    assert curve.losses == [10.0 / step for step in range(1, 11)]


def test_validation_losses_are_read_at_the_steps_that_have_one(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 5, "loss": 2.0, "validation_loss": 2.5}) + "\n")
    curve = read_losses(tmp_path)
    assert (curve.validated_steps, curve.validation_losses) == ([5], [2.5])


@pytest.mark.parametrize("line", ['{"step": 3, "lo', '{"step": 3, "loss": null}', "[1]", '{"loss": 1.0}', "\udcff"])
def test_lines_without_a_step_and_a_finite_loss_are_left_out(tmp_path: Path, line: str) -> None:
    write_run(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(line.encode("utf-8", "surrogateescape"))
    assert read_losses(tmp_path).steps == [1, 2]


@pytest.mark.parametrize("steps", [2, 300])
@pytest.mark.parametrize("name", ["run", "costs $5 and _more_", "_hidden"])
def test_a_run_that_has_ended_has_a_picture(tmp_path: Path, steps: int, name: str) -> None:
    folder = write_run(tmp_path / name, range(1, steps + 1), validation_loss=1.0)
    draw_run(folder)
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_a_run_of_one_logged_step_has_no_curve(tmp_path: Path) -> None:
    draw_run(write_run(tmp_path, range(1, 2)))
    assert not (tmp_path / "loss.png").exists()


def test_a_picture_replaces_the_one_before(tmp_path: Path) -> None:
    write_run(tmp_path, range(1, 4))
    draw_run(tmp_path)
    first = (tmp_path / "loss.png").read_bytes()
    write_run(tmp_path, range(4, 9))
    draw_run(tmp_path)
    assert (tmp_path / "loss.png").read_bytes() != first


def test_a_machine_without_matplotlib_gets_one_warning_and_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_run(tmp_path, range(1, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        draw_run(tmp_path)
    (warning,) = caplog.messages
    assert "loss.png was not drawn: ModuleNotFoundError" in warning


def test_a_folder_without_metrics_is_a_warning_at_the_end_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    draw_run(tmp_path)
    assert len(caplog.messages) == 1


def test_curves_without_any_loss_are_refused(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    with pytest.raises(ValueError, match="no loss to draw"):
        draw_curves([read_losses(tmp_path)], tmp_path / "loss.png")


def test_the_command_draws_several_runs_over_each_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [write_run(tmp_path / name, range(1, 5)) for name in ("first", "second")]
    picture = tmp_path / "both.png"
    assert plot_loss.main([*map(str, runs), "--output", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(PNG)


def test_the_command_names_a_folder_that_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plot_loss.main([str(tmp_path / "missing")]) == 2
    printed = capsys.readouterr().err
    assert "missing/metrics.jsonl is not there; legal:" in printed and "Errno" not in printed
