"""The checkpoints of one run: `step-N` folders that appear whole or not at all.

A save writes `step-N.tmp`, syncs every file and the folder, renames it to `step-N` and syncs the parent; only
a renamed folder is a checkpoint. Old ones are renamed to `.trash` before they are deleted, so a kill at any
moment leaves complete checkpoints and leftovers, which the next save removes. Names of folders:

    step-N            complete
    step-N.tmp        being written, or left by a killed save
    step-N.trash      being deleted, or left by a killed deletion
    step-N.replaced   the former step-N while another takes its place; counts as step-N if a kill came between
"""

import logging
import re
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from torchround.checkpoint.errors import CheckpointError, DamagedCheckpointError
from torchround.checkpoint.folder import check_contents, check_structure, read_into, write_folder
from torchround.checkpoint.manifest import Manifest, encode_state, read_manifest, read_state
from torchround.checkpoint.sync import make_folder, sync_folder
from torchround.checkpoint.tensor_file import plan_files

logger = logging.getLogger(__name__)

_FOLDER_NAME = re.compile(r"step-(0|[1-9]\d*)(\.tmp|\.trash|\.replaced)?")


@dataclass(frozen=True)
class Loaded:
    """What a load found besides the tensors: the step, and the state as it was given to `save`."""

    step: int
    state: dict[str, Any]
    path: Path


