"""A run's folder: one process at a time works in it, and its files say what the run is.

    config.toml   the resolved configuration; can be run again
    plan.json     the plan; can be given back as `engine.plan`

The lock is the kernel's (`flock`), so it ends with the process that holds it, however that ends.
"""

import errno
import fcntl
import logging
import os
import socket
from pathlib import Path

from torchround.config import Config, RunTable, to_toml
from torchround.pipeline.plan import Plan
from torchround.untrusted.regular_file import read_regular
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

MOST_PLAN_BYTES = 2**24
# What flock gives on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunFolderError(Exception):
    """The folder cannot be made or written, or another process works in it."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class RunFolder:
    """`<run.folder>/<run.name>`. As a context manager it makes the folder and keeps other processes out."""

    def __init__(self, table: RunTable) -> None:
        folder = os.path.expanduser(table.folder)
        if folder.startswith("~"):
            raise RunFolderError(f"run.folder: {folder}: there is no such user")
        self.path = Path(folder) / table.name
        self.checkpoints = self.path / "checkpoints"
        self._lock = -1

    def __enter__(self) -> "RunFolder":  # noqa: PYI034  (typing.Self needs Python 3.11)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunFolderError(f"run.folder: {self.path} cannot be used: {error}") from error
        try:
            self._take_lock()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)  # gives the lock back too
        self._lock = -1

    def describe(self, config: Config, plan: Plan) -> None:
        """Leave the resolved configuration and the plan. Raises `RunFolderError`."""
        try:
            _replace(self.path / "config.toml", to_toml(config))
            _replace(self.path / "plan.json", plan.to_json() + "\n")
        except OSError as error:
            raise RunFolderError(f"run.folder: {self.path} cannot be written: {error}") from error

    def kept_plan(self) -> Plan | None:
        """The plan that the run had last; None where it has no readable plan yet."""
        try:
            return Plan.from_json(read_regular(self.path / "plan.json", MOST_PLAN_BYTES).decode())
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _refuse_links(self) -> None:
        """A folder may come from anybody: a link in it would make a run write wherever it points, a pipe wait."""
        for folder in (self.path, self.path / "trace"):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.is_symlink():
                    raise RunFolderError(
                        f"run.folder: {path} is a link to {path.readlink()}; a run writes to nothing outside its "
                        "folder. Remove it, or put what it points to in its place (the whole folder may be a link)"
                    )
                if not (path.is_file() or path.is_dir()):
                    raise RunFolderError(f"run.folder: {path} is not an ordinary file; remove it")

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise RunFolderError(
                f"{self.path} is in use by {holder}; wait for it to end, or give this run a name of its own "
                "(--run.name NAME)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunFolderError(f"run.folder: {self.path} cannot be locked: {error}") from error
            logger.warning(
                "%s cannot be locked (%s); nothing will stop a second process from writing there",
                self.path,
                error,
            )
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _replace(path: Path, text: str) -> None:
    """The old file or the new one, never half of one."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
