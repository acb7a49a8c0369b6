"""A run's folder. One process at a time works in it, and its files describe the run.

    config.toml   the resolved configuration; `--config` takes it
    plan.json     the plan; `engine.plan` takes it

The kernel holds the lock (`flock`), so the lock ends with the process, even if the process is killed.
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
# Errors of flock on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunError(Exception):
    """A run that cannot start: its folder cannot be used, or it cannot resume from the checkpoint that it found."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class RunFolder:
    """The folder `<run.folder>/<run.name>`. As a context manager it makes the folder and keeps other processes out."""

    def __init__(self, table: RunTable) -> None:
        folder = os.path.expanduser(table.folder)
        if folder.startswith("~"):
            raise RunError(f"run.folder: {folder}: there is no such user")
        self.path = Path(folder) / table.name
        self.checkpoints = self.path / "checkpoints"
        self._lock = -1

    def __enter__(self) -> "RunFolder":  # noqa: PYI034  (typing.Self needs Python 3.11)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_links()
            self._lock = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be used: {error}") from error
        try:
            self._take_lock()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._lock)  # releases the lock too
        self._lock = -1

    def describe(self, config: Config, plan: Plan) -> None:
        """Write the resolved configuration and the plan. Raises `RunError`."""
        try:
            _replace(self.path / "config.toml", to_toml(config))
            _replace(self.path / "plan.json", plan.to_json() + "\n")
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be written: {error}") from error

    def kept_plan(self) -> Plan | None:
        """Return the plan that the run had last, None if it has no readable one."""
        try:
            return Plan.from_json(read_regular(self.path / "plan.json", MOST_PLAN_BYTES).decode())
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _refuse_links(self) -> None:
        """Raise `RunError` for links and pipes in the folder, which may come from another person.

        A run would write to the target of a link, outside its folder, and would wait at a pipe.
        """
        for folder in (self.path, self.path / "trace"):
            for path in sorted(folder.iterdir()) if folder.is_dir() else ():
                if path.is_symlink():
                    raise RunError(
                        f"run.folder: {path} is a link to {path.readlink()}; a run writes to nothing outside its "
                        "folder. Remove it, or put what it points to in its place (the whole folder may be a link)"
                    )
                if not (path.is_file() or path.is_dir()):
                    raise RunError(f"run.folder: {path} is not an ordinary file; remove it")

    def _take_lock(self) -> None:
        """Lock the folder. Raises `RunError` if another process holds the lock; warns if there are no locks."""
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._lock, 200, 0).decode(errors="replace").strip() or "another process"
            raise RunError(
                f"{self.path} is in use by {holder}; wait for it to end, or give this run a name of its own "
                "(--run.name NAME)"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise RunError(f"run.folder: {self.path} cannot be locked: {error}") from error
            logger.warning(
                "%s cannot be locked (%s); nothing will stop a second process from writing there",
                self.path,
                error,
            )
        # The holder's name is for the message of a second process. The lock itself is the kernel's.
        os.truncate(self._lock, 0)
        os.pwrite(self._lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def _replace(path: Path, text: str) -> None:
    """Replace a file in one operation: a reader finds the old text or the new one, never a part."""
    new = path.with_name(path.name + ".tmp")
    new.write_text(text, encoding="utf-8")
    new.replace(path)
