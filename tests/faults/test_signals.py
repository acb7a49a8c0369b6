"""Signals at random moments of a run, also while it saves, and a second one: real processes, real signals."""

import random
import re
import signal
import time

import pytest

from tests.support.processes import is_running
from tests.support.small_run import ASYNC, SmallRuns
from torchround.checkpoint import verify_checkpoint
from torchround.run.early_end import STOP_SIGNALS

STEPS = 25
OFTEN = [f"--training.steps={STEPS}", "--checkpoint.interval_steps=1"]
TRAINS = "tests.support.scenarios:trains"
nightly = pytest.mark.nightly


@pytest.mark.parametrize(
    ("mode", "signals"),
    [
        pytest.param([ASYNC], 1, id="one", marks=nightly),
        pytest.param([], 12, id="sync", marks=nightly),
        pytest.param([ASYNC], 12, id="async", marks=nightly),
    ],
)
def test_stopped_at_random_moments_the_run_says_so_is_saved_there_and_equals_an_uninterrupted_one(
    processes, tmp_path, mode, signals
):
    runs, moment, sent, number = SmallRuns(tmp_path), random.Random(2), 0, 0
    whole = processes.run(TRAINS, ["--run.name=whole", *OFTEN, *mode], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    while sent < signals:
        number += 1
        sent += stop_until_complete(processes, runs, f"run-{number}", mode, moment, signals - sent)
        runs.assert_same(f"run-{number}", "whole", step=STEPS)


def stop_until_complete(processes, runs, name, mode, moment, at_most):
    arguments, stops, last_step = [f"--run.name={name}", *OFTEN, *mode], 0, 0
    while True:
        child = processes.start(TRAINS, arguments, folder=runs.folder)
        number = moment.choice(STOP_SIGNALS)
        if stops < at_most:
            child.wait_until(lambda text: "  step " in text)
            time.sleep(moment.uniform(0, 0.1))
            child.send(number)
        child.wait()
        [(saved, end)] = re.findall(r"saved after step (\d+) of \d+; (.*)$", child.text(), re.MULTILINE)
        assert int(saved) > last_step
        assert verify_checkpoint(runs.checkpoint(name, saved)) == int(saved)
        if end == "the run is complete":  # a signal may still have come on its way out
            return stops
        assert end == "run the same command to continue" and child.wait() == 128 + number, child.text()
        last_step, stops = int(saved), stops + 1


@pytest.mark.parametrize("number", [STOP_SIGNALS[0], *(pytest.param(n, marks=nightly) for n in STOP_SIGNALS[1:])])
def test_a_signal_after_the_last_save_does_not_make_a_complete_run_a_failed_one(processes, tmp_path, number):
    SmallRuns(tmp_path)
    run = processes.run(
        "tests.support.scenarios:is_signalled_on_its_way_out", number, ["--run.name=run"], folder=tmp_path
    )
    assert run.wait() == 0, run.text()
    assert run.text().endswith("saved after step 5 of 5; the run is complete\n")
    assert f"{number.name}: finishing" in run.text() and "interrupted" not in run.text()


@pytest.mark.parametrize("where", ["save", pytest.param("step", marks=nightly)])
def test_a_second_signal_ends_the_run_at_once_and_what_was_saved_before_is_good(processes, tmp_path, where):
    """Step 3, or the save after it, never ends. A group's signal and a launcher's of its own are one request."""
    runs, number, last = SmallRuns(tmp_path), signal.SIGTERM, 5
    often = [f"--training.steps={last}", "--checkpoint.interval_steps=1"]
    child = processes.start("tests.support.scenarios:hangs", where, 3, ["--run.name=run", *often], folder=tmp_path)
    child.wait_until(lambda text: "hanging" in text)
    child.send(number)
    child.wait_until(lambda text: "another signal stops at once" in text)
    child.send(signal.SIGINT)
    child.wait_until(lambda text: text.count("asked") == 2)
    (tmp_path / "later").touch()
    assert is_running(child.pid) and child.text().count("finishing the steps") == 1
    child.send(number)
    assert child.wait() == -number, child.text()
    whole = processes.run(TRAINS, ["--run.name=whole", *often], folder=tmp_path)
    resumed = processes.run(TRAINS, ["--run.name=run", *often], folder=tmp_path)
    assert (whole.wait(), resumed.wait()) == (0, 0), resumed.text()
    # A checkpoint appears only once its step is reported, which happens while the next step is under way.
    assert f"resuming after step {2 if where == 'save' else 1} " in resumed.text()
    runs.assert_same("run", "whole", step=last)
