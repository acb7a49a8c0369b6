"""Keeps the checkpoints of one run: `step-N` folders that appear whole or not at all.

A save writes `step-N.tmp`, syncs every file and the folder, renames it to `step-N` and syncs the parent. Only a renamed
folder is a checkpoint. An old checkpoint is renamed to `.trash` before it is deleted. A kill at any moment therefore
leaves complete checkpoints and leftovers, and the next save removes the leftovers. Names of folders:

    step-N            complete
    step-N.tmp        being written, or left by a killed save
    step-N.trash      being deleted, or left by a killed deletion
    step-N.replaced   the former step-N while a new one is renamed; counts as step-N if a kill prevented that
"""

import errno
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    NoSpaceError,
)
from torchround.checkpoint.fsync import free_bytes_at, make_folder, sync_entry
from torchround.checkpoint.manifest import MANIFEST_FILE, Manifest, encode_state, read_manifest
from torchround.checkpoint.step_folder import check_contents, check_structure, read_into, write_folder
from torchround.checkpoint.tensor_file import SaveWatch, Unwatched, plan_files
from torchround.pipeline.memory import size_text

logger = logging.getLogger(__name__)

# Errors of a write that succeeds once there is room: the disk is full, or the user's quota is.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)

_FOLDER_NAME = re.compile(r"step-(0|[1-9]\d*)(\.tmp|\.trash|\.replaced)?")


def _nothing_is_optional(name: str) -> bool:
    return False


@dataclass(frozen=True)
class Loaded:
    """The result of a load besides the tensors: the step, and the state as it was given to `save`.

    `filled` are the names of the tensors that were read. Optional ones may be missing in the checkpoint.
    """

    step: int
    state: dict[str, Any]
    path: Path
    filled: frozenset[str]


