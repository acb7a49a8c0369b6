"""Files that are read or written once, front to back: checksummed on the way, and left out of the page cache.

A checkpoint is about as large as what is left of the host's memory is small. Cached, its pages push out everything
else, and taking each new page costs time: in a virtual machine whose host hands memory out at its first use, several
times the disk's own (docs/benchmarks.md). What lies behind is therefore given back as the file goes on, and the next
pages are the same memory again. Where a file is written through the cache this also starts the disk at once, which
would otherwise stand still until the kernel has enough dirty pages, or until the sync at the end.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import BinaryIO

from torchround.checkpoint.checksum import Checksum
from torchround.checkpoint.direct_file import DirectFile

# One request to the disk: large beside what it costs to ask, and to hand a piece to another thread.
PIECE_BYTES = 2**23


class _OnePass:
    """Every byte that passes goes into `checksum`, and leaves the page cache.

    Beside each piece the one before it is hashed, in a thread of its own, which never touches the file: nothing waits
    for a disk that hangs but its caller. When a method returns, all is hashed: memory that was given may be changed.
    """

    def __init__(self, descriptor: int, checksum: Checksum) -> None:
        self._descriptor = descriptor
        self._checksum = checksum
        self._beside = ThreadPoolExecutor(1, "torchround checksum")
        self._passed_bytes = 0
        self._dropped_bytes = 0

    def close(self) -> None:
        self._beside.shutdown()

    def end(self) -> None:
        """Nothing more comes, and what was written is synced: the last pages leave the page cache."""
        self._drop_until(0)

    def _pieces(self, memory: memoryview) -> Iterator[memoryview]:
        """Each has been read or written when the next one is asked for."""
        before: Future[None] | None = None
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            yield piece
            if before is not None:
                before.result()
            if start + PIECE_BYTES < len(memory):
                before = self._beside.submit(self._checksum.update, piece)
            else:
                self._checksum.update(piece)
            self._leave_behind(len(piece))

    def _leave_behind(self, nbytes: int) -> None:
        self._passed_bytes += nbytes
        if self._passed_bytes - self._dropped_bytes >= PIECE_BYTES:
            self._drop_until(self._passed_bytes)
            self._dropped_bytes = self._passed_bytes

    def _drop_until(self, end: int) -> None:
        """Advice to the kernel, from the start: pages that are not on the disk yet are only sent there, and are
        dropped the next time. 0 is the end of the file. Where it takes no such advice, the pages stay."""
        if hasattr(os, "posix_fadvise"):  # Linux, FreeBSD
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, end, os.POSIX_FADV_DONTNEED)


class WritePass(_OnePass):
    """Writes `file`, from its start."""

    def __init__(self, file: DirectFile, checksum: Checksum) -> None:
        super().__init__(file.fileno(), checksum)
        self._file = file

    def write(self, memory: memoryview, may_go_on: Callable[[], object]) -> None:
        """All of `memory`; `may_go_on` is called before each piece and may raise."""
        for piece in self._pieces(memory):
            may_go_on()
            self._file.write(piece)


class ReadPass(_OnePass):
    """Reads the unbuffered `file`, from where it stands."""

    def __init__(self, file: BinaryIO, checksum: Checksum) -> None:
        super().__init__(file.fileno(), checksum)
        self._file = file

    def read_into(self, memory: memoryview) -> None:
        """Fill `memory`. Raises `ValueError` if the file ends before."""
        for piece in self._pieces(memory):
            rest = piece
            while rest:
                num_read = self._file.readinto(rest)  # type: ignore[attr-defined]
                if not num_read:
                    raise ValueError(f"it ends {len(rest)} bytes before a tensor does")
                rest = rest[num_read:]

    def pass_by(self, nbytes: int) -> None:
        """Read `nbytes` for their checksum alone. Raises `ValueError` if the file ends before."""
        # Two pieces: one to be read into while the other one is hashed.
        scratch = memoryview(bytearray(min(nbytes, 2 * PIECE_BYTES)))
        for start in range(0, nbytes, 2 * PIECE_BYTES):
            self.read_into(scratch[: nbytes - start])
