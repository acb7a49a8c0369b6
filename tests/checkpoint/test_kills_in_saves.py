"""SIGKILL before any file-system operation of a save: listed checkpoints are whole, and the newest is never lost."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from torchround.checkpoint import Checkpointer, verify_checkpoint

FILE_SYSTEM_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}


def tensors_of(step):
    return {f"{kind}/block.0.w": torch.full((3000,), float(step)) for kind in ("weights", "exp_avg")}


def save(folder, step):
    Checkpointer(folder, keep_latest_k=1).save(step, tensors_of(step), {"step": step})


def save_and_die(folder, step, kill_at):
    """Save, and be killed before the `kill_at`-th operation."""
    seen = 0

    def hook(event, _):
        nonlocal seen
        seen += event in FILE_SYSTEM_EVENTS
        if event in FILE_SYSTEM_EVENTS and seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save(folder, step)


def save_in_child(folder, step, kill_at=0):
    """Save in a forked process, which is killed before its `kill_at`-th operation. Returns whether it was."""
    child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(folder, step, kill_at))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the child neither saved nor was killed"
    return child.exitcode != 0


def check(folder, oldest_allowed):
    """Check that every listed checkpoint is whole, and that the newest one is of `oldest_allowed` or later."""
    checkpointer = Checkpointer(folder)
    listed = [path for path in folder.iterdir() if path.suffix not in (".tmp", ".trash")]
    # A former step-N that its replacement made superfluous is no longer listed.
    listed = [path for path in listed if path.suffix == "" or not path.with_suffix("").exists()]
    assert len(listed) == len(checkpointer.complete_steps()), f"a damaged one is listed: {listed}"
    for path in listed:
        verify_checkpoint(path)
    target = tensors_of(-1)
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step >= oldest_allowed, f"lost step {oldest_allowed}: {listed}"
    assert loaded.state == {"step": loaded.step}
    assert all((tensor == loaded.step).all() for tensor in target.values())


def kill_at_operations(folder, saved_again, every):
    """Kill saves of a new step, or of the newest step again, at each `every`-th operation. Returns how many."""
    torch.set_num_threads(1)
    folder, step, number, kills = Path(folder), 2, 1, 0
    for before in (1, 2):
        save_in_child(folder, before)
    while save_in_child(folder, step if saved_again else step + 1, number):
        check(folder, step)
        step += 2
        assert not save_in_child(folder, step)
        assert [path.name for path in folder.iterdir()] == [f"step-{step}"], "the next save leaves only itself"
        number, kills = number + every, kills + 1
    return kills


BY_NIGHT = [pytest.param(saved_again, 1, marks=pytest.mark.nightly) for saved_again in (True, False)]


@pytest.mark.parametrize(("saved_again", "every"), [(True, 2), *BY_NIGHT])
def test_a_kill_in_a_save_leaves_only_whole_checkpoints_and_loses_none(processes, tmp_path, saved_again, every):
    function = "tests.checkpoint.test_kills_in_saves:kill_at_operations"
    child = processes.run(function, str(tmp_path / "run"), saved_again, every, folder=tmp_path)
    assert 15 // every <= child.wait() < 99, child.text()