class Checkpointer:
    """The checkpoints in `folder`. Saves, loads, and keeps the newest `keep_latest_k` complete ones (0: all).

    Checkpoints whose step `keep_every_n_steps` divides are kept too (0: none), and so is the one of `best_step`.
    """

    best_step: int | None = None
    """Step of a checkpoint that is kept whatever its age."""

    def __init__(self, folder: Path | str, keep_latest_k: int = 0, keep_every_n_steps: int = 0) -> None:
        if keep_latest_k < 0 or keep_every_n_steps < 0:
            raise ValueError(
                f"keep_latest_k and keep_every_n_steps are at least 0, got {keep_latest_k} and {keep_every_n_steps}"
            )
        self.folder = Path(folder)
        self.keep_latest_k = keep_latest_k
        self.keep_every_n_steps = keep_every_n_steps

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        watch: SaveWatch | None = None,
        advance: Callable[[int], object] = lambda nbytes: None,
    ) -> Path:
        """Write `tensors` and the JSON-able `state` as `step-N`, then delete checkpoints that are not kept.

        Tensors are contiguous CPU tensors of any dtype. Their bytes go straight from their memory to the file, so
        nothing may write to a tensor before `watch.finished_reading` is called for it. Raises `ValueError` before
        anything is written if a tensor or the state cannot be stored, and `CheckpointError` if the disk fails, or
        `NoSpaceError` if it is full; earlier checkpoints are then untouched. `advance` receives the number of bytes of
        each write. An exception raised by `watch` leaves the unfinished folder to the next save.
        """
        watch = watch or Unwatched()
        files = plan_files(tensors)
        state_json = encode_state(state)
        try:
            make_folder(self.folder)
            # Leftovers first: the new checkpoint may need their room, and the name of the unfinished folder.
            self._clear_leftovers()
            self._require_space(sum(file.size_bytes for file in files) + len(state_json))
            written = write_folder(self._named(step, ".tmp"), step, files, state_json, watch, advance)
            watch.before_publishing()
            path = self._publish(step, written)
        except OSError as error:
            shutil.rmtree(self._named(step, ".tmp"), ignore_errors=True)
            kind = NoSpaceError if error.errno in _NO_SPACE else CheckpointError
            reason = error if error.filename else error.strerror or error
            raise kind(
                f"the checkpoint of step {step} could not be written to {self.folder}: {reason}; "
                "earlier checkpoints are untouched"
            ) from error
        # Old checkpoints go only now that the new one is complete. So a save needs room for one more than is kept.
        self.delete(self.superfluous(newest=step))
        return path

    def load_latest(
        self, tensors: Mapping[str, Tensor], optional: Callable[[str], bool] = _nothing_is_optional
    ) -> Loaded | None:
        """Fill `tensors` in place from the newest usable checkpoint. Returns None if there are no checkpoints.

        Tensors of an `optional` name may be missing in the checkpoint, or in `tensors`. A warning names a damaged
        checkpoint, and the one before it is tried, which overwrites every tensor. Raises `ForeignCheckpointError` if
        the newest intact one is of another model or version, and `CheckpointError` if there are checkpoints but none
        can be used. The tensors may then hold parts of several checkpoints and must not be trained on.
        """
        failures: list[str] = []
        for step, path in reversed(self.checkpoints().items()):
            try:
                return _load(path, read_manifest(path, step), tensors, optional)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                logger.warning("%s; trying the checkpoint before step %d", error, step)
        if failures:
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be used:", *failures)
        return None

    def latest_step(self) -> int | None:
        """Return the newest complete checkpoint's step, or None."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Return the steps of the checkpoints whose files are all there at full size, rising. Contents are not read."""
        return [step for step, path in self.checkpoints().items() if _is_complete(path, step)]

    def superfluous(self, newest: int | None = None) -> list[Path]:
        """Return the checkpoints older than the k-th newest complete one and not kept for their step or their loss.

        `newest` counts as the newest even if others have a higher step, and is never returned.
        """
        if self.keep_latest_k == 0:
            return []
        # Damaged checkpoints do not count among the k, so that k usable ones stay.
        complete = self.complete_steps()
        latest = sorted({*complete} - {newest}, reverse=True)
        if newest is not None:
            latest.insert(0, newest)
        oldest = min(latest[: self.keep_latest_k], default=0)
        kept = {step for step in complete if self.keep_every_n_steps and step % self.keep_every_n_steps == 0}
        kept.add(-1 if self.best_step is None else self.best_step)
        return [path for step, path in self.checkpoints().items() if step < oldest and step not in kept]

    def leftovers(self) -> list[Path]:
        """Return the folders that killed saves and deletions left. All of them can be deleted."""
        return [
            path for path, step, suffix in self._entries() if suffix and not self._is_all_of(step, suffix)
        ]

    def checkpoints(self) -> dict[int, Path]:
        """Return step -> folder of every checkpoint, complete or damaged, steps rising."""
        found = {
            step: path
            for path, step, suffix in self._entries()
            if suffix is None or self._is_all_of(step, suffix)
        }
        return dict(sorted(found.items()))

    def delete(self, paths: Iterable[Path]) -> None:
        """Delete folders. One that cannot be deleted costs space, not the run: it stays, with a warning."""
        for path in list(paths):
            try:
                # Renamed first: a half-deleted folder must never be listed as a checkpoint.
                if path.is_symlink():
                    # A checkpoint that was moved to another disk, with a link in its place. What the link points to
                    # lies outside this folder, so it stays.
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

    def _publish(self, step: int, written: Path) -> Path:
        path = self._named(step)
        replaced = self._named(step, ".replaced")
        # A folder that is not empty cannot be renamed over, so the former one steps aside.
        if path.exists() or path.is_symlink():
            path.rename(replaced)
        written.rename(path)
        # The new name must be on the disk before the former folder is deleted.
        sync_entry(self.folder)
        if replaced.exists() or replaced.is_symlink():
            self.delete([replaced])
        return path

    def _clear_leftovers(self) -> None:
        """Remove what a killed save or deletion left, and put back a checkpoint whose replacement never came."""
        for entry, step, suffix in self._entries():
            if self._is_all_of(step, suffix):
                entry.rename(self._named(step))
        self.delete(self.leftovers())

    def _require_space(self, size_bytes: int) -> None:
        free_bytes = free_bytes_at(self.folder)
        if free_bytes is not None and size_bytes > free_bytes:
            raise OSError(
                errno.ENOSPC, f"it needs {size_text(size_bytes)} and {size_text(free_bytes)} are free"
            )

    def _is_all_of(self, step: int, suffix: str | None) -> bool:
        """Return whether a folder of this suffix is all that is left of step `step`."""
        return suffix == ".replaced" and not self._named(step).exists()

    def _entries(self) -> list[tuple[Path, int, str | None]]:
        """Return (path, step, suffix) of the folders named as this class names them. All others are left alone."""
        if not self.folder.is_dir():
            return []
        entries = []
        for path in self.folder.iterdir():
            match = _FOLDER_NAME.fullmatch(path.name)
            # A link whose disk is not there is a checkpoint that cannot be read, and must not be passed over in silence.
            if match and (path.is_dir() or path.is_symlink()):
                entries.append((path, int(match[1]), match[2]))
        return entries

    def _named(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step}{suffix}"


