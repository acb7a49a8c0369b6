"""Files that are written or read once, front to back, without filling the page cache.

A checkpoint is about as large as what is left of the host's memory is small. Cached, its pages push out everything
else, and taking each new page costs time: in a virtual machine whose host hands memory out at its first use, several
times the disk's own (docs/benchmarks.md). What lies behind is therefore given back as the file goes on, and the next
pages are the same memory again. For a file that is written this also starts the disk at once, where it would
otherwise stand still until the kernel has enough dirty pages, or until the sync at the end.
"""

import os
from typing import BinaryIO

WINDOW_BYTES = 2**23


class PassingThrough:
    """Is told how far `file` has been written or read, and has the page cache drop what lies behind.

    Pages that are not on the disk yet are sent there without waiting, and dropped at a later turn; `end` is for the
    last ones, after a sync. This is advice to the kernel: where there is none to give, nothing happens.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._passed_bytes = 0
        self._advised_bytes = 0

    def passed(self, nbytes: int) -> None:
        """The next `nbytes` are written or read."""
        self._passed_bytes += nbytes
        if self._passed_bytes - self._advised_bytes >= WINDOW_BYTES:
            self._drop_until(self._passed_bytes)
            self._advised_bytes = self._passed_bytes

    def end(self) -> None:
        """Nothing more comes; what was written is synced."""
        self._drop_until(0)

    def _drop_until(self, end: int) -> None:
        """From the start, since some pages were still on their way to the disk before; 0 is the end of the file."""
        if hasattr(os, "posix_fadvise"):  # Linux, FreeBSD
            os.posix_fadvise(self._file.fileno(), 0, end, os.POSIX_FADV_DONTNEED)
