"""The folders of checkpoints: their names, which are complete, and how one appears or goes, also in a power cut.

A save writes the folder of a step under an unfinished name, syncs every file and the folder, renames it to the step's own
name and syncs the parent. Only a folder with that name is a checkpoint. An old checkpoint gets a third name before it is
deleted. A kill at any moment therefore leaves complete checkpoints and leftovers, and the next save removes the leftovers.
This file alone spells the names:

    step-N            complete
    step-N.tmp        being written, or left by a killed save
    step-N.trash      being deleted, or left by a killed deletion
    step-N.replaced   the former step-N while a new one is renamed; counts as step-N if a kill prevented that
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

UNFINISHED, DELETED, REPLACED = ".tmp", ".trash", ".replaced"
_NAME = re.compile(r"step-(0|[1-9]\d*)(\.tmp|\.trash|\.replaced)?")


def checkpoint_name(step: int, suffix: str = "") -> str:
    return f"step-{step}{suffix}"


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder is named as a checkpoint is, or as a leftover."""
    return _NAME.fullmatch(name) is not None


class StepFolders:
    """The folders of checkpoints in `folder`. Other entries are left alone."""

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)

    def named(self, step: int, suffix: str = "") -> Path:
        return self.folder / checkpoint_name(step, suffix)

    def checkpoints(self) -> dict[int, Path]:
        """Return step -> folder of every checkpoint, complete or damaged, steps rising."""
        return dict(
            sorted((step, path) for path, step, suffix in self._entries() if self._counts(step, suffix))
        )

    def leftovers(self) -> list[Path]:
        """Return the folders that killed saves and deletions left. All of them can be deleted."""
        return [path for path, step, suffix in self._entries() if not self._counts(step, suffix)]

    def clear_leftovers(self) -> None:
        """Remove what a killed save or deletion left, and put back a checkpoint whose replacement never came."""
        for entry, step, suffix in self._entries():
            if suffix and self._counts(step, suffix):
                entry.rename(self.named(step))
        self.delete(self.leftovers())

    def publish(self, step: int) -> None:
        """Make the written folder of a step its checkpoint, and delete a former one."""
        path, replaced = self.named(step), self.named(step, REPLACED)
        # A folder that is not empty cannot be renamed over.
        if os.path.lexists(path):
            path.rename(replaced)
        self.named(step, UNFINISHED).rename(path)
        # The new name must be on the disk before the former folder is deleted.
        sync_entry(self.folder)
        if os.path.lexists(replaced):
            self.delete([replaced])

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete folders. One that cannot be deleted costs space, not the run: it stays, with a warning."""
        for path in list(paths):
            try:
                if path.is_symlink():
                    path.unlink()  # the target is outside this folder, so it stays
                    continue
                # Renamed first: a half-deleted folder must never be listed as a checkpoint.
                if path.suffix not in (UNFINISHED, DELETED):
                    path = path.rename(path.with_name(path.name.removesuffix(REPLACED) + DELETED))
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("could not delete the old checkpoint %s: %s; it still uses space", path, error)

    def _counts(self, step: int, suffix: str | None) -> bool:
        """Whether a folder is the checkpoint of its step. A replaced one is, if it is all that is left."""
        return not suffix or (suffix == REPLACED and not self.named(step).exists())

    def _entries(self) -> list[tuple[Path, int, str | None]]:
        """Return (path, step, suffix) of the folders named as this class names them."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        matches = [(path, _NAME.fullmatch(path.name)) for path in paths]
        # A link whose disk is not there is a checkpoint that cannot be read, and must not be passed over in silence.
        return [
            (path, int(match[1]), match[2])
            for path, match in matches
            if match and (path.is_dir() or path.is_symlink())
        ]


# A file or a name that is not synced may be lost or empty after a power cut.


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file, and return once its bytes are on the disk. Raises `FileExistsError` if it exists."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_entry(path: Path) -> None:
    """Put a file's bytes, or a folder's names and renames, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and its parents, and sync each new name in the folder above it."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_entry(path.parent)


def free_bytes_at(path: Path) -> int | None:
    """Return the free bytes of the disk that `path` is, or will be, on. None if the file system does not say."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), None)
    try:
        usage = shutil.disk_usage(existing or "/")
    except OSError:
        return None
    # Some file systems of networks have no total, and then no free bytes either.
    return usage.free if usage.total else None
