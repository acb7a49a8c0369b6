"""A dry run predicts what the run then counts for itself."""

import json
import re

import pytest

from tests.support.small_run import TIED, files_of, small_runs

__all__ = ["small_runs"]


@pytest.mark.parametrize("more", [[TIED], ["--engine.plan=none", "--engine.rounds=2"]])
def test_a_dry_run_shows_the_runs_plan_and_its_distance_from_the_fastest(small_runs, capsys, more):
    overrides = ["--engine.measure_steps=0", *more]
    before = files_of(small_runs.folder)
    assert small_runs("run", *overrides, "--dry-run", "--engine.device_memory_gib=1e-4") == 2
    capsys.readouterr()
    assert small_runs("run", *overrides, "--dry-run", "--print-config") == 0
    assert files_of(small_runs.folder) == before and not small_runs.path("run").exists()
    predicted = capsys.readouterr().out
    assert "[training]" in predicted and "optimizer state" in predicted and "each device needs" in predicted
    assert "engine.plan left out" not in predicted or "--engine.plan=none" not in more
    assert small_runs("run", *overrides) == 0
    printed = capsys.readouterr().out
    summaries = [re.search(r"\d+ micro-batches in .*per\s+device", text, re.DOTALL) for text in (predicted, printed)]
    first, second = (" ".join(match[0].split()) if match else "" for match in summaries)
    assert first == second != ""
    plan = json.loads((small_runs.path("run") / "plan.json").read_text())
    assert f"bubble (idle share of the devices) {100 * plan['bubble']:.2f} %" in first
