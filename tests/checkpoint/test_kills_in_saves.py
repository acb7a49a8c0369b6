"""Deaths at any moment of a save, of one machine or several: one whole checkpoint is left for all, none is lost."""

import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.support.joint_teams import Killed, together
from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.folders import DELETED, UNFINISHED, checkpoint_name

MACHINES = 2
ALL = MACHINES  # in the place of a rank: every machine dies
# Who dies, and whether the newest step is saved again.
EVERY_SAVE = list(itertools.product(range(MACHINES + 1), (False, True)))
CHANGES = ["os.mkdir", "os.rename", "os.remove", "os.rmdir"]
FILE_SYSTEM_EVENTS = ["open", *CHANGES, "os.scandir", "os.listdir"]


class Death:
    """Machine `rank` dies instead of its `number`-th operation. `ALL`: all die as soon as any machine has come to it."""

    def __init__(self, rank, number):
        self.rank, self.number = rank, number
        self.counts, self.has_come = Counter(), False

    def pass_by(self, rank):
        if self.has_come and self.rank == ALL:
            raise Killed
        self.counts[rank] += 1
        if self.rank in (rank, ALL) and self.counts[rank] == self.number:
            self.has_come = True
            raise Killed


def tensors_of(rank, step):
    return {f"{kind}/block.{rank}.w": torch.full((300,), float(step)) for kind in ("weights", "exp_avg")}


class DyingCheckpointer(Checkpointer):
    """Checkpoints of a machine that may also die before the folders of a step change."""

    death = None

    def publish(self, step):
        self._pass_by()
        super().publish(step)

    def delete(self, paths):
        self._pass_by()
        super().delete(paths)

    def _pass_by(self):
        if self.death is not None:
            self.death.pass_by(self.team.rank)


def save(root, step, mark, death=None):
    def work(team):
        checkpointer = DyingCheckpointer(root / "run", keep_latest_k=1, team=team)
        checkpointer.death = death
        checkpointer.save(step, tensors_of(team.rank, mark), {"mark": mark})
        return True

    before_exchange = death.pass_by if death else lambda rank: None
    return together(MACHINES, work, before_exchange) == [True] * MACHINES


def check(root, former, new):
    """Check that all machines load the former (step, mark) or the new one, whole, and that the next save leaves only itself."""

    def load(team):
        tensors = tensors_of(team.rank, -1)
        loaded = Checkpointer(root / "run", team=team).load_latest(tensors)
        assert loaded is not None, "there is no checkpoint"
        assert all((tensor == loaded.state["mark"]).all() for tensor in tensors.values()), "a mixture of two saves"
        return loaded.step, loaded.state["mark"]

    found = together(MACHINES, load)
    assert found[0] == found[1] and found[0] in (former, new), f"{found}, expected {former} or {new}"
    # The next save clears what the first death left. A death in it must not take what was loaded.
    step, mark = new
    assert not save(root, step + 1, mark + 1, Death(ALL, 4))
    assert together(MACHINES, load) == found
    assert save(root, step + 1, mark + 1)
    assert [path.name for path in (root / "run").iterdir()] == [checkpoint_name(step + 1)]


def kill_everywhere(root, saves=EVERY_SAVE, hooked=None):
    """Kill each machine, and all at once, before its 1st, 2nd, .. operation of a save, until a save has no such operation.

    The save is of a new step, or of the newest one again. Operations are exchanges and changes of a step's folders, or
    those of the file system that a hook counts for the deaths in `hooked`. Returns the number of kills.
    """
    step, mark, kills = 1, 1, 0
    assert save(root, step, mark)
    for rank, is_again in saves:
        for number in itertools.count(1):
            new, death = (step if is_again else step + 1, mark + 1), Death(rank, number)
            if hooked is None:
                save(root, *new, death)
            else:
                hooked.append(death)
                save(root, *new)
                hooked.clear()
            check(root, (step, mark), new)
            step, mark = new[0] + 1, new[1] + 1
            if not death.has_come:
                break
            kills += 1
    return kills


