"""The board: where threads of an engine wait for each other, the values and jobs that they pass on, and the first fault.

A `Flag` is something that happens once: a value that is made, a use of memory that ends (`tasks.py`).

A hang is noticed and reported here, by `Watchdog`: the caller's thread looks around while it waits. If nothing has moved
for `engine.hang_timeout_s`, `_look` gives `Board.fail` a `HangError` (`errors.py`) with the lines of `_report`: what each thread
waits for, as it told `Board.waits`. All waits end, and the call in progress raises it (`Engine._raise_failure`).

    what hangs                                   noticed by
    device, optimizer, saver, reader of files    `Watchdog`
    a machine that lives and sends nothing       `Watchdog`: the thread of that peer waits
    a machine that is gone                       `Liveness` (`machines/`) after `machines.timeout_s`; its error comes to `Board.fail`
    a compiler                                   nothing: while one works, the watchdog does not count (docs/faults.md)

A save or a reader that hangs is noticed once everything else waits for it: as long as steps go by, something moves.
"""

import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from torch import Tensor

from torchround.engine.device import Device, Event, Stream
from torchround.engine.errors import FaultLocation, HangError, PipelineError, Stopped

if TYPE_CHECKING:
    from torchround.engine.worker.device_worker import DeviceWorker

T = TypeVar("T")

LOCK_POLL_S = 0.1  # between looks whether the engine stopped, while a thread waits for the layer gate

# Looks in a row that find no movement before it is a hang. Looks are counted and time is not, because a
# process that was stopped for an hour and then continued has missed one look only.
LOOKS = 8
CALLS_SHOWN = 3
LONGEST_NAP_S = 0.001  # between two questions whether a device has passed an event


@dataclass(eq=False, repr=False, slots=True)
class Flag:
    happened: bool = field(default=False, init=False)
    wakers: list[threading.Event] = field(default_factory=list, init=False)


class Value(Flag, Generic[T]):
    """A value that is made once. `Board.post` sets its `content`, `Board.wait` returns it.

    `kind` describes the value in reports. `numbers` say which one of its kind it is, and replace `{0}` and so on there.
    """

    __slots__ = ("content", "kind", "numbers")
    content: T

    def __init__(self, kind: str, *numbers: int) -> None:
        super().__init__()
        self.kind = kind
        self.numbers = numbers

    def __str__(self) -> str:
        return self.kind.format(*self.numbers)


class Values(dict[tuple[int, ...] | int, Value[T]]):
    """Values of one kind, by the numbers that follow `first`. Each is created when a thread first asks for it."""

    def __init__(self, kind: str, *first: int) -> None:
        super().__init__()
        self._kind = kind
        self._first = first

    def __missing__(self, key: tuple[int, ...] | int) -> Value[T]:
        numbers = key if isinstance(key, tuple) else (key,)
        # `setdefault` is atomic, so all threads get the same value.
        return self.setdefault(key, Value(self._kind, *self._first, *numbers))


class Observer:
    """A witness of what threads post and see posted, of host accesses to memory, and of what devices enqueue.

    The order is consistent with causality. A token is a `Flag` or a buffer of the pool. A device's thread calls the last
    four methods, if the observer is one of `Device.watchers`, from before a thread drives the device to `Device.release`.
    """

    def posted(self, token: object) -> None: ...

    def waited(self, token: object) -> None: ...

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None: ...

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        """See an operation before the device enqueues it. `copied_bytes` is 0 for a computation."""

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        """See that the device has enqueued the operation. Not called for an operation that raised."""

    def recorded(self, device: Device, stream: Stream, event: Event, what: str) -> Event:
        """See a recorded event. Returns the event to use in its place."""
        return event

    def waits(self, device: Device, stream: Stream, event: Event, what: str) -> Event:
        """See that a stream will wait for `event`. Returns the event that the device knows: undoes `recorded`."""
        return event


