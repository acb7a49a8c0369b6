"""Opens regular files for reading: never a link, a pipe or a device that was put in a file's place."""

import os
import stat
from io import FileIO
from pathlib import Path


def open_regular(path: Path) -> FileIO:
    """Open a file for unbuffered reading. Raises `OSError`, also if `path` is a link or not a regular file."""
    # Without O_NONBLOCK, opening a pipe would wait until another process writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError("not an ordinary file")
    return open(descriptor, "rb", buffering=0)


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Read a regular file of at most `most_bytes`. Raises `OSError`."""
    with open_regular(path) as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes > most_bytes:
            raise OSError(f"{size_bytes} bytes are more than the {most_bytes} that it may have")
        return file.read(size_bytes)
