"""Reads and writes regular files: never through a link, a pipe or a device that was put in a file's place."""

import os
import secrets
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import BinaryIO


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


def refuse_links_out_of(folder: Path, endings: Collection[str]) -> None:
    """Raise `OSError` if a file in the folder, or in a folder in it, is a link to a place outside the folder.

    A snapshot in a hub's cache may link to its `blobs`: to any place below the cache's folder `models--*` of the model.
    """
    real = folder.resolve()
    around = next((above for above in real.parents if above.name.startswith("models--")), real)
    for path in (*folder.glob("*"), *folder.glob("*/*")):
        if path.suffix in endings and path.is_file() and not path.resolve().is_relative_to(around):
            raise OSError(f"{path} is a link to {path.resolve()}, outside {around}")


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file as `replaced_whole` does. Text is written in UTF-8. Raises `OSError`."""
    with replaced_whole(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced_whole(path: Path) -> Iterator[BinaryIO]:
    """Yield a new file that replaces `path` after the block: a reader finds the old content or all of the new.

    A link is replaced, not followed. After an error the old content stays. Raises `OSError`, also for no regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is a directory, a pipe or a device; legal: the name of a file")
    # An unknown name, opened exclusively: another person cannot put a link there, nor a second process the same name.
    unfinished = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        with open(unfinished, "x+b") as file:
            yield file
        unfinished.replace(path)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
