"""A run's folder. One process at a time works in it, and its files describe the run.

    config.toml         the resolved configuration; `--config` takes it
    plan.json           the plan; `engine.plan` takes it
    config_source.json  the file that the configuration came from, so that no other file continues the run by accident

The kernel holds the lock (`flock`), so the lock ends with the process, even if the process is killed.
"""

import errno
import fcntl
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from torchround.config import Config, RunTable, to_toml
from torchround.pipeline.plan import Plan
from torchround.untrusted.regular_file import read_regular
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

CONFIG_FILE, SOURCE_FILE = "config.toml", "config_source.json"
MOST_PLAN_BYTES = 2**24
MOST_SOURCE_BYTES = 2**16
# Errors of flock on file systems that have no locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class RunError(Exception):
    """A run that cannot start: its folder cannot be used, or it cannot resume from the checkpoint that it found."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


@dataclass(frozen=True)
class ConfigSource:
    """The file that a run's configuration came from: its absolute path, and a checksum of what it says."""

    path: str
    digest: str


class RunFolder:
    """The folder `<run.folder>/<run.name>`. As a context manager it makes the folder and keeps other processes out.

    `source` is remembered with the run; None if no file describes it.
    """

    def __init__(self, table: RunTable, source: ConfigSource | None = None) -> None:
        folder = os.path.expanduser(table.folder)
        if folder.startswith("~"):
            raise RunError(f"run.folder: {folder}: there is no such user")
        self.path = Path(folder) / table.name
        self.checkpoints = self.path / "checkpoints"
        self._source = source
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
            _replace(self.path / CONFIG_FILE, to_toml(config))
            _replace(self.path / "plan.json", plan.to_json() + "\n")
            if self._source is not None and not self._is_own_config(self._source):
                _replace(self.path / SOURCE_FILE, json.dumps(asdict(self._source)) + "\n")
        except OSError as error:
            raise RunError(f"run.folder: {self.path} cannot be written: {error}") from error

    def refuse_another_config(self) -> None:
        """Raise `RunError` if the run in this folder came from another file than this one.

        The same path is the same file, edited or not. A file of the same content has been moved or copied, or is seen
        under another path in a container. The folder's own `config.toml` is the run's too.
        """
        kept, source = self._kept_source(), self._source
        if kept is None or source is None or self._is_own_config(source):
            return
        if source.path != kept.path and source.digest != kept.digest:
            raise RunError(
                f"{self.path} is the run of {kept.path}, and {source.path} is another file that names its run so too. "
                f"Give this run a name of its own (--run.name NAME), or say that it is the same run "
                f"(--run.name {self.path.name})"
            )

    def kept_plan(self) -> Plan | None:
        """Return the plan that the run had last, None if it has no readable one."""
        try:
            return Plan.from_json(read_regular(self.path / "plan.json", MOST_PLAN_BYTES).decode())
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def _kept_source(self) -> ConfigSource | None:
        """Return the file that the run came from, None if the folder has no readable record of it."""
        try:
            content = json.loads(read_regular(self.path / SOURCE_FILE, MOST_SOURCE_BYTES))
            return ConfigSource(str(content["path"]), str(content["digest"]))
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None

    def _is_own_config(self, source: ConfigSource) -> bool:
        return Path(source.path).resolve() == (self.path / CONFIG_FILE).resolve()

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
