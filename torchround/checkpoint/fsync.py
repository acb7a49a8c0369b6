"""Makes files and folders survive a power cut: a file that is not synced may be lost or empty afterwards."""

import os
import shutil
from pathlib import Path


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