def open_checkpoint(path: Path) -> Manifest:
    """Read the manifest of the one checkpoint at `path`, and check that its files are there at full size.

    Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`.
    """
    _refuse_other_folders(path)
    return read_manifest(path)


def load_checkpoint(
    path: Path | str, tensors: Mapping[str, Tensor], optional: Callable[[str], bool] = _nothing_is_optional
) -> Loaded:
    """Fill `tensors` in place from the one checkpoint at `path`, except `optional` ones that it does not hold.

    Files, sizes, state, and the name, dtype and shape of every tensor are checked before the first byte is written.
    The tensors' bytes are checked as they are read, so that they are read once. Only after an error about a checksum
    are `tensors` partly overwritten. Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`.
    """
    path = Path(path)
    return _load(path, open_checkpoint(path), tensors, optional)


def verify_checkpoint(path: Path | str, advance: Callable[[int], object] = lambda nbytes: None) -> int:
    """Check every byte of the checkpoint at `path` against its checksums. Returns its step.

    Raises `NoCheckpointError`, `DamagedCheckpointError` or `ForeignCheckpointError`. Reads the whole folder once and
    needs no model and no memory for one. `advance` receives the number of bytes of each step.
    """
    path = Path(path)
    manifest = open_checkpoint(path)
    check_contents(path, manifest, advance)
    return manifest.step


def _refuse_other_folders(path: Path) -> None:
    """Raise `NoCheckpointError` if `path` has no manifest and is not named as a checkpoint is.

    That is the case for a missing path, a run's folder and its folder of checkpoints. A folder that is named as a
    checkpoint and has no manifest is a damaged checkpoint.
    """
    try:
        (path / MANIFEST_FILE).lstat()
    except (FileNotFoundError, NotADirectoryError):
        if not (_FOLDER_NAME.fullmatch(path.name) and path.is_dir()):
            near = (path, path / "checkpoints") if path.exists() else (path.parent,)
            nearby = (Checkpointer(folder) for folder in near)
            newest = [found.checkpoints()[step] for found in nearby for step in found.complete_steps()]
            raise NoCheckpointError(path, newest[-1] if newest else None) from None
    except OSError:
        pass  # reading the manifest reports the reason


def _load(
    path: Path, manifest: Manifest, tensors: Mapping[str, Tensor], optional: Callable[[str], bool]
) -> Loaded:
    state, stored = check_structure(path, manifest, tensors, optional)
    read_into(path, manifest, tensors)
    return Loaded(manifest.step, state, path, frozenset(stored))


def _is_complete(path: Path, step: int) -> bool:
    try:
        read_manifest(path, step)
    except DamagedCheckpointError:
        return False
    except ForeignCheckpointError:
        return True  # intact, as far as this version can tell
    return True
