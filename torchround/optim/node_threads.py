"""Threads that share the elements of a buffer, each on the node whose memory holds its part.

A machine with several memory nodes (NUMA) has memory near each group of cores. A page belongs to the node of the thread
that writes it first. So every buffer is cut into as many ranges as there are nodes. Threads of node k fill range k of
a new buffer, and update range k later (`HostAllocator`, `CompiledUpdate`). On other machines there is one range, and
no thread is bound to cores.
"""

import ctypes
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

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

    `close` ends them.
    """

    def __init__(self, count: int, nodes: Nodes = ()) -> None:
        self._nodes = nodes if len(nodes) > 1 else ()
        if self._nodes:
            cores = sum(map(len, self._nodes))
            self._counts = [max(1, count * len(node) // cores) for node in self._nodes]
            sized = enumerate(zip(self._counts, self._nodes, strict=True))
            self._pools = [_pool(size, f"torchround node {k}", node) for k, (size, node) in sized]
        else:
            self._counts = [count - 1]
            self._pools = [_pool(count - 1, "torchround update", None)] if count > 1 else []

    def run(self, length: int, unit: int, work: RangeWork) -> None:
        """Let the threads do the work on `[0, length)`, and return when all of it is done.

        Ranges begin at multiples of `unit`. Fewer than two units for each range are done by the calling thread alone.
        """
        ranges = cut(length, unit, max(1, len(self._nodes)))
        futures: list[Future[None]] = []
        try:
            if length >= 2 * unit * len(ranges):
                for pool, range_, size in zip(self._pools, ranges, self._counts, strict=False):
                    pieces = -(-(range_.stop - range_.start) // unit)
                    futures += [pool.submit(work, range_) for _ in range(min(size, pieces))]
            if not futures or not self._nodes:
                for range_ in ranges:
                    work(range_)
        finally:
            wait(futures)  # they write to the caller's buffers
        for future in futures:
            future.result()

    def close(self) -> None:
        """End the threads."""
        for pool in self._pools:
            pool.shutdown()


def _pool(size: int, name: str, cores: frozenset[int] | None) -> ThreadPoolExecutor:
    def bind() -> None:
        if cores is not None:
            os.sched_setaffinity(0, cores)  # of this thread alone

    return ThreadPoolExecutor(size, thread_name_prefix=name, initializer=bind)


def cut(length: int, unit: int, parts: int) -> list[Range]:
    """Cut `[0, length)` into ranges of nearly equal size that begin at multiples of `unit`."""
    bounds = [length * k // parts // unit * unit for k in range(parts)] + [length]
    return [Range(start, stop) for start, stop in itertools.pairwise(bounds)]


def memory_nodes(folder: Path = NODES) -> list[frozenset[int]]:
    """Return the usable cores of each node that has some, in the order of the nodes; none if the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    usable = os.sched_getaffinity(0)
    lists = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:]))
    try:
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
