"""What forked children do (`zygote.py`): train as `train.py` does, with something planted that goes wrong."""

import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import train
from models import FAMILIES
from tests.small_run import SMALL, small_family, write_text

CHECKPOINT_EVENTS = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree", "os.scandir"),
}


def warm_up() -> None:
    """One run, so that no child has to import or compile anything."""
    train.FAMILIES = {**FAMILIES, "small": small_family()}  # type: ignore[assignment]
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        prepare(Path(folder))
        assert trains(["--training.steps=2", "--checkpoint.interval_steps=1"]) == 0, "a plain run fails"
        assert trains(["--training.steps=3", "--checkpoint.interval_steps=1"]) == 0, "its resume fails"
        os.chdir(before)


def prepare(folder: Path) -> None:
    """`small.toml` and its text, for runs in `folder`."""
    write_text(folder / "text.jsonl", lines=200)
    (folder / "small.toml").write_text(SMALL)


def trains(arguments: list[str]) -> int:
    """A run; its exit code."""
    return train.main(["--config", "small.toml", *arguments])


def is_killed_at(event: int, delay_s: float, arguments: list[str]) -> int:
    """A run that is killed `delay_s` after the `event`-th time that it touches a checkpoint's files."""
    seen = 0

    def hook(name: str, details: tuple[object, ...]) -> None:
        nonlocal seen
        if name in CHECKPOINT_EVENTS and (
            name in ("os.remove", "os.rmdir") or "checkpoints" in str(details[0])
        ):
            seen += 1
            if seen == event:
                kill_after(delay_s)

    sys.addaudithook(hook)
    return trains(arguments)


def kill_after(delay_s: float) -> None:
    """At once, or by another thread while this one goes on."""

    def kill() -> None:
        time.sleep(delay_s)
        os.kill(os.getpid(), signal.SIGKILL)

    if delay_s == 0:
        kill()
    threading.Thread(target=kill, daemon=True).start()
