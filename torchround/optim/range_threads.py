"""Threads that share the elements of a buffer: each takes the next piece until none is left."""

import ctypes
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache

logger = logging.getLogger(__name__)


@dataclass
class Range:
    """The elements `[0, stop)` of a buffer; `next` is where the first piece begins that no thread has taken yet.

    Compiled code counts `next` up by itself, other work calls `take`. One range is for one of the two.
    """

    stop: int
    next: ctypes.c_int64 = field(init=False, default_factory=ctypes.c_int64)
    _taking: threading.Lock = field(init=False, default_factory=threading.Lock)

    def take(self, size: int) -> tuple[int, int] | None:
        """Take the next piece, at most `size` long, and return where it begins and ends; None if none is left."""
        with self._taking:
            start = self.next.value
            if start >= self.stop:
                return None
            stop = min(start + size, self.stop)
            self.next.value = stop
        return start, stop


# Takes pieces of a range until none is left. Several threads run it at once on one range.
RangeWork = Callable[[Range], None]


class RangeThreads:
    """`count` threads, the calling one among them.

    The calling thread does the work of threads that the system refuses to start. `close` ends the threads.
    """

    def __init__(self, count: int) -> None:
        # Executors of one thread each: one of several keeps the work of a thread that could not be started, and another
        # of its threads would do it at a later time.
        self._threads = [
            ThreadPoolExecutor(1, thread_name_prefix="torchround update") for _ in range(count - 1)
        ]

    def run(self, length: int, unit: int, work: RangeWork) -> None:
        """Let the threads do the work on `[0, length)`, and return when all of it is done.

        At most one thread works for each `unit` elements.
        """
        whole, futures = Range(length), list[Future[None]]()
        try:
            futures += self._begin(max(0, length // unit - 1), work, whole)
            work(whole)
        finally:
            wait(futures)  # they write to the caller's buffers
        for future in futures:
            future.result()

    def _begin(self, most: int, work: RangeWork, whole: Range) -> Iterator[Future[None]]:
        """Let at most `most` of the threads begin. Threads that cannot be started are dropped."""
        for thread in self._threads[:most]:
            try:
                yield thread.submit(work, whole)
            except RuntimeError as error:  # a limit on the number of processes, or the interpreter ends
                thread.shutdown(wait=False, cancel_futures=True)
                self._threads.remove(thread)
                _warn_once(
                    f"a thread for work on host memory is refused ({error}); fewer threads do it, more slowly"
                )

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
