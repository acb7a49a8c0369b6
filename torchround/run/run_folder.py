"""A run's folder. One process at a time works in it, and its files describe the run.

    config.toml  the resolved configuration; `--config` takes it
    plan.json    the plan; `engine.plan` takes it

The kernel holds the lock (`flock`), so the lock ends with the process, even if the process is killed. Several machines
work in one folder that all of them see. Machine 0 locks it and writes the files that describe the run.
"""

import errno
import fcntl
import logging
import os
import secrets
import socket
from contextlib import suppress
from pathlib import Path

from torchround.checkpoint import Checkpointer, MachineTeam
from torchround.checkpoint.folders import RUN_SUBFOLDER
from torchround.config import Config, RunTable, to_toml
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
    """The folder `<run.folder>/<run.name>`, made and locked as a context manager. The machines of `team` enter it together."""

    def __init__(self, table: RunTable, team: MachineTeam | None = None) -> None:
        folder = os.path.expanduser(table.folder)
        if folder.startswith("~"):
            raise RunError(f"run.folder: {folder}: there is no such user")
        self.path = Path(folder) / table.name
        self.checkpoints = self.path / RUN_SUBFOLDER
        self.team = team or MachineTeam()
        self._lock = -1

    def __enter__(self) -> "RunFolder":  # noqa: PYI034  (typing.Self needs Python 3.11)
        try:
            self.team.together(self._open, f"whether {self.path} is free", (RunError,))
            holder = self.team.gather(self._holder(), f"the holder of {self.path}")[0]
            what = f"whether all see {self.path}"
            self.team.together(lambda: self._require_shared(holder), what, (RunError,))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _open(self) -> None:
        try:
            # A network's file system may remember that the folder was not there; making it asks the server.
            self.path.mkdir(parents=True, exist_ok=True)
            # Links and pipes may be another person's: a run would write outside its folder, or wait.
            for path in (*self.path.iterdir(), *self.path.glob("trace/*")):
                if path.is_symlink() or not (path.is_file() or path.is_dir()):
                    raise RunError(
                        f"run.folder: {path} is a link, or not an ordinary file; a run writes to nothing outside its folder. "
                        "Remove it, or put what it points to in its place (the whole folder may be a link)"
                    )
            if self.team.rank == 0:
                self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be used: {error}") from error
        if self.team.rank == 0:
            self._take_lock()

    def _holder(self) -> str:
        try:
            return read_regular(self.path / ".lock", 200).decode(errors="replace").strip()
        except OSError:
            return ""

    def _require_shared(self, holder: str) -> None:
        """Raise `RunError` on a machine that sees another folder than machine 0, whose lock names the `holder`."""
        if not holder or self._holder() != holder:
            with suppress(OSError):
                self.path.rmdir()  # it was made just now, if nothing is in it
            raise RunError(
                f"run.folder: {self.path} is not the folder of {self.team.names[0]}; put it on a file system that all "
                "machines share"
            )

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
        try:
            return Plan.from_json(read_regular(self.path / "plan.json", MOST_PLAN_BYTES).decode())
        except (OSError, ValueError):
            return None

    def _take_lock(self) -> None:
        """Lock the folder. Raises `RunError` if another process holds the lock; warns if there are no locks."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunError(
                f"{self.path} is in use by {self._holder() or 'another process'}; wait for it to end (a network's file "
                "system keeps the lock of a machine that died for up to two minutes), or give this run a name of its own "
                "(--run.name NAME)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(f"run.folder: {self.path} cannot be locked: {error}") from error
            logger.warning("%s cannot be locked (%s): a second process could write there", self.path, error)
        # For the message of a second process, and for machines that look if they see this folder. The lock is the kernel's.
        os.truncate(self._lock, 0)
        holder = f"process {os.getpid()} on {socket.gethostname()} ({secrets.token_hex(4)})\n"
        os.pwrite(self._lock, holder.encode(), 0)
        os.fsync(self._lock)  # a network's file system shows it to other machines then


def disk_text(folder: RunFolder, question: RunQuestion) -> str:
    free_bytes = folder.checkpointer().free_bytes()
    free = "" if free_bytes is None else f"; {size_text(free_bytes)} are free"
    return f"a checkpoint takes {size_text(checkpoint_bytes(question))}{free}"


def require_room(folder: RunFolder, question: RunQuestion) -> None:
    """Raise `RunError` if not one checkpoint fits on the disk. Nothing is written."""
    free_bytes = folder.checkpointer().free_bytes()
    if free_bytes is not None and checkpoint_bytes(question) > free_bytes:
        raise RunError(
            f"run.folder: {folder.path}: {disk_text(folder, question)}, so nothing could be saved. Free some space, or "
            "choose a folder on another disk (--run.folder FOLDER)"
        )


def checkpoint_bytes(question: RunQuestion) -> int:
    """Count the tensors of one checkpoint: all that the host holds, except gradients and the newest device weights.

    The newest device weights of trained parameters are the float32 weights, rounded, so they are saved only if they are a part
    of split weights. Those take as much as float32 weights.
    """
    count, older_versions = question.parameters, question.mode.versions - 1
    # The older device weights of stale layers are saved too.
    stale = question.costs().layers[: question.stale_layers or 0] if question.mode.updates_by_layer else ()
    num_stale = sum(layer.gradient_bytes for layer in stale) // question.accumulate_bytes
    in_dtype = older_versions * count.trained + count.frozen + num_stale
    return question.updates.saved_bytes(count.by_rule) + question.element_bytes * in_dtype
