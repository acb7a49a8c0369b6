"""Making files and folders survive a power cut: what is not synced may be lost or empty afterwards.

And opening them for reading: only what is a file in its own right, never a link, a pipe or a device.
"""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def write_synced(path: Path, content: bytes) -> None:
    """Write a new file whose bytes are on the disk when this returns; it must not be there yet."""
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
    """Create `path` and its parents, each new name synced in the folder above it."""
    if path.is_dir():
        return
    if path.parent != path:
        make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_entry(path.parent)


def open_regular(path: Path) -> BinaryIO:
    """Open a file for unbuffered reading. Raises `OSError`, also where `path` is a link or no ordinary file."""
    # Without O_NONBLOCK, opening a pipe would wait for somebody to write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not an ordinary file")
    return open(descriptor, "rb", buffering=0)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """The content of an ordinary file of at most `most_bytes`. Raises `OSError`."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most_bytes:
            raise OSError(f"{size_bytes} bytes are more than the {most_bytes} that it may have")
        return file.read(size_bytes)
