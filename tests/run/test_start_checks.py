"""Room for checkpoints, known at the start and awaited at the end, and a fault before the first update."""

import errno
import re
import shutil
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest

import torchround.run.checkpoints
from tests.support.small_run import ASYNC, BOUNDED, COMPACT, STEPS, TIED
from torchround.checkpoint import Checkpointer, CheckpointError, NoSpaceError
from torchround.checkpoint.checkpointer import MOST_WAIT_S, RETRY_S, save_with_patience
from torchround.commands import train_model
from torchround.config import parse_command_line
from torchround.engine.store.bundles import ALIGNMENT_ELEMENTS
from torchround.optim.formats import BLOCK
from torchround.planning.run_question import ONE_MACHINE
from torchround.run.run_folder import checkpoint_bytes
from torchround.run.several_machines import RunMachines


def disk_of(monkeypatch, free_bytes):
    total = 0 if free_bytes is None else 10**12
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=total, free=free_bytes or 0))


BFLOAT16, MUON = "--training.dtype=bfloat16", "--optimizer.name=muon"


@pytest.mark.parametrize(
    "mode",
    [[ASYNC, BFLOAT16, "--lora.rank=2"], [TIED, COMPACT], [BFLOAT16, *BOUNDED], [BFLOAT16, ASYNC, MUON, COMPACT]],
    ids=" ".join,
)
def test_the_size_of_a_checkpoint_is_known_before_anything_is_allocated(small_runs, mode):
    options = parse_command_line(["--config", "small.toml", "--run.name=run", "--training.steps=1", *mode])
    alone = RunMachines()
    parts = train_model.build(options, alone, ONE_MACHINE)
    assert small_runs("run", "--training.steps=1", *mode) == 0
    saved, padded_bytes = small_runs.state("run", 1), 0.0
    for name, view in saved.items():
        kind, _, parameter = name.partition("/")
        # A plan counts the padding between parameters, which is not saved.
        numel = saved[f"weights/{parameter}"].numel()
        padded = -(-numel // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        padded_bytes += view.element_size() * padded / (BLOCK if kind.endswith("_scale") else 1)
    assert checkpoint_bytes(parts.question) == padded_bytes


def test_a_disk_that_cannot_hold_one_checkpoint_is_refused(small_runs, monkeypatch, capsys):
    longer = ["--training.steps=4", "--lr_schedule.decay=none"]
    assert small_runs("complete", *longer) == 0
    disk_of(monkeypatch, 150_000)
    for more in ([], ["--dry-run"]):
        capsys.readouterr()
        assert small_runs("run", *more) == 2
        printed = capsys.readouterr()
        said = r"a checkpoint takes 0\.1\d MiB; 0\.14 MiB are free"
        assert re.search(f"run.folder: outputs/run: {said}", printed.err), printed.err
        assert re.search(said, printed.out) and "new run" not in printed.out
        assert not (small_runs.path("run") / "config.toml").exists()
    # A complete run saves nothing more.
    assert small_runs("complete", *longer) == 0
    disk_of(monkeypatch, None)
    assert small_runs("elsewhere", "--training.steps=1") == 0, "a file system that does not say what is free"


def full_for(tries):
    left = [tries]

    def save():
        left[0] -= 1
        if left[0] >= 0:
            raise NoSpaceError("full")

    return save


@pytest.mark.parametrize(("tries", "waited_s"), [(3, 3 * RETRY_S), (10**9, MOST_WAIT_S)])
def test_the_last_save_waits_for_space_for_a_minute(caplog, tries, waited_s):
    slept = []
    ends = pytest.raises(NoSpaceError) if tries > 3 else nullcontext()
    with ends:
        save_with_patience(full_for(tries), slept.append)
    assert sum(slept) == waited_s and len(caplog.messages) == 1


def test_another_error_of_the_last_save_is_not_waited_for():
    def broken():
        raise CheckpointError("read-only")

    with pytest.raises(CheckpointError, match="read-only"):
        save_with_patience(broken, pytest.fail)


def test_a_run_whose_disk_is_full_at_its_last_step_saves_once_there_is_space(small_runs, monkeypatch):
    assert small_runs("whole") == 0
    tries = [0]
    clear = Checkpointer.clear_leftovers

    def full_twice(self):
        tries[0] += 1
        if tries[0] <= 2:
            raise OSError(errno.ENOSPC, "planted")
        clear(self)

    slept = []
    patient = partial(save_with_patience, sleep=slept.append)
    for owner, name, value in (
        (Checkpointer, "clear_leftovers", full_twice),
        (torchround.run.checkpoints, "save_with_patience", patient),
    ):
        monkeypatch.setattr(owner, name, value)
    assert small_runs("run") == 0
    assert tries == [3] and slept == [RETRY_S, RETRY_S]
    small_runs.assert_same("run", "whole", STEPS)
