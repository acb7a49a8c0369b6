"""Files that are read or written once, front to back: checksummed on the way, and left out of the page cache.

A checkpoint is about as large as what is left of the host's memory is small. Cached, its pages push out everything
else, and taking each new page costs time: in a virtual machine whose host hands memory out at its first use, several
times the disk's own (docs/benchmarks.md). What lies behind is therefore given back as the file goes on, and the next
pages are the same memory again. Where a file is written through the cache this also starts the disk at once, which
would otherwise stand still until the kernel has enough dirty pages, or until the sync at the end.
"""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchround.checkpoint.checksum import Checksum

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


# New files that are written past the page cache, straight from the memory where the tensors lie.
#
# A write through the page cache copies every byte and takes a page for each 4 KiB, which costs a processor several times
# what hashing the bytes does, and costs it beside the optimizer (docs/benchmarks.md). Direct transfers are whole blocks of
# the disk, aligned both in memory and in the file. The host store begins its buffers at a page and each parameter at a
# multiple of 512 bytes, so nearly all of a checkpoint can go as it lies; what cannot, and what is small, is gathered first.


logger = logging.getLogger(__name__)

# Nearly all disks have the one or the other.
SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES = 512, 4096
_BUFFER_BYTES = 2**22
# Less is gathered in the buffer: each transfer is waited for.
_DIRECT_BYTES = 2**18


class DirectFile:
    """The new file `path`, written front to back; it must not be there yet.

    Where the file system or the platform has no direct transfers, it is written through the page cache. Raises
    `OSError` as an ordinary file does.
    """

    def __init__(self, path: Path) -> None:
        self._buffer = memoryview(mmap.mmap(-1, _BUFFER_BYTES))
        self._held_bytes = 0
        self._descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666)
        try:
            self._block_bytes = self._find_block()
        except BaseException:
            self.close()
            raise
        if not self._block_bytes:
            _warn_once()

    def close(self) -> None:
        """What was not synced may be missing."""
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, memory: memoryview) -> None:
        """All of `memory`, which may change afterwards; the last of it may be in the file only after `sync`."""
        rest = memory
        while rest and self._block_bytes:
            gap_bytes = -self._held_bytes % self._block_bytes
            whole_bytes = (len(rest) - gap_bytes) // self._block_bytes * self._block_bytes
            if whole_bytes >= _DIRECT_BYTES and (_address(rest) + gap_bytes) % self._block_bytes == 0:
                self._hold(rest[:gap_bytes])
                self._put_held()
                self._put(rest[gap_bytes : gap_bytes + whole_bytes])
                rest = rest[gap_bytes + whole_bytes :]
            else:
                copied = rest[: _BUFFER_BYTES - self._held_bytes]
                self._hold(copied)
                if self._held_bytes == _BUFFER_BYTES:
                    self._put_held()
                rest = rest[len(copied) :]
        self._put(rest)

    def sync(self) -> None:
        """Have everything on the disk. Nothing more may be written."""
        self._end_direct()  # what is held need not be whole blocks
        self._put_held()
        os.fsync(self._descriptor)

    def _hold(self, memory: memoryview) -> None:
        self._buffer[self._held_bytes : self._held_bytes + len(memory)] = memory
        self._held_bytes += len(memory)

    def _put_held(self) -> None:
        self._put(self._buffer[: self._held_bytes])
        self._held_bytes = 0

    def _put(self, memory: memoryview) -> None:
        while memory:
            try:
                memory = memory[os.write(self._descriptor, memory) :]
            except OSError as error:
                # The rest of a transfer that ended in the middle of a block.
                if error.errno != errno.EINVAL or not self._block_bytes:
                    raise
                self._end_direct()

    def _find_block(self) -> int:
        """Begin direct transfers, and return the smallest block that the disk takes, found by trying; 0 where it takes
        none."""
        if not hasattr(os, "O_DIRECT"):
            return 0
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags() | os.O_DIRECT)
        except OSError:  # some file systems in memory, for instance
            return 0
        for block_bytes in (SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES):
            try:
                # From memory that is aligned to a block and no more, as what is written later may be.
                os.pwrite(self._descriptor, self._buffer[block_bytes : 2 * block_bytes], 0)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
            else:
                os.ftruncate(self._descriptor, 0)
                return block_bytes
        self._end_direct()
        return 0

    def _end_direct(self) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags() & ~getattr(os, "O_DIRECT", 0))
        self._block_bytes = 0

    def _flags(self) -> int:
        return fcntl.fcntl(self._descriptor, fcntl.F_GETFL)


@cache
def _warn_once() -> None:
    logger.warning(
        "the disk takes no direct transfers (O_DIRECT): checkpoints are written through the page cache, which takes "
        "more of the processors' time"
    )


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)
