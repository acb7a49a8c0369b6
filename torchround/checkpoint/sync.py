"""Making files and folders survive a power cut: what is not synced may be lost or empty afterwards."""

import os
from pathlib import Path


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file whose bytes are on the disk when this returns; it must not be there yet."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Put the folder's entries (new names, renames) on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Create `path` and its parents, each new name synced in the folder above it."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)
