"""The metrics of a run end with its last step, however it ended, and rates and shares add up."""

import json
import signal

import pytest

from tests.support.small_run import ASYNC, BOUNDED, SEQUENCES, before_step, interrupt, write_text
from torchround.observe.run_page import read_run
from torchround.run.step_meter import StepMeter

VALIDATED = ("--validation.interval_steps=1", '--validation.sources=[{ path = "text.jsonl" }]')
SPARSE = "--metrics.log_every_steps=4"
ONE_STAGE = "--engine.plan={ forward = [], fused = 4, backward = [], rounds = 1 }"


def fails(*_):
    raise OSError("planted")


def logged(small_runs, name):
    return [int(line["step"]) for line in small_runs.steps(name)]


def test_data_that_ends_has_its_last_step_validated_and_in_the_metrics(small_runs):
    write_text(small_runs.folder / "text.jsonl", lines=9)
    # Every step is saved at once, and only the end of the data shows which one was the last.
    ends = ["--training.steps=1000", "--data.epochs=1", "--checkpoint.interval_steps=1", ASYNC]
    validation = ['--validation.sources=[{ path = "text.jsonl" }]', "--validation.interval_steps=1000"]
    assert small_runs("run", *ends, *validation, SPARSE) == 0
    last = small_runs.saved("run")[-1]
    assert last > 4 and last % 4 and logged(small_runs, "run") == [*range(4, last, 4), last]
    line = small_runs.steps("run")[-1]
    assert line["validation_loss"] > 0 and line["loss_steps"] == last % 4
    assert small_runs.saved_state("run", last)["validation"]["loss"] == line["validation_loss"]
    before = small_runs.steps("run")
    assert small_runs("run", *ends, *validation, SPARSE) == 0  # again at the end of the data
    assert small_runs.steps("run") == before


@pytest.mark.nightly
@pytest.mark.parametrize("options", [(ASYNC, ONE_STAGE), (), BOUNDED])
def test_rates_are_tokens_over_the_run_s_own_time_and_shares_are_shares(small_runs, options):
    """The records give the time, so the speed of the machine does not matter."""
    # One long document fills every sequence, so each step has as many tokens.
    (small_runs.folder / "text.jsonl").write_text(json.dumps({"text": "one of the words " * 1000}))
    assert small_runs("run", "--training.steps=100", *options) == 0
    lines = small_runs.steps("run")
    window, tokens = 2 * len(lines[0]["engine"]["busy_s"]), SEQUENCES * 16
    for before, line in zip(lines, lines[window:], strict=False):
        over_s = line["elapsed_s"] - before["elapsed_s"]
        assert line["tokens_per_s"] == pytest.approx(window * tokens / over_s, rel=0.03)
    assert all(0 <= line["bubble"] <= 1 for line in lines)
    page = read_run(small_runs.path("run"), "run")
    assert all(0 <= point[1] <= 1 for curve in page["curves"]["bubble"] for point in curve["points"])


def test_a_signal_leaves_the_last_step_in_the_metrics_and_validates_nothing(small_runs, monkeypatch):
    interval = "--validation.interval_steps=4"
    with monkeypatch.context() as patch:
        before_step(patch, 2, interrupt)
        assert small_runs("run", *VALIDATED, interval, SPARSE) == 128 + signal.SIGTERM
    assert logged(small_runs, "run") == [2]
    assert small_runs("run", *VALIDATED, interval, SPARSE) == 0
    assert logged(small_runs, "run") == [2, 4, 5]
    assert ["validation_loss" in line for line in small_runs.steps("run")] == [False, True, True]


@pytest.mark.parametrize("tells", [True, False])
def test_a_fault_leaves_the_last_finished_step_in_the_metrics_if_its_record_can_be_made(
    small_runs, monkeypatch, caplog, tells
):
    """A device that has failed may not even tell how much memory it held."""
    if not tells:
        monkeypatch.setattr(StepMeter, "record", fails)
    held_out = small_runs.folder / "held-out.jsonl"
    write_text(held_out, lines=4)
    before_step(monkeypatch, 3, held_out.unlink)
    validated = ('--validation.sources=[{ path = "held-out.jsonl" }]', "--validation.interval_steps=3")
    assert small_runs("run", *validated, "--metrics.log_every_steps=100") == 1
    assert small_runs.saved("run") == [3]
    if tells:
        assert logged(small_runs, "run") == [3]
    else:
        assert "the last steps are missing in the metrics: planted" in caplog.text
