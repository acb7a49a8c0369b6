"""The picture of a run's losses: everything in its metrics is drawn, and a failure is only a warning."""

import json
import logging
import sys

import pytest

from scripts import plot_loss
from tests.support.step_records import write_run
from torchround.observe.loss_curve import draw_curves, draw_run, read_losses

PNG = b"\x89PNG"


def test_the_curve_of_a_resumed_run_has_all_its_parts_and_no_step_twice(tmp_path):
    write_run(tmp_path, range(1, 8))
    write_run(tmp_path, range(5, 11))  # resumed from the checkpoint after step 4
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 11, "loss": 2.0, "validation_loss": 2.5}) + "\n")
    curve = read_losses(tmp_path)
    assert curve.steps == list(range(1, 12))
    assert curve.losses == [*(10.0 / step for step in range(1, 11)), 2.0]
    assert (curve.validated_steps, curve.validation_losses) == ([11], [2.5])


@pytest.mark.parametrize(("steps", "name"), [(300, "costs $5 and _more_"), (2, "_hidden")])
def test_a_run_that_has_ended_has_a_picture(tmp_path, steps, name):
    folder = write_run(tmp_path / name, range(1, steps + 1), validation_loss=1.0)
    (folder / "loss.png").write_text("the picture before")
    draw_run(folder)
    assert (folder / "loss.png").read_bytes().startswith(PNG)
    assert sorted(path.name for path in folder.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_runs_without_a_curve_have_no_picture(tmp_path, caplog):
    draw_run(write_run(tmp_path / "one step", range(1, 2)))
    assert not (tmp_path / "one step" / "loss.png").exists() and not caplog.messages
    draw_run(tmp_path)
    assert len(caplog.messages) == 1, "no metrics"
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": null}\n')
    with pytest.raises(ValueError, match="no loss"):
        draw_curves([read_losses(tmp_path)], tmp_path / "loss.png")


def test_a_machine_without_matplotlib_gets_one_warning_and_no_failure(tmp_path, monkeypatch, caplog):
    write_run(tmp_path, range(1, 4))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with caplog.at_level(logging.WARNING):
        draw_run(tmp_path)
    (warning,) = caplog.messages
    assert "loss.png was not drawn: ModuleNotFoundError" in warning


def test_the_command_draws_several_runs_over_each_other(tmp_path, capsys):
    runs = [write_run(tmp_path / name, range(1, 5)) for name in ("first", "second")]
    picture = tmp_path / "both.png"
    assert plot_loss.main([*map(str, runs), "--output", str(picture)]) == 0
    assert capsys.readouterr().out == f"{picture}\n"
    assert picture.read_bytes().startswith(PNG)
    assert plot_loss.main([str(tmp_path / "missing")]) == 2
    printed = capsys.readouterr().err
    assert "missing/metrics.jsonl" in printed and "Errno" not in printed
