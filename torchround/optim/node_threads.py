"""Threads that share the elements of a buffer, each on the node whose memory holds its part.

A machine with several memory nodes (NUMA) has memory near each group of cores. A page belongs to the node of the thread
that writes it first. So every buffer is cut into as many ranges as there are nodes. Threads of node k fill range k of
a new buffer, and update range k later (`HostAllocator`, `CompiledUpdate`). On other machines there is one range, and
no thread is bound to cores.
"""

import ctypes
import itertools
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

NODES = Path("/sys/devices/system/node")

# The cores of each node that this process may use.
Nodes = Sequence[frozenset[int]]


@dataclass
class Range:
    """A part `[start, stop)` of a buffer; `next` is where the first piece begins that no thread has taken yet.

    Compiled code counts `next` up by itself, other work calls `take`. One range is for one of the two.
    """

    start: int
    stop: int
    next: ctypes.c_int64 = field(init=False)
    _taking: threading.Lock = field(init=False, default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.next = ctypes.c_int64(self.start)

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


class NodeThreads:
    """`count` threads, the calling one among them unless there are nodes; then each node has its share of them.

    The calling thread does the work of threads that the system refuses to start. `close` ends the threads.
    """

    def __init__(self, count: int, nodes: Nodes = ()) -> None:
        self._is_bound = len(nodes) > 1
        shares: list[tuple[int, str, frozenset[int] | None]] = [(count - 1, "torchround update", None)]
        if self._is_bound:
            cores = sum(map(len, nodes))
            sized = ((max(1, count * len(node) // cores), node) for node in nodes)
            shares = [(size, f"torchround node {k}", node) for k, (size, node) in enumerate(sized)]
        # By node. Executors of one thread each: one of several keeps the work of a thread that could not be started, and
        # another of its threads would do it at a later time.
        self._threads = [[_thread(name, node) for _ in range(size)] for size, name, node in shares]

    def run(self, length: int, unit: int, work: RangeWork) -> None:
        """Let the threads do the work on `[0, length)`, and return when all of it is done.

        Ranges begin at multiples of `unit`. Fewer than two units for each range are done by the calling thread alone.
        """
        ranges = cut(length, unit, len(self._threads))
        futures: list[Future[None]] = []
        try:
            if length >= 2 * unit * len(ranges):
                for threads, range_ in zip(self._threads, ranges, strict=True):
                    pieces = -(-(range_.stop - range_.start) // unit)
                    futures += _begin(threads, pieces, work, range_)
            if self._is_bound:
                wait(futures)  # then nothing is left for this thread, whose node may be another
            for range_ in ranges:
                work(range_)
        finally:
            wait(futures)  # they write to the caller's buffers
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        for thread in itertools.chain.from_iterable(self._threads):
            thread.shutdown()


def _begin(
    threads: list[ThreadPoolExecutor], most: int, work: RangeWork, range_: Range
) -> Iterator[Future[None]]:
    """Let at most `most` of the threads begin with a range. Threads that cannot be started are dropped."""
    for thread in threads[:most]:
        try:
            yield thread.submit(work, range_)
        except RuntimeError as error:  # a limit on the number of processes, or the interpreter ends
            thread.shutdown(wait=False, cancel_futures=True)
            threads.remove(thread)
            _warn_once(
                f"a thread for work on host memory is refused ({error}); fewer threads do it, more slowly"
            )


def _thread(name: str, cores: frozenset[int] | None) -> ThreadPoolExecutor:
    def bind() -> None:
        try:
            if cores is not None:
                os.sched_setaffinity(0, cores)  # of this thread alone
        except OSError as error:
            _warn_once(
                f"threads cannot be bound to the cores of a memory node ({error}); they run on any core, where "
                "memory may be farther away"
            )

    return ThreadPoolExecutor(1, thread_name_prefix=name, initializer=bind)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)


def cut(length: int, unit: int, parts: int) -> list[Range]:
    """Cut `[0, length)` into ranges of nearly equal size that begin at multiples of `unit`."""
    bounds = [length * k // parts // unit * unit for k in range(parts)] + [length]
    return [Range(start, stop) for start, stop in itertools.pairwise(bounds)]


def memory_nodes(folder: Path = NODES) -> list[frozenset[int]]:
    """Return the usable cores of each node that has some, in the order of the nodes; none if the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    try:
        lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
        nodes = [_cores(path.read_text()) & usable for path in lists]
    except (OSError, ValueError):
        return []
    return [node for node in nodes if node]


@cache
def nodes_of_machine() -> Nodes:
    """Return the nodes of this machine, as the first caller found them: threads are bound to them later."""
    return tuple(memory_nodes())


def _cores(text: str) -> frozenset[int]:
    """Read a list of cores such as `0-3,8-11`; a node without cores has an empty one."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return frozenset(cores)