class Board:
    """The waits of an engine's threads, and the stop that ends them. A flag wakes only the threads that wait for it.

    `on_fault` is called with the first fault, `failure`. `moves` grows with all that happens.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.failure: PipelineError | None = None
        self.on_fault: Callable[[PipelineError], None] = lambda failure: None
        self.moves = 0
        self._lock = threading.Lock()
        self._sleeping: set[threading.Event] = set()
        self._waiting: dict[str, str] = {}
        self._stopped = False

    def post(self, value: Value[T], content: T) -> None:
        value.content = content
        self.happen(value)

    def wait(self, value: Value[T], words: object = None) -> T:
        self.wait_for(value, words or value)
        return value.content

    def happen(self, flag: Flag) -> None:
        # The observer first: a waiter must not be seen to wait before the post that ends its wait.
        self.observer.posted(flag)
        with self._lock:
            flag.happened = True
            self.moves += 1
            wakers, flag.wakers = flag.wakers, []
        for waker in wakers:
            waker.set()

    def wait_for(
        self, flag: Flag, words: object, look: Callable[[], None] = lambda: None, every_s: float | None = None
    ) -> None:
        """Wait until `flag` has happened; call `look` every `every_s` seconds. Reports say `words`. Raises `Stopped`."""
        if not flag.happened:
            waker = threading.Event()
            # Looking and registering under one lock: a flag that happens between the two would wake no thread.
            with self._lock:
                if flag.happened:
                    waker.set()
                else:
                    self.raise_if_stopped()
                    flag.wakers.append(waker)
                    self._sleeping.add(waker)
            try:
                with self.waits(f"waits for {words}"):
                    while not waker.wait(every_s):
                        look()
            finally:
                self._sleeping.discard(waker)
            if not flag.happened:
                raise Stopped  # `stop` woke this thread
        self.observer.waited(flag)

    def synchronize(self, event: Event, words: object) -> None:
        """Wait until the device has done what `words` name, which was announced as enqueued."""
        # Most have passed: no text for a report then. The race checker wants to see the call all the same.
        with nullcontext() if event.query() else self.waits(f"waits for a device to finish {words}"):
            event.synchronize()

    def waiting(self) -> dict[str, str]:
        return dict(self._waiting)

    def fail(self, failure: PipelineError) -> None:
        """Keep the first fault and stop. Any thread may call this."""
        with self._lock:
            is_first = self.failure is None
            self.failure = self.failure or failure
        self.stop()
        if is_first:
            self.on_fault(failure)

    def stop(self) -> None:
        """Wake every waiting thread. From now on, a wait for something that has not happened raises `Stopped`."""
        with self._lock:
            self._stopped = True
            wakers = list(self._sleeping)
        for waker in wakers:
            waker.set()

    def note_progress(self) -> None:
        """Let the watchdog see movement although nothing is posted. Raises `Stopped`."""
        self.raise_if_stopped()
        with self._lock:
            self.moves += 1

    def raise_if_stopped(self) -> None:
        if self._stopped:
            raise Stopped

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Let reports say `what` the calling thread waits for, during the block."""
        thread = threading.current_thread().name
        self._waiting[thread] = what
        try:
            yield
        finally:
            self._waiting.pop(thread, None)


class Queue(Generic[T]):
    """The jobs that one thread puts for another one, in their order. `kind` is that of the posts, for observers."""

    def __init__(self, board: Board, kind: str) -> None:
        self._board = board
        self._kind = kind
        self._jobs: deque[T] = deque()
        self._batches: deque[Value[Sequence[T]]] = deque([Value(kind)])  # the last one is still to be posted

    def put(self, *jobs: T) -> None:
        """Add jobs. The taker sees either none or all of them."""
        if jobs:
            batch = self._batches[-1]
            self._batches.append(Value(self._kind))
            self._board.post(batch, jobs)

    def peek(self) -> T | None:
        """Return the next job and leave it there. None if `take` would have to wait."""
        if not self._jobs and self._batches[0].happened:
            self._jobs.appendleft(self.take())
        return self._jobs[0] if self._jobs else None

    def take(self, words: object = None) -> T:
        if not self._jobs:
            jobs = self._board.wait(self._batches[0], words)
            self._jobs.extend(jobs)
            self._batches.popleft()
        return self._jobs.popleft()


