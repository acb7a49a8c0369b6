"""Signals at random moments of a run, also while it saves, and a second one: real processes, real signals."""

import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.small_run import ASYNC, SmallRuns
from torchround.checkpoint import verify_checkpoint
from torchround.run.early_end import SAME_REQUEST_S, STOP_SIGNALS

SIGNALS = 12  # for each way to train
STEPS = 25
OFTEN = [f"--training.steps={STEPS}", "--checkpoint.interval_steps=1"]


@pytest.mark.parametrize("mode", [[], [ASYNC]], ids=["sync", "async"])
def test_stopped_at_random_moments_the_run_says_so_is_saved_there_and_equals_an_uninterrupted_one(
    fork_server: ForkServer, tmp_path: Path, mode: list[str]
) -> None:
    runs, moment, sent, number = SmallRuns(tmp_path), random.Random(2), 0, 0
    whole = fork_server.run("trains", ["--run.name=whole", *OFTEN, *mode], folder=tmp_path)
    assert whole.wait() == 0, whole.text()
    while sent < SIGNALS:
        number += 1
        sent += stop_until_complete(fork_server, runs, f"run-{number}", mode, moment, SIGNALS - sent)
        runs.assert_same(f"run-{number}", "whole", step=STEPS)


def stop_until_complete(
    fork_server: ForkServer, runs: SmallRuns, name: str, mode: list[str], moment: random.Random, at_most: int
) -> int:
    """Stop a run and start it again until it is complete. Returns the number of stops."""
    arguments, stops, last_step = [f"--run.name={name}", *OFTEN, *mode], 0, 0
    while True:
        child = fork_server.start("trains", arguments, folder=runs.folder)
        number = moment.choice(STOP_SIGNALS)
        if stops < at_most:
            child.wait_until(lambda text: "  step " in text)
            time.sleep(moment.uniform(0, 0.1))
            child.send(number)
        child.wait()
        [(saved, end)] = re.findall(r"saved after step (\d+) of \d+; (.*)$", child.text(), re.MULTILINE)
        assert int(saved) > last_step
        assert verify_checkpoint(runs.path(name) / "checkpoints" / f"step-{saved}") == int(saved)
        if end == "the run is complete":  # a signal may still have come on its way out
            return stops
        assert end == "run the same command to continue" and child.wait() == 128 + number, child.text()
        last_step, stops = int(saved), stops + 1


@pytest.mark.parametrize("number", STOP_SIGNALS, ids=lambda number: number.name)
def test_a_signal_after_the_last_save_does_not_make_a_complete_run_a_failed_one(
    fork_server: ForkServer, tmp_path: Path, number: signal.Signals
) -> None:
    SmallRuns(tmp_path)
    run = fork_server.run("is_signalled_on_its_way_out", number, ["--run.name=run"], folder=tmp_path)
    assert run.wait() == 0, run.text()
    assert run.text().endswith("saved after step 5 of 5; the run is complete\n")
    assert f"{number.name}: finishing" in run.text() and "interrupted" not in run.text()


@pytest.mark.parametrize("while_saving", [False, True], ids=["in a step", "in a save"])
def test_a_second_signal_ends_the_run_at_once_and_what_was_saved_before_is_good(
    fork_server: ForkServer, tmp_path: Path, while_saving: bool
) -> None:
    """Step 3, or the save after it, never ends."""
    runs, number = SmallRuns(tmp_path), signal.SIGTERM
    arguments = ["--run.name=run", *OFTEN]
    child = fork_server.start("hangs", "save" if while_saving else "step", 3, arguments, folder=tmp_path)
    child.wait_until(lambda text: "hanging" in text)
    child.send(number)
    child.wait_until(lambda text: "another signal stops at once" in text)
    time.sleep(SAME_REQUEST_S + 0.1)
    child.send(number)
    assert child.wait() == -number, child.text()
    whole = fork_server.run("trains", ["--run.name=whole", *OFTEN], folder=tmp_path)
    resumed = fork_server.run("trains", arguments, folder=tmp_path)
    assert (whole.wait(), resumed.wait()) == (0, 0), resumed.text()
    # A checkpoint appears only once its step is reported, which happens while the next step is under way.
    saved_before = 2 if while_saving else 1
    assert f"resuming after step {saved_before} " in resumed.text()
    runs.assert_same("run", "whole", step=STEPS)
