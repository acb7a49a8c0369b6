"""The folders of checkpoints by name: which are complete, which are leftovers, and how one appears or goes.

A save writes `step-N.tmp`, syncs every file and the folder, renames it to `step-N` and syncs the parent. Only a renamed
folder is a checkpoint. An old checkpoint is renamed to `.trash` before it is deleted. A kill at any moment therefore
leaves complete checkpoints and leftovers, and the next save removes the leftovers. Names of folders:

    step-N            complete
    step-N.tmp        being written, or left by a killed save
    step-N.trash      being deleted, or left by a killed deletion
    step-N.replaced   the former step-N while a new one is renamed; counts as step-N if a kill prevented that
"""

import logging
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from torchround.checkpoint.fsync import sync_entry

logger = logging.getLogger(__name__)

_NAME = re.compile(r"step-(0|[1-9]\d*)(\.tmp|\.trash|\.replaced)?")


def checkpoint_name(step: int, suffix: str = "") -> str:
    """Return the name of a step's folder. No other place spells it."""
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
        """Make the written folder of a step its checkpoint. A former one steps aside, until `delete_replaced`."""
        path = self.named(step)
        # A folder that is not empty cannot be renamed over.
        if _exists(path):
            path.rename(self.named(step, ".replaced"))
        self.named(step, ".tmp").rename(path)
        # The new name must be on the disk before the former folder is deleted.
        sync_entry(self.folder)

    def delete_replaced(self, step: int) -> None:
        """Delete the former checkpoint of a step, if the new one has replaced one."""
        self.delete(path for path in self.variants(step) if path.suffix)

    def variants(self, step: int) -> list[Path]:
        """Return the folders that a step's checkpoint may be in: its own, and one that it replaces."""
        return [path for suffix in ("", ".replaced") if _exists(path := self.named(step, suffix))]

    def take_back(self, step: int) -> None:
        """Undo `publish`: delete the step's checkpoint, and put the one before it back."""
        path, replaced = self.named(step), self.named(step, ".replaced")
        if _exists(path):
            self.delete([path])
        if _exists(replaced) and not _exists(path):
            replaced.rename(path)

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete folders. One that cannot be deleted costs space, not the run: it stays, with a warning."""
        for path in list(paths):
            try:
                # Renamed first: a half-deleted folder must never be listed as a checkpoint.
                if path.is_symlink():
                    # A checkpoint that was moved to another disk, with a link in its place. What the link points to
                    # is outside this folder, so it stays.
                    logger.warning(
                        "%s is a link, so only the link is deleted; %s stays", path, path.readlink()
                    )
                    path.unlink()
                    continue
                if path.suffix not in (".tmp", ".trash"):
                    path = path.rename(path.with_name(path.name.removesuffix(".replaced") + ".trash"))
                shutil.rmtree(path)
            except OSError as error:
                logger.warning("could not delete the old checkpoint %s: %s; it still uses space", path, error)

    def _counts(self, step: int, suffix: str | None) -> bool:
        """Whether a folder is the checkpoint of its step. A replaced one is, if it is all that is left."""
        return not suffix or (suffix == ".replaced" and not self.named(step).exists())

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


def _exists(path: Path) -> bool:
    """Return whether there is a folder or a link at `path`, also a link to a disk that is not there."""
    return path.exists() or path.is_symlink()