class LayerGate:
    """Lets threads run layers at the same time, and a thread that compiles a layer only alone.

    The compiler sets flags of the whole process while it traces. Calls of compiled layers then fail in other threads, and
    PyTorch's own functions choose operations that suit a compiler. A thread inside must not wait for another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()  # threads that run layers
        self._is_closed = False
        self.compiles = False  # for the watchdog: a thread that compiles, alone by now, moves

    @contextmanager
    def entered(self, board: Board) -> Iterator[None]:
        """Run layers in the block, forward or backward. Raises `Stopped` if the engine stops before."""
        thread = threading.get_ident()
        with self._changed:
            if self._is_closed:
                self._wait(board, lambda: not self._is_closed)
            self._inside.add(thread)
        try:
            yield
        finally:
            with self._changed:
                self._inside.discard(thread)
                self._changed.notify_all()

    @contextmanager
    def closed(self, board: Board) -> Iterator[None]:
        """Compile in the block, which may be inside of `entered`. Raises `Stopped` if the engine stops before."""
        thread = threading.get_ident()
        with self._changed:
            was_inside = thread in self._inside
            # Otherwise two threads that want to compile would wait for each other.
            self._inside.discard(thread)
            self._changed.notify_all()
            self._wait(board, lambda: not self._is_closed)
            self._is_closed = True  # no thread enters from now on
        try:
            with self._changed:
                self._wait(board, lambda: not self._inside)
            self.compiles = True
            yield
        finally:
            self.compiles = False
            with self._changed:
                self._is_closed = False
                self._inside |= {thread} if was_inside else set()
                self._changed.notify_all()

    def _wait(self, board: Board, condition: Callable[[], bool]) -> None:
        with board.waits("waits for a layer to be compiled, or for threads that run layers"):
            while not condition():
                board.raise_if_stopped()
                self._changed.wait(LOCK_POLL_S)


# One for all engines of the process, as the compiler's flags are.
LAYER_GATE = LayerGate()


@dataclass
class Watchdog:
    """The waits of the caller's thread, which looks meanwhile whether anything moves. A hang is the engine's fault.

    Three things move: flags that happen, operations that are enqueued, and points of device queues that are passed
    (`Device.moves`). The last one matters on a GPU, which works on long after its thread has enqueued everything.
    `others` are the engine's threads besides those of `workers`.
    """

    board: Board
    workers: "Sequence[DeviceWorker]"
    others: Sequence[threading.Thread]
    timeout_s: float
    _last_moves: int = field(default=-1, init=False)
    _looks: int = field(default=0, init=False)

    def wait_for(self, flag: Flag, words: object = None) -> None:
        # No count of moves is negative, so the first look finds movement and begins to count afresh.
        self._last_moves = -1
        self.board.wait_for(flag, words or flag, self._look, self.timeout_s / LOOKS)

    def synchronize(self, event: Event, words: object) -> None:
        """Wait until a device has done what `words` name. Raises `Stopped` after a hang, or if the device has failed."""
        self._last_moves = -1
        # Asked again and again instead of `event.synchronize()`, which would not return after a hang.
        nap_s, next_look_s = 1e-5, time.monotonic() + self.timeout_s / LOOKS
        try:
            if not event.query():
                with self.board.waits(f"waits for a device to finish {words}"):
                    while not event.query():
                        self.board.raise_if_stopped()
                        time.sleep(nap_s)
                        nap_s = min(2 * nap_s, LONGEST_NAP_S)
                        if time.monotonic() >= next_look_s:
                            self._look()
                            next_look_s = time.monotonic() + self.timeout_s / LOOKS
            event.synchronize()
        except RuntimeError as error:
            self.board.fail(PipelineError.of(error, FaultLocation("controller")))
            raise Stopped from error

    def _look(self) -> None:
        moves = self.board.moves + sum(worker.device.moves() for worker in self.workers)
        is_still = moves == self._last_moves and not LAYER_GATE.compiles
        self._looks = self._looks + 1 if is_still else 0
        self._last_moves = moves
        if self._looks == LOOKS:
            self.board.fail(HangError(self.timeout_s, self._report()))

    def _report(self) -> list[str]:
        waiting = self.board.waiting()
        caller = threading.current_thread()
        lines = [f"{caller.name} (the call in progress): {waiting.get(caller.name, 'looks around')}"]
        for worker in self.workers:
            doing = _doing(worker.thread, waiting)
            lines.append(f"{worker.thread.name}: in {worker.device.location}: {doing}")
            lines += [f"  its {stream.value} queue {what}" for stream, what in worker.device.unfinished()]
        return lines + [f"{thread.name}: {_doing(thread, waiting)}" for thread in self.others]


def _doing(thread: threading.Thread, waiting: dict[str, str]) -> str:
    """Describe what a thread waits for, or the lines of code where it is."""
    if thread.name in waiting:
        return waiting[thread.name]
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "has ended"
    stack = traceback.extract_stack(frame, limit=CALLS_SHOWN)
    return "is in " + ", called by ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(stack))
