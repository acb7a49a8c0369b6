"""A run's folder. One process at a time works in it, and its files describe the run.

    config.toml  the resolved configuration; `--config` takes it
    plan.json    the plan; `engine.plan` takes it

The kernel holds the lock (`flock`), so the lock ends with the process, even if the process is killed.

Several machines work in one folder that all of them see, or each in a folder on its own disk. Machine 0 writes the
files that describe the run.
"""

import errno
import fcntl
import logging
import math
import os
import secrets
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchround.checkpoint import Checkpointer, MachineTeam
from torchround.checkpoint.fsync import free_bytes_at
from torchround.config import Config, RunTable, to_toml
from torchround.machines.group import LaunchError
from torchround.planning.memory import size_text
from torchround.planning.plan import Plan
from torchround.planning.run_question import RunQuestion
from torchround.untrusted.regular_file import read_regular, write_whole
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

CONFIG_FILE = "config.toml"
MOST_PLAN_BYTES = 2**24
# Errors of flock on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunError(Exception):
    """A run that cannot start: its folder cannot be used, or it cannot resume from the checkpoint that it found."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class RunFolder:
    """The folder `<run.folder>/<run.name>`. As a context manager it makes the folder and keeps other processes out.

    The machines of `team` enter it together. If they share it, machine 0 locks it; otherwise each locks its own.
    """

    def __init__(self, table: RunTable, team: MachineTeam | None = None) -> None:
        folder = os.path.expanduser(table.folder)
        if folder.startswith("~"):
            raise RunError(f"run.folder: {folder}: there is no such user")
        self.path = Path(folder) / table.name
        self.checkpoints = self.path / "checkpoints"
        self.team = team or MachineTeam()
        self._lock = -1

    def __enter__(self) -> "RunFolder":  # noqa: PYI034  (typing.Self needs Python 3.11)
        if not self.team.is_alone:
            require_one_folder_or_own(self.path, self.team)
        try:
            self.team.together(self._open, f"whether {self.path} is free", (RunError,))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        """Make the folder and lock it, on the machine that keeps it."""
        if not self.team.keeps_folder:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be used: {error}") from error
        self._take_lock()

    def __exit__(self, *_: object) -> None:
        if self._lock >= 0:
            os.close(self._lock)  # releases the lock too
            self._lock = -1

    def checkpointer(self, keep_latest_k: int = 0, keep_every_n_steps: int = 0) -> Checkpointer:
        return Checkpointer(self.checkpoints, keep_latest_k, keep_every_n_steps, self.team)

    def describe(self, config: Config, plan: Plan) -> None:
        """Write the resolved configuration and the plan, on machine 0. Raises `RunError`."""
        if self.team.rank > 0:
            return
        try:
            write_whole(self.path / CONFIG_FILE, to_toml(config))
            write_whole(self.path / "plan.json", plan.to_json() + "\n")
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be written: {error}") from error

    def kept_plan(self) -> Plan | None:
        """Return the plan that the run had last, None if it has no readable one."""
        try:
            return Plan.from_json(read_regular(self.path / "plan.json", MOST_PLAN_BYTES).decode())
        except (OSError, ValueError):
            return None

    def _refuse_links(self) -> None:
        """Raise `RunError` for links and pipes in the folder, which may come from another person.

        A run would write to the target of a link, outside its folder, and would wait at a pipe.
        """
        for path in (*self.path.iterdir(), *self.path.glob("trace/*")):
            # Another machine of the run may have removed its own mark meanwhile.
            is_odd = path.exists() and not (path.is_file() or path.is_dir())
            if path.is_symlink() or is_odd:
                raise RunError(
                    f"run.folder: {path} is a link, or not an ordinary file; a run writes to nothing outside its folder. Remove "
                    "it, or put what it points to in its place (the whole folder may be a link)"
                )

    def _take_lock(self) -> None:
        """Lock the folder. Raises `RunError` if another process holds the lock; warns if there are no locks."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise RunError(
                f"{self.path} is in use by {holder}; wait for it to end (a network's file system keeps the lock of a "
                "machine that died for up to two minutes), or give this run a name of its own (--run.name NAME)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(f"run.folder: {self.path} cannot be locked: {error}") from error
            logger.warning(
                "%s cannot be locked (%s); nothing will stop a second process from writing there",
                *(self.path, error),
            )
        # The holder's name is for the message of a second process. The lock itself is the kernel's.
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def require_one_folder_or_own(path: Path, team: MachineTeam) -> None:
    """Raise `LaunchError` unless the machines see one folder at `path`, or each its own, as the team has it.

    Each machine puts a file there and looks for the files of the others. Raises the same error on all.
    """
    token = team.gather(secrets.token_hex(8), "the mark of the run's folder")[0]
    marks = [path / f".machine-{rank}-{token}" for rank in range(team.size)]

    def leave_mark() -> None:
        try:
            # A network's file system may remember that the folder was not there; making it asks the server.
            path.mkdir(parents=True, exist_ok=True)
            marks[team.rank].touch()
        except OSError as error:
            raise RunError(f"run.folder: {path} cannot be used: {error}") from error

    try:
        team.together(leave_mark, f"the mark of each machine in {path}", (RunError,))
        seen = team.gather([mark.exists() for mark in marks], f"whose marks each machine sees in {path}")
    finally:
        with suppress(OSError):
            marks[team.rank].unlink(missing_ok=True)
    wrong = [
        (rank, other)
        for rank, marks_seen in enumerate(seen)
        for other, is_seen in enumerate(marks_seen)
        if is_seen != (team.shares_folder or rank == other)
    ]
    if not wrong:
        return
    with suppress(OSError):
        path.rmdir()  # it was made for the mark, if nothing is in it
    one, other = (team.names[rank] for rank in wrong[0])
    if team.shares_folder:
        raise LaunchError(
            f"run.folder: {path} on {one} is not the folder of {other}. Put it on a file system that all machines "
            "share, or keep each machine's part on its own disk (--machines.checkpoints own)"
        )
    raise LaunchError(
        f'run.folder: {path} is one folder on {one} and {other}, and machines.checkpoints is "own"; give each '
        "machine its own folder, or use this one together (--machines.checkpoints shared)"
    )


