"""The folders of checkpoints: their names, which are complete, and how one appears or goes, also in a power cut.

**The package spells the names of folders and files here alone.** The rest of it asks, so other names need a change of the
constants below; pages and commands that show a name are text (docs/checkpoints.md, "Other names";
`tests/checkpoint/test_other_names.py`):

    outputs/my-run/checkpoints/                RUN_SUBFOLDER
        step-120                               STEP_NAME: complete
            tensors-00000.safetensors ..       TENSOR_FILE: the tensors, those of odd sizes last
            state.json                         STATE_FILE: everything that is not a tensor
            manifest.json                      MANIFEST_FILE: sizes and checksums of the files above, written last
        step-120.tmp                           UNFINISHED: being written, or left by a killed save
        step-120.trash                         DELETED: being deleted, or left by a killed deletion
        step-120.replaced                      REPLACED: the former step-120 while a new one is renamed; counts as step-120
                                               if a kill prevented that

A save writes the folder of a step under an unfinished name, syncs every file and the folder, renames it to the step's own
name and syncs the parent. Only a folder with that name is a checkpoint. An old checkpoint gets a third name before it is
deleted. A kill at any moment therefore leaves complete checkpoints and leftovers, and the next save removes the leftovers.
"""

import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

logger = logging.getLogger(__name__)

RUN_SUBFOLDER = "checkpoints"
STEP_NAME = "step-{}"
"""A format of one number, the step, such as `"step-{:08d}"`. Folders that another format named are not found."""
TENSOR_FILE = "tensors-{:05d}.safetensors"
"""A format of one number. The number of a machine's first file is its rank times `FILES_PER_MACHINE`."""
FILES_PER_MACHINE = 100_000
STATE_FILE = "state.json"
MANIFEST_FILE = "manifest.json"
UNFINISHED, DELETED, REPLACED = SUFFIXES = ".tmp", ".trash", ".replaced"
"""Each begins with a dot, which ends the digits of a step: `step-1` with a suffix `0` would be the name of step 10."""


def checkpoint_name(step: int, suffix: str = "") -> str:
    return STEP_NAME.format(step) + suffix


def tensor_file_name(number: int) -> str:
    return TENSOR_FILE.format(number)


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder is named as a checkpoint is, or as a leftover."""
    return _step_of(name) is not None


def is_file_of_checkpoint(name: str) -> bool:
    """Whether a manifest may list a file of this name."""
    return name == STATE_FILE or _number_in(name, TENSOR_FILE) is not None


def _step_of(name: str) -> tuple[int, str] | None:
    """Find the step and the suffix of a folder; None if it is no checkpoint's."""
    suffix = next((suffix for suffix in SUFFIXES if name.endswith(suffix)), "")
    step = _number_in(name.removesuffix(suffix), STEP_NAME)
    return None if step is None else (step, suffix)


def _number_in(name: str, form: str) -> int | None:
    """Find the number for which the format gives `name`; None if there is none."""
    before, _, after = re.split(r"(\{.*\})", form)
    digits = re.fullmatch(f"{re.escape(before)}([0-9]{{1,18}}){re.escape(after)}", name)
    return int(digits[1]) if digits and form.format(int(digits[1])) == name else None


class StepFolders:
    """The folders of checkpoints in `folder`. Other entries are left alone."""

    def __init__(self, folder: Path | str) -> None:
        assert all(suffix.startswith(".") for suffix in SUFFIXES), f"one of {SUFFIXES} begins with no dot"
        self.folder = Path(folder)

    def named(self, step: int, suffix: str = "") -> Path:
        return self.folder / checkpoint_name(step, suffix)

    def checkpoints(self) -> dict[int, Path]:
        """Find the folder of every checkpoint, complete or damaged, by its step, steps rising."""
        return dict(
            sorted((step, path) for path, step, suffix in self._entries() if self._counts(step, suffix))
        )

    def leftovers(self) -> list[Path]:
        """List the folders that killed saves and deletions left. All of them can be deleted."""
        return [path for path, step, suffix in self._entries() if not self._counts(step, suffix)]

    def free_bytes(self) -> int | None:
        """Count the free bytes of the disk, and those that the next save clears away first; None if not known."""
        free_bytes = free_bytes_at(self.folder)
        if free_bytes is not None:
            for path in self.leftovers():
                with suppress(OSError):  # deleted meanwhile, or not readable
                    free_bytes += sum(file.lstat().st_size for file in path.iterdir())
        return free_bytes

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

    def _counts(self, step: int, suffix: str) -> bool:
        """Whether a folder is the checkpoint of its step. A replaced one is, if it is all that is left."""
        return not suffix or (suffix == REPLACED and not self.named(step).exists())

    def _entries(self) -> list[tuple[Path, int, str]]:
        """List path, step and suffix of the folders that are named as checkpoints are."""
        paths = self.folder.iterdir() if self.folder.is_dir() else ()
        named = [(path, _step_of(path.name)) for path in paths]
        # A link whose disk is not there is a checkpoint that cannot be read, and must not be passed over in silence.
        return [(path, *found) for path, found in named if found and (path.is_dir() or path.is_symlink())]


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


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to fill. It gets its name after the block, once everything in it is on the disk."""
    unfinished = path.with_name(path.name + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    make_folder(path.absolute().parent)
    unfinished.mkdir()  # not through a link in its place
    yield unfinished
    # First the files, then their folder: the new name must never point at a folder whose files a crash could lose.
    for written in (*unfinished.rglob("*"), unfinished):
        sync_entry(written)
    unfinished.rename(path)
    sync_entry(path.parent)


def free_bytes_at(path: Path) -> int | None:
    """Count the free bytes of the disk that `path` is, or will be, on. None if the file system does not say."""
    existing = next((folder for folder in (path, *path.absolute().parents) if folder.is_dir()), None)
    try:
        usage = shutil.disk_usage(existing or "/")
    except OSError:
        return None
    # Some file systems of networks have no total, and then no free bytes either.
    return usage.free if usage.total else None
