"""Runs in this process with faults of disks, steps and gradients, and mistakes that only the machine shows."""

import contextlib
import io
import logging
import os
import socket

import pytest

from tests.support.faults import PlantedError
from tests.support.small_run import STEPS, awaiting_saves, before_forward, before_step, flip_last_bit
from torchround.checkpoint.folders import checkpoint_name
from torchround.config import RunTable
from torchround.engine import engine as controller
from torchround.run.run_folder import RunFolder


def file_for_checkpoints(small_runs):
    obstacle = small_runs.path("run") / "checkpoints"
    obstacle.parent.mkdir(parents=True)
    obstacle.touch()
    return obstacle


def test_a_failed_save_before_a_fault_is_not_reported_as_one_that_will_be_retried(small_runs, monkeypatch, caplog):
    obstacle = file_for_checkpoints(small_runs)
    saves_ended = awaiting_saves(monkeypatch)

    def fail():
        saves_ended(1)
        obstacle.unlink()
        raise PlantedError

    before_step(monkeypatch, 3, fail)
    with pytest.raises(PlantedError):
        small_runs("run", "--checkpoint.interval_steps=2")
    [warning] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "step 2 could not be written" in warning and "training continues" not in warning
    assert len(small_runs.saved("run")) == 1


@pytest.mark.parametrize("interval", [0, STEPS])
def test_a_last_checkpoint_that_cannot_be_written_is_a_fault(small_runs, capsys, caplog, interval):
    """Also if its step is due to be saved beside training: no warning says then that training continues."""
    file_for_checkpoints(small_runs)
    assert small_runs("run", f"--checkpoint.interval_steps={interval}") == 1
    message = capsys.readouterr().err
    assert message.startswith("CheckpointError: the checkpoint of step 5 could not be written")
    assert "Traceback" not in message and caplog.text == ""
    assert len(small_runs.steps("run")) == STEPS


def test_a_stage_that_hangs_is_reported_after_the_timeout_and_the_state_is_saved(
    small_runs, monkeypatch, capsys, over, planted
):
    """The watchdog looks only once the stage hangs, so that a slow machine shows no hang before."""
    monkeypatch.setattr(controller, "JOIN_S", 0.2)

    def hang(call):
        if call == 14:  # step 3: calls 13 to 18
            planted.set()
            over.wait()

    before_forward(monkeypatch, 0, hang)
    assert small_runs("run", "--engine.hang_timeout_s=1.0") == 1
    message = capsys.readouterr().err
    assert "HangError: controller: nothing moved for 1 s" in message and "engine.hang_timeout_s" in message
    assert "Traceback" not in message
    assert small_runs.saved("run") == [2]


class Console(io.StringIO):
    is_closed = False

    def write(self, text):
        if self.is_closed:
            raise BrokenPipeError
        return super().write(text)


def test_a_console_that_is_closed_does_not_end_the_run(small_runs, monkeypatch):
    console = Console()
    before_step(monkeypatch, 2, lambda: setattr(console, "is_closed", True))
    with contextlib.redirect_stdout(console):
        assert small_runs("run", "--checkpoint.interval_steps=2") == 0
    assert len(small_runs.steps("run")) == STEPS and console.getvalue()


def test_a_folder_in_use_is_refused(small_runs, capsys):
    with RunFolder(RunTable(name="run", folder="outputs")):
        assert small_runs("run") == 2
    assert f"in use by process {os.getpid()} on {socket.gethostname()}" in capsys.readouterr().err


NO_FILE = "DataFileError: text.jsonl: cannot be read: No such file or directory"
NO_JSON = "DataError: text.jsonl, line 5"


@pytest.mark.parametrize(
    ("said", "mode"), [pytest.param(NO_FILE, "stop", marks=pytest.mark.nightly), (NO_FILE, "skip"), (NO_JSON, "stop")]
)
def test_data_that_fail_end_the_run_after_a_save_and_repaired_they_give_the_same_bits(
    small_runs, monkeypatch, capsys, said, mode
):
    # With shuffled sequences, all of this small file would be read before the first step.
    overrides = [f"--data.on_bad_record={mode}", "--data.shuffle_sequences=0"]
    overrides += ["--data.shuffle=false", "--data.num_workers=2"] * (said == NO_JSON)
    assert small_runs("whole", *overrides) == 0
    text = small_runs.folder / "text.jsonl"
    content = text.read_text()
    lines = content.splitlines(keepends=True)
    with monkeypatch.context() as patch:
        if said == NO_FILE:
            before_step(patch, 3, text.unlink)
        else:
            text.write_text("".join([*lines[:4], lines[4].replace('"text"', "'text'"), *lines[5:]]))
        assert small_runs("run", *overrides) == 1
    [last] = small_runs.saved("run")
    assert 0 < last < STEPS and list(small_runs.losses("run")) == list(range(1, last + 1))
    assert capsys.readouterr().err.splitlines()[-1].startswith(said)
    text.write_text(content)
    assert small_runs("run", *overrides) == 0
    small_runs.assert_same("run", "whole")


def test_a_complete_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(small_runs, caplog, capsys):
    """All sizes stay the same, so a check of sizes alone would call the run complete."""
    every_second = ["--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=0"]
    assert small_runs("whole") == 0 and small_runs("run", *every_second) == 0
    path = small_runs.checkpoint("run", STEPS) / "tensors-00000.safetensors"
    flip_last_bit(path)
    assert small_runs("run", *every_second) == 0
    assert f"{checkpoint_name(STEPS)}: {path.name} has checksum" in caplog.text
    assert "resuming after step 4 " in capsys.readouterr().out
    small_runs.assert_same("run", "whole")
    assert small_runs("run", *every_second) == 0 and "nothing to do" in capsys.readouterr().out