# The disk.


@dataclass(frozen=True)
class DiskNeed:
    """The disk of a run's checkpoints: what one takes, how many are there at once, and what is free.

    `num_at_once` counts those that are kept for ever too. `num_present` complete checkpoints are there already.
    `free_bytes` includes what the next save clears away first; it is None if the file system does not say.
    """

    folder: Path
    checkpoint_bytes: int
    num_at_once: int
    num_present: int
    free_bytes: int | None

    def text(self) -> str:
        """Return the need and what is free, on one line."""
        several = f", up to {self.num_at_once} at once" if self.num_at_once > 1 else ""
        there = f" ({self.num_present} there already)" if self.num_present else ""
        free = "" if self.free_bytes is None else f"; {size_text(self.free_bytes)} are free"
        return f"a checkpoint takes {size_text(self.checkpoint_bytes)}{several}{there}{free}"

    def require_one(self) -> None:
        """Raise `RunError` if not one checkpoint fits. One warning if fewer fit than the run keeps."""
        if self.free_bytes is None:
            return
        if self.checkpoint_bytes > self.free_bytes:
            raise RunError(
                f"run.folder: {self.folder}: {self.text()}, so nothing could be saved. Free some space, or choose a "
                "folder on another disk (--run.folder FOLDER)"
            )
        missing = max(1, self.num_at_once - self.num_present)
        if missing * self.checkpoint_bytes > self.free_bytes:
            logger.warning(
                "run.folder: %s: %s, so the disk will be full before the run ends; a lower checkpoint.keep_latest_k "
                "or another disk (run.folder) avoids that",
                *(self.folder, self.text()),
            )


def disk_need(config: Config, folder: RunFolder, question: RunQuestion) -> DiskNeed:
    """Count what the run's checkpoints take and what its disk has. Nothing is written."""
    checkpointer, table = folder.checkpointer(), config.checkpoint
    free_bytes = free_bytes_at(folder.path)
    leftovers = 0
    for path in checkpointer.leftovers():
        with suppress(OSError):  # deleted meanwhile, or not readable
            # Deleting a link frees nothing.
            leftovers += 0 if path.is_symlink() else sum(file.lstat().st_size for file in path.iterdir())
    # The kept ones, and the one that is being written. A run without steps yet has at least one.
    num_saves = -(-(config.training.steps or 1) // (table.interval_steps or config.training.steps or 1))
    if config.validation.keep_best:
        num_saves += (config.training.steps or 0) // config.validation.interval_steps
    kept = table.keep_latest_k + 1 + config.validation.keep_best if table.keep_latest_k else num_saves
    if table.keep_latest_k and table.interval_steps and table.keep_every_n_steps:
        kept += (config.training.steps or 0) // math.lcm(table.interval_steps, table.keep_every_n_steps)
    return DiskNeed(
        folder=folder.path,
        checkpoint_bytes=-(-checkpoint_bytes(question) // (folder.team.size if checkpointer.is_part else 1)),
        num_at_once=kept if config.training.steps is None else min(kept, num_saves),
        num_present=len(checkpointer.complete_steps()),
        free_bytes=None if free_bytes is None else free_bytes + leftovers,
    )


def checkpoint_bytes(question: RunQuestion) -> int:
    """Count the tensors of one checkpoint: all that the host holds, except gradients and the newest device weights.

    The newest device weights of trained parameters are the float32 weights, rounded, so they are saved only if they are a part
    of split weights. Those take as much as float32 weights.
    """
    count, older_versions = question.parameters, int(question.update == "async")
    # The older device weights of stale layers are saved too.
    stale = question.costs().layers[: question.stale_layers or 0] if question.update == "bounded" else ()
    num_stale = sum(layer.gradient_bytes for layer in stale) // question.accumulate_bytes
    in_dtype = older_versions * count.trained + count.frozen + num_stale
    return question.updates.saved_bytes(count.by_rule) + question.element_bytes * in_dtype
