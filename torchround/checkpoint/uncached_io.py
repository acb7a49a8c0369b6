"""Reads and writes files once, front to back: checksummed on the way, and kept out of the page cache.

A checkpoint is about as large as the host memory that training leaves free. If the kernel cached it, its pages would
push out everything else, and taking each new page costs time: in a virtual machine whose host hands memory out at its
first use, several times the disk's own (docs/benchmarks.md). A file is therefore written straight from the memory that
holds the tensors (`DirectFile`), and pages that were cached all the same are given back piece by piece (`UncachedPass`).
"""

import errno
import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import xxhash

logger = logging.getLogger(__name__)

# One request to the disk: large compared with the cost of the request, and of handing a piece to another thread.
PIECE_BYTES = 2**23

# Nearly all disks have one of these block sizes.
SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES = 512, 4096


class UncachedPass:
    """One pass over the open file `descriptor`, front to back, in pieces.

    Each piece goes into the checksum, XXH3 with 128 bits. It finds damage by accident, not by an attacker. The previous
    piece is hashed while the current one is transferred, in a thread that never touches the file, so that only the
    caller waits for a disk that hangs. When `pieces` ends, every byte is hashed, so the caller may change the memory.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = xxhash.xxh3_128()
        self._hashing = ThreadPoolExecutor(1, "torchround checksum")
        self._passed_bytes = self._dropped_bytes = 0

    def close(self) -> None:
        self._hashing.shutdown()

    def pieces(self, memory: memoryview) -> Iterator[memoryview]:
        """Yield `memory` in pieces. The caller has transferred a piece by the time it asks for the next one."""
        previous: Future[None] | None = None
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            yield piece
            # One piece at a time: XXH3 must see them in order.
            if previous is not None:
                previous.result()
            if start + PIECE_BYTES < len(memory):
                previous = self._hashing.submit(self._hash.update, piece)
            else:
                self._hash.update(piece)
            self._passed_bytes += len(piece)
            if self._passed_bytes - self._dropped_bytes >= PIECE_BYTES:
                self._drop_until(self._passed_bytes)
                self._dropped_bytes = self._passed_bytes

    def end(self) -> str:
        """Drop the last pages, once all is transferred and synced. Returns the checksum as 32 hexadecimal digits."""
        self._drop_until(0)
        return self._hash.hexdigest()

    def _drop_until(self, end: int) -> None:
        """Advise the kernel to drop the file's pages from the start to `end`; 0 is the end of the file.

        Pages that are not on the disk yet are only sent there, and dropped by the next call. That starts the disk at
        once, which would otherwise idle until the kernel has enough dirty pages. A kernel that refuses the advice
        keeps the pages.
        """
        if hasattr(os, "posix_fadvise"):  # Linux, FreeBSD
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, end, os.POSIX_FADV_DONTNEED)


class DirectFile:
    """A new file, written front to back past the page cache, straight from the memory that holds the tensors.

    A write through the page cache copies every byte and takes a page for each 4 KiB, which costs a processor several
    times what hashing the bytes does, beside the optimizer (docs/benchmarks.md). Direct transfers are whole blocks of
    the disk, aligned both in memory and in the file. The host store begins its buffers at a page and each weight at a
    multiple of 512 bytes, so nearly all of a checkpoint can be written as it is in memory. Unaligned pieces, and those
    below `direct_bytes`, are gathered in a buffer of `buffer_bytes` first: the writer waits for each direct transfer.

    If the file system or the platform has no direct transfers, the file is written through the page cache. Raises
    `OSError` as an ordinary file does, and `FileExistsError` if `path` exists.
    """

    def __init__(self, path: Path, buffer_bytes: int = 2**22, direct_bytes: int = 2**18) -> None:
        # A mapping begins at a page, so the buffer is aligned to every disk's blocks.
        self._buffer = memoryview(mmap.mmap(-1, buffer_bytes))
        self._direct_bytes = direct_bytes
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
        """Close the file. Bytes that were not synced may be missing."""
        os.close(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def write(self, memory: memoryview) -> None:
        """Write all of `memory`, which may change afterwards. The last bytes may reach the file only in `sync`."""
        rest = memory
        while rest and self._block_bytes:
            # The file's position must be a whole block before a direct transfer: `gap_bytes` fill it up.
            gap_bytes = -self._held_bytes % self._block_bytes
            whole_bytes = (len(rest) - gap_bytes) // self._block_bytes * self._block_bytes
            address = int(np.frombuffer(rest, np.uint8).ctypes.data)
            if whole_bytes >= self._direct_bytes and (address + gap_bytes) % self._block_bytes == 0:
                self._hold(rest[:gap_bytes])
                self._put_held()
                self._put(rest[gap_bytes : gap_bytes + whole_bytes])
                rest = rest[gap_bytes + whole_bytes :]
            else:
                copied = rest[: len(self._buffer) - self._held_bytes]
                self._hold(copied)
                if self._held_bytes == len(self._buffer):
                    self._put_held()
                rest = rest[len(copied) :]
        # Without direct transfers the buffer is empty, and all that is left goes through the page cache.
        self._put(rest)

    def sync(self) -> None:
        """Return once every byte is on the disk. Nothing more may be written."""
        self._end_direct()  # the bytes still in the buffer need not be whole blocks
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
                # A transfer may end in the middle of a block; the rest of it is then unaligned.
                if error.errno != errno.EINVAL or not self._block_bytes:
                    raise
                self._end_direct()

    def _find_block(self) -> int:
        """Begin direct transfers and return the smallest block that the disk accepts, in bytes; 0 if none."""
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, self._flags() | os.O_DIRECT)
        except (AttributeError, OSError):  # other platforms; some file systems in memory, for instance
            return 0
        for block_bytes in (SMALLEST_BLOCK_BYTES, LARGEST_BLOCK_BYTES):
            try:
                # From memory aligned to one block and not to a larger one, as later writes may be.
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
        "more processor time"
    )