class Checkpointer:
    """Saves to and loads from `folder`, keeping the newest `keep_latest_k` complete checkpoints (0: all)."""

    def __init__(self, folder: Path | str, keep_latest_k: int = 0) -> None:
        if keep_latest_k < 0:
            raise ValueError(f"keep_latest_k is at least 0, got {keep_latest_k}")
        self.folder = Path(folder)
        self.keep_latest_k = keep_latest_k

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Path:
        """Write `tensors` and the JSON-able `state` as `step-N`, then delete the ones too many.

        Tensors are contiguous CPU tensors of any dtype; their bytes go from where they are to the file, so
        nothing may write to them until this returns. Raises `ValueError` before anything is written if a
        tensor or the state cannot be stored, `CheckpointError` if the disk fails; the checkpoints that were
        there are then still there.
        """
        files = plan_files(tensors)
        state_json = encode_state(state)
        try:
            make_folder(self.folder)
            self._clear_leftovers()
            self._require_space(sum(file.size_bytes for file in files) + len(state_json))
            path = self._publish(step, write_folder(self._named(step, ".tmp"), step, files, state_json))
        except OSError as error:
            shutil.rmtree(self._named(step, ".tmp"), ignore_errors=True)
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}: {error}; "
                "earlier checkpoints are untouched"
            ) from error
        self._prune(newest=step)
        return path

    def load_latest(self, tensors: Mapping[str, Tensor]) -> Loaded | None:
        """Fill `tensors` in place from the newest checkpoint that can be used; `None` if there is none.

        A damaged one is named in a warning and the one before it is tried, which overwrites every tensor.
        Raises `CheckpointError` if there are checkpoints and none can be used; the tensors may then hold
        parts of several and must not be trained on.
        """
        failures: list[str] = []
        for step, path in sorted(self._folders().items(), reverse=True):
            try:
                return _load(path, read_manifest(path, step), tensors)
            except DamagedCheckpointError as error:
                failures.append(str(error))
                logger.warning("%s; trying the checkpoint before step %d", error, step)
        if failures:
            listed = "".join(f"\n  {failure}" for failure in failures)
            raise CheckpointError(f"none of the checkpoints in {self.folder} can be used:{listed}")
        return None

    def newest_state(self) -> dict[str, Any] | None:
        """The state that was saved last and can be read; its tensors are not looked at."""
        for step, path in sorted(self._folders().items(), reverse=True):
            with suppress(DamagedCheckpointError):
                return read_state(path, read_manifest(path, step))
        return None

    def latest_step(self) -> int | None:
        """The newest complete checkpoint's step."""
        return max(self.complete_steps(), default=None)

    def complete_steps(self) -> list[int]:
        """Steps of the checkpoints whose files are all there at full size, rising. Contents are not read."""
        return sorted(step for step, path in self._folders().items() if _is_complete(path, step))

    def _publish(self, step: int, written: Path) -> Path:
        path = self._named(step)
        replaced = self._named(step, ".replaced")
        if path.exists():
            path.rename(replaced)
        written.rename(path)
        sync_folder(self.folder)
        if replaced.exists():
            self._delete([replaced])
        return path

    def _prune(self, newest: int) -> None:
        """Delete all that is older than the k-th newest complete checkpoint, never the one just saved."""
        if self.keep_latest_k == 0:
            return
        complete = [step for step in self.complete_steps() if step != newest]
        kept = [newest, *reversed(complete)][: self.keep_latest_k]
        self._delete(path for step, path in self._folders().items() if step < min(kept))

    def _clear_leftovers(self) -> None:
        """Remove what a killed save or deletion left; put a checkpoint back whose replacement never came."""
        for entry, step, suffix in self._entries():
            if suffix == ".replaced" and not self._named(step).exists():
                entry.rename(self._named(step))
            elif suffix:
                self._delete([entry])

    def _delete(self, paths: Iterable[Path]) -> None:
        """A folder that cannot be deleted costs space, not the run: it is left with a warning."""
        for path in list(paths):
            try:
                if path.suffix not in (".tmp", ".trash"):
                    path = path.rename(path.with_name(path.name.removesuffix(".replaced") + ".trash"))
                shutil.rmtree(path)
            except OSError as error:
                logger.warning(
                    "could not delete the old checkpoint %s: %s; it goes on using space", path, error
                )

    def _require_space(self, size_bytes: int) -> None:
        free_bytes = shutil.disk_usage(self.folder).free
        if size_bytes > free_bytes:
            needed, free = size_bytes / 2**30, free_bytes / 2**30
            raise OSError(f"it needs {needed:.2f} GiB and {free:.2f} GiB are free")

    def _folders(self) -> dict[int, Path]:
        """Step -> folder of everything listed as a checkpoint, complete or damaged."""
        found: dict[int, Path] = {}
        for path, step, suffix in self._entries():
            if suffix is None or (suffix == ".replaced" and not self._named(step).exists()):
                found[step] = path
        return found

    def _entries(self) -> list[tuple[Path, int, str | None]]:
        """(path, step, suffix) of the folders in `folder` that are ours; others are left alone."""
        if not self.folder.is_dir():
            return []
        entries = []
        for path in self.folder.iterdir():
            match = _FOLDER_NAME.fullmatch(path.name)
            if match and path.is_dir():
                entries.append((path, int(match[1]), match[2]))
        return entries

    def _named(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step-{step}{suffix}"


def load_checkpoint(path: Path | str, tensors: Mapping[str, Tensor]) -> Loaded:
    """Fill `tensors` in place from the one checkpoint at `path`, or raise `DamagedCheckpointError`.

    Everything but the tensors' bytes is checked before the first one is written: files, sizes, state, and the
    name, dtype and shape of every tensor. The bytes are checked as they are read, so that they are read once:
    after an error about a checksum, and only then, `tensors` are partly overwritten.
    """
    path = Path(path)
    return _load(path, read_manifest(path), tensors)


def verify_checkpoint(path: Path | str) -> int:
    """Check every byte of the checkpoint at `path` against its checksums. Returns its step.

    Raises `DamagedCheckpointError`. Reads the whole folder once and needs no model and no memory for one.
    """
    path = Path(path)
    manifest = read_manifest(path)
    check_contents(path, manifest)
    return manifest.step


def _load(path: Path, manifest: Manifest, tensors: Mapping[str, Tensor]) -> Loaded:
    state = check_structure(path, manifest, tensors)
    read_into(path, manifest, tensors)
    return Loaded(manifest.step, state, path)


def _is_complete(path: Path, step: int) -> bool:
    try:
        read_manifest(path, step)
    except DamagedCheckpointError:
        return False
    return True
