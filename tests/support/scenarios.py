"""What forked children do (`processes.py`): train as `train.py` does, with something planted that goes wrong."""

import itertools
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import train
from tests.support.disks import Disk
from tests.support.small_run import SmallRuns, awaiting_saves, before_step, small_family
from torchround.checkpoint import Checkpointer, verify_checkpoint
from torchround.checkpoint.folders import UNFINISHED, checkpoint_name
from torchround.commands import configured_model
from torchround.engine.device import CpuDevice
from torchround.models import FAMILIES
from torchround.observe import run_page
from torchround.observe.logger import MetricsLogger
from torchround.run import early_end

CHECKPOINT_EVENTS = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.scandir")
}


def warm_up():
    """Train one run, once, so that no child has to import or compile anything."""
    if "small" in configured_model.FAMILIES:
        return
    use_small_family()
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        SmallRuns(Path(folder))
        assert trains(["--training.steps=2", "--checkpoint.interval_steps=1"]) == 0, "a plain run fails"
        assert trains(["--training.steps=3", "--checkpoint.interval_steps=1"]) == 0, "its resume fails"
        os.chdir(before)


def use_small_family():
    configured_model.FAMILIES = {**FAMILIES, "small": small_family()}
    run_page.draw_losses = lambda folders, picture: None  # it takes longer than five steps


def trains(arguments):
    return train.main(["--config", "small.toml", *arguments])


def has_a_bad_device(device, trouble, operation, arguments):
    """Train with one device that is `slow` from its `operation`-th operation on, or `faulty` at that one."""
    run, seen = CpuDevice.run, itertools.count(1)

    def troubled(self, *details, **further):
        if self.name == device and (count := next(seen)) >= operation:
            if trouble == "slow":
                time.sleep(0.002)
            elif count == operation:
                raise RuntimeError("planted")
        return run(self, *details, **further)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuDevice, "run", troubled)
        return trains(arguments)


def is_killed_at(event, delay_s, arguments):
    seen = 0

    def hook(name, details):
        nonlocal seen
        if name in CHECKPOINT_EVENTS and (name in ("os.remove", "os.rmdir") or "checkpoints" in str(details[0])):
            seen += 1
            if seen == event:
                kill_after(delay_s)

    sys.addaudithook(hook)
    return trains(arguments)


def kill_after(delay_s):
    """Kill this process: at once, or after a delay from another thread while this one continues."""

    def kill():
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if delay_s == 0:
        kill()
    threading.Thread(target=kill, daemon=True).start()


def trains_while_the_disk_is(trouble, from_step, to_step, arguments):
    """Train while the disk is `full`, `filling` (full once a save has begun) or `read-only` during some steps.

    The run saves after every second step. The disk changes only when earlier saves have ended. Prints the means that the
    disk uses, and copies what the run left to `kept/`, since the disk may end with this process.
    """
    disk = Disk(Path("outputs"), Path("outputs/run/checkpoints"))
    print(f"this disk is {disk.kind}", flush=True)
    with pytest.MonkeyPatch.context() as patch:
        saves_ended = awaiting_saves(patch)
        begin, end = disk.troubles[trouble], partial(restore, disk)
        before_step(patch, from_step, lambda: (saves_ended((from_step - 2) // 2), begin()))
        before_step(patch, to_step, lambda: (saves_ended((to_step - 2) // 2), end()))
        code = trains(["--run.name=run", *arguments])
    shutil.copytree("outputs", "kept")
    return code


def restore(disk):
    """Check what was saved before, while nothing can be written, and only then end the trouble."""
    newest = Checkpointer(disk.readable).latest_step()
    verified = verify_checkpoint(disk.readable / checkpoint_name(newest))
    print(f"verified step {verified} in trouble", flush=True)
    disk.end_trouble()


def hangs(where, step, arguments):
    """Train a run that saves after every step; its step number `step`, or the save after it, never ends.

    It prints `asked` at each signal, whose time is that of one request until there is a file `later`.
    """

    def clock():
        os.write(2, b"asked\n")
        return early_end.SAME_REQUEST_S if Path("later").exists() else 0.0

    def hang():
        print("hanging", flush=True)
        while True:
            time.sleep(0.01)

    def hook(name, details):
        if name == "open" and f"{checkpoint_name(step, UNFINISHED)}/state" in str(details[0]):
            hang()

    early_end.time = SimpleNamespace(monotonic=clock)
    if where == "save":
        sys.addaudithook(hook)
        return trains(arguments)
    with pytest.MonkeyPatch.context() as patch:
        saves_ended = awaiting_saves(patch)
        before_step(patch, step, lambda: (saves_ended(step - 2), hang()))
        return trains(arguments)


def is_signalled_on_its_way_out(number, arguments):
    """Train a run that gets a signal once all is trained and saved, while it closes its metrics."""
    close = MetricsLogger.close

    def interrupted(self):
        signal.raise_signal(number)
        close(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MetricsLogger, "close", interrupted)
        return trains(arguments)
