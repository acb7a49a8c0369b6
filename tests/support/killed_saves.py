"""A program that saves in forked children, kills them with SIGKILL, and checks what the folder then holds.

Usage: `killed_saves.py FOLDER SCENARIO`. Forking from one process that has torch loaded makes a kill cost
milliseconds, so that every file-system operation of a save gets its own. Prints how many kills there were.
"""

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch

from torchround.checkpoint import Checkpointer, verify_checkpoint

FILE_SYSTEM_EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir"}
SMALL = 3_000
LARGE = 600_000


def tensors_of(step, numel):
    return {f"{kind}/block.0.w": torch.full((numel,), float(step)) for kind in ("weights", "exp_avg")}


def save(folder, step, numel):
    Checkpointer(folder, keep_latest_k=1).save(step, tensors_of(step, numel), {"step": step})


def in_child(work, seconds=None):
    """Run `work` in a forked process, and kill it after `seconds` if given. Returns whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  (a child that fails in any way must say so)
            print(f"the child failed: {error!r}", file=sys.stderr)
            os._exit(1)
        os._exit(0)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0, "the child neither saved nor was killed"
    return False


def check(folder, oldest_allowed, numel):
    """Check that every listed checkpoint is whole and the newest at least `oldest_allowed`. Returns the newest."""
    checkpointer = Checkpointer(folder)
    listed = [path for path in folder.iterdir() if path.suffix not in (".tmp", ".trash")]
    # A former step-N that its replacement made superfluous is no longer listed.
    listed = [path for path in listed if path.suffix == "" or not path.with_suffix("").exists()]
    assert len(listed) == len(checkpointer.complete_steps()), f"a damaged one is listed: {listed}"
    for path in listed:
        verify_checkpoint(path)
    target = tensors_of(-1, numel)
    loaded = checkpointer.load_latest(target)
    assert loaded is not None and loaded.step >= oldest_allowed, f"lost step {oldest_allowed}: {listed}"
    assert loaded.state == {"step": loaded.step}
    assert all((tensor == loaded.step).all() for tensor in target.values())
    return loaded.step


def check_and_tidy(folder, oldest_allowed, next_step):
    """Check, then save once more: no leftover may stay."""
    check(folder, oldest_allowed, SMALL)
    assert not in_child(lambda: save(folder, next_step, SMALL))
    left = {path.name for path in folder.iterdir()}
    assert all(name.removeprefix("step-").isdecimal() for name in left) and len(left) == 1, left


def kill_at_event(number):
    """Install a hook that kills this process instead of its `number`-th file-system operation."""
    seen = 0

    def hook(event, _):
        nonlocal seen
        if event in FILE_SYSTEM_EVENTS:
            seen += 1
            if seen == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def kill_at_every_operation(folder, saved_again):
    """Kill a save before its 1st, 2nd, .. operation: of a new step, or of the newest step again."""
    step, number, killed = 2, 0, True
    for first in (1, 2):
        in_child(lambda first=first: save(folder, first, SMALL))
    while killed:
        number += 1
        target = step if saved_again else step + 1

        def killed_save(target=target, number=number):
            kill_at_event(number)
            save(folder, target, SMALL)

        killed = in_child(killed_save)
        check_and_tidy(folder, step, target + 1)
        step = target + 1
    return number - 1


def kill_within_writes(folder):
    """Let the kernel kill a save in the middle of a write, at several lengths of the file."""
    in_child(lambda: save(folder, 1, SMALL))
    lengths = [1, 7, 8, 100, 200, 1_000, 8_192, 2 * SMALL * 4]
    for step, length in enumerate(lengths, start=2):

        def killed_save(step=step, length=length):
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            resource.setrlimit(resource.RLIMIT_FSIZE, (length, length))
            save(folder, step, SMALL)

        assert in_child(killed_save), f"a file limit of {length} bytes killed nothing"
        assert check(folder, 1, SMALL) == 1
    check_and_tidy(folder, 1, len(lengths) + 2)
    return len(lengths)


def kill_at_random_times(folder):
    """Kill a process that only saves after random times. The next process continues after the newest checkpoint."""
    generator = random.Random(7)
    newest, kills = 0, 10
    for _ in range(kills):

        def keep_saving(newest=newest):
            for step in range(newest + 1, newest + 1000):
                save(folder, step, LARGE)

        assert in_child(keep_saving, seconds=generator.uniform(0.05, 0.3))
        if Checkpointer(folder).latest_step() is not None:
            newest = check(folder, newest, LARGE)
    assert newest > 0, "nothing was ever saved"
    return kills


SCENARIOS = {
    "new step": lambda folder: kill_at_every_operation(folder, saved_again=False),
    "same step": lambda folder: kill_at_every_operation(folder, saved_again=True),
    "writes": kill_within_writes,
    "random times": kill_at_random_times,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(SCENARIOS[sys.argv[2]](Path(sys.argv[1])))