def kill_at_file_operations(root):
    """Be a process of its own, since a hook cannot be removed."""
    hooked = []

    def hook(event, _):
        name = threading.current_thread().name
        if hooked and event in FILE_SYSTEM_EVENTS and name.isdecimal():
            hooked[0].pass_by(int(name))

    torch.set_num_threads(1)
    sys.addaudithook(hook)
    return kill_everywhere(Path(root), hooked=hooked)


@pytest.mark.parametrize("saves", [EVERY_SAVE[::3], pytest.param(EVERY_SAVE, marks=pytest.mark.nightly)], ids=len)
def test_a_death_before_any_exchange_of_a_joint_save_leaves_one_whole_checkpoint_for_all(tmp_path, saves):
    assert kill_everywhere(tmp_path, saves) >= 4 * len(saves)


@pytest.mark.nightly
def test_a_death_before_any_operation_of_the_file_system_leaves_one_whole_checkpoint_for_all(processes, tmp_path):
    function = "tests.checkpoint.test_kills_in_saves:kill_at_file_operations"
    child = processes.run(function, str(tmp_path), folder=tmp_path)
    assert 80 <= child.wait() != 99, child.text()


# SIGKILL before any file-system operation of a save: listed checkpoints are whole, and the newest is never lost.
def tensors_of_step(step):
    return {f"{kind}/block.0.w": torch.full((3000,), float(step)) for kind in ("weights", "exp_avg")}


def save_alone(folder, step):
    Checkpointer(folder, keep_latest_k=1).save(step, tensors_of_step(step), {"step": step})


def save_and_die(folder, step, events, kill_at):
    seen = 0

    def hook(event, _):
        nonlocal seen
        seen += event in events
        if event in events and seen == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    save_alone(folder, step)


def save_in_child(folder, step, events=(), kill_at=0):
    child = multiprocessing.get_context("fork").Process(target=save_and_die, args=(folder, step, events, kill_at))
    child.start()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the child neither saved nor was killed"
    return child.exitcode != 0


def check_alone(folder, oldest_allowed):
    checkpointer = Checkpointer(folder)
    listed = [path for path in folder.iterdir() if path.suffix not in (UNFINISHED, DELETED)]
    # A former one that its replacement made superfluous is no longer listed.
    listed = [path for path in listed if path.suffix == "" or not path.with_suffix("").exists()]
    assert len(listed) == len(checkpointer.complete_steps()), f"a damaged one is listed: {listed}"
    for path in listed:
        verify_checkpoint(path)
    target = tensors_of_step(-1)
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step >= oldest_allowed, f"lost step {oldest_allowed}: {listed}"
    assert loaded.state == {"step": loaded.step}
    assert all((tensor == loaded.step).all() for tensor in target.values())


def kill_at_every_event(folder, saved_again, events):
    torch.set_num_threads(1)
    folder, step, number = Path(folder), 2, 1
    for before in (1, 2):
        save_in_child(folder, before)
    while save_in_child(folder, step if saved_again else step + 1, events, number):
        check_alone(folder, step)
        step += 2
        assert not save_in_child(folder, step)
        assert [path.name for path in folder.iterdir()] == [checkpoint_name(step)], "the next save leaves only itself"
        number += 1
    return number - 1


# By default before each change of the disk, at night before what only reads it too.
BY_NIGHT = [pytest.param(saved_again, FILE_SYSTEM_EVENTS, marks=pytest.mark.nightly) for saved_again in (True, False)]


@pytest.mark.parametrize(("saved_again", "events"), [(True, CHANGES), *BY_NIGHT], ids=["changes", "again", "new"])
def test_a_kill_in_a_save_leaves_only_whole_checkpoints_and_loses_none(processes, tmp_path, saved_again, events):
    function = "tests.checkpoint.test_kills_in_saves:kill_at_every_event"
    child = processes.run(function, str(tmp_path / "run"), saved_again, events, folder=tmp_path)
    assert 2 * len(events) <= child.wait() < 99, child.text()
