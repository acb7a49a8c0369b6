"""The board: where threads of an engine hand values to each other, each under a typed key.

A kind of hand-over is one constant beside the type that it carries, for example `LOSS =
HandOver[HostTensors](...)` in `worker/activation_transfers.py`; `LOSS(pass_index, micro_batch)` is the key of
one loss. Posting and waiting name the same constant, so an editor finds one end from the other, and mypy
rejects a value of another type. `ordering.py` lists all kinds.

The locks inside are held for a few instructions only; threads sleep on events of their own.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import Tensor

from torchround.engine.device import Event
from torchround.engine.errors import Stopped

T = TypeVar("T")

LOCK_POLL_S = 0.1  # between looks whether the engine stopped, while a thread waits for the layer gate


class HandOver(Generic[T]):
    """A kind of hand-over, whose values have type `T`.

    `words` describes one of them in reports: `{0}` is its number, `{1}` and `{2}` are the rest of its key.
    """

    def __init__(self, words: str) -> None:
        self.words = words

    def __call__(self, number: int, *key: int) -> "HandOverKey[T]":
        return HandOverKey(self, number, key)


@dataclass(frozen=True)
class HandOverKey(Generic[T]):
    """The name of one hand-over. `number` is the weight version, step, pass or stage slot that it
    belongs to. It only grows, and old hand-overs are forgotten by it."""

    kind: HandOver[T]
    number: int
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        """Describe the hand-over for a report."""
        return self.kind.words.format(self.number, *self.key)


class Flag:
    """Something that happens once. Threads wait for it by `Board.wait_for`."""

    __slots__ = ("happened", "wakers")

    def __init__(self) -> None:
        self.happened = False
        self.wakers: list[threading.Event] = []


class WaitForHandOver(Protocol):
    """A function that waits for a hand-over and returns its value."""

    def __call__(self, key: HandOverKey[T]) -> T: ...


class Observer:
    """A witness of hand-overs and of host accesses to shared memory, in an order consistent with causality.

    This one ignores what it sees; the race checker's log is a subclass.
    """

    def posted(self, token: object) -> None:
        """Note that the calling thread posts `token`."""

    def waited(self, token: object) -> None:
        """Note that the calling thread has seen `token` posted."""

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        """Note that the calling thread reads and writes these buffers."""


class Board:
    """Posted values by key. Posting wakes only the threads that wait for that key.

    Each key is posted once; posting one without a value again changes nothing.
    """

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Observer()
        self.posts = 0
        self._lock = threading.Lock()
        # By kind, so that forgetting old values of one kind does not look through all the others.
        self._values: dict[HandOver[Any], dict[HandOverKey[Any], object]] = defaultdict(dict)
        self._wakers: dict[HandOverKey[Any], list[threading.Event]] = defaultdict(list)
        self._sleeping: set[threading.Event] = set()  # of threads that wait for a flag
        self._waiting: dict[str, str] = {}
        self._stopped = False

    def __len__(self) -> int:
        """Count the hand-overs that are posted and not forgotten."""
        with self._lock:
            return sum(len(values) for values in self._values.values())

    def post(self, key: HandOverKey[T], value: T) -> None:
        """Hand over `value`, and wake the threads that wait for it."""
        # The observer first: a waiter must not be seen to wait before the post that ends its wait.
        self.observer.posted(key)
        with self._lock:
            self._values[key.kind][key] = value
            self.posts += 1
            wakers = self._wakers.pop(key, ())
        for waker in wakers:
            waker.set()

    def signal(self, key: HandOverKey[None]) -> None:
        """Post a hand-over that carries no value."""
        self.post(key, None)

    def wait(self, key: HandOverKey[T], look: Callable[[], None] | None = None, every_s: float = 0.0) -> T:
        """Wait until the hand-over is posted, and return its value. Raises `Stopped` if the engine stopped before.

        Calls `look` each `every_s` seconds of waiting.
        """
        waker = self._waker_unless_posted(key)
        if waker is not None:
            with self.waits(f"waits for {key}"):
                while not waker.wait(every_s if look else None):
                    assert look is not None, "a wait without limit ended without its hand-over"
                    look()
        with self._lock:
            if key not in self._values[key.kind]:
                raise Stopped  # `stop` woke this thread, not `post`
            value = cast(T, self._values[key.kind][key])
        self.observer.waited(key)
        return value

    def happen(self, flag: Flag) -> None:
        """Note that something has happened, and wake the threads that wait for it."""
        self.observer.posted(flag)
        with self._lock:
            flag.happened = True
            self.posts += 1
            wakers, flag.wakers = flag.wakers, []
        for waker in wakers:
            waker.set()

    def wait_for(
        self, flag: Flag, words: object, look: Callable[[], None] | None = None, every_s: float = 0.0
    ) -> None:
        """Wait until `flag` has happened. Raises `Stopped` if the engine stopped before. Reports say `words`.

        Calls `look` each `every_s` seconds of waiting.
        """
        waker = None if flag.happened else self._waker_of(flag)
        if waker is not None:
            try:
                with self.waits(f"waits for {words}"):
                    while not waker.wait(every_s if look else None):
                        assert look is not None, "a wait without limit ended without its flag"
                        look()
            finally:
                self._sleeping.discard(waker)
            if not flag.happened:
                raise Stopped  # `stop` woke this thread
        self.observer.waited(flag)

    def _waker_of(self, flag: Flag) -> threading.Event | None:
        # Looking and registering under one lock: a flag that happens between the two would wake no thread.
        with self._lock:
            if flag.happened:
                return None
            if self._stopped:
                raise Stopped
            waker = threading.Event()
            flag.wakers.append(waker)
            self._sleeping.add(waker)
            return waker

    def ready(self, key: HandOverKey[T]) -> bool:
        """Tell whether `wait` would return at once."""
        with self._lock:
            return key in self._values[key.kind]

    def synchronize(self, event: Event, words: object) -> None:
        """Wait until the device has done what `words` name, which was announced as enqueued."""
        # Most have passed: no text for a report then. The race checker wants to see the call all the same.
        with nullcontext() if event.query() else self.waits(f"waits for a device to finish {words}"):
            event.synchronize()

    def waiting(self) -> dict[str, str]:
        """Describe, by thread name, what each waiting thread waits for."""
        return dict(self._waiting)  # a copy: threads begin and end their waits meanwhile

    def retire(self, kind: HandOver[T], below: int) -> None:
        """Forget hand-overs of a kind with a number under `below`. No thread may wait for one of them again."""
        with self._lock:
            values = self._values[kind]
            for key in [key for key in values if key.number < below]:
                del values[key]

    def forget(self, key: HandOverKey[T]) -> None:
        """Forget one hand-over. No thread may wait for it again."""
        with self._lock:
            self._values[key.kind].pop(key, None)

    def stop(self) -> None:
        """Wake every waiting thread. From now on, a wait for something that is not posted raises `Stopped`."""
        with self._lock:
            self._stopped = True
            wakers = [waker for group in self._wakers.values() for waker in group] + list(self._sleeping)
            self._wakers.clear()
        for waker in wakers:
            waker.set()

    def note_progress(self) -> None:
        """Let the watchdog see movement although nothing is posted."""
        with self._lock:
            self.posts += 1

    def raise_if_stopped(self) -> None:
        """Raise `Stopped` if the engine stopped."""
        if self._stopped:
            raise Stopped

    def _waker_unless_posted(self, key: HandOverKey[T]) -> threading.Event | None:
        # Looking and registering under one lock: a post between the two would wake no thread.
        with self._lock:
            if key in self._values[key.kind]:
                return None
            if self._stopped:
                raise Stopped
            waker = threading.Event()
            self._wakers[key].append(waker)
            return waker

    @contextmanager
    def waits(self, what: str) -> Iterator[None]:
        """Let reports say `what` the calling thread waits for, during the block."""
        thread = threading.current_thread().name
        self._waiting[thread] = what
        try:
            yield
        finally:
            self._waiting.pop(thread, None)


class LayerGate:
    """Lets threads run layers at the same time, and a thread that compiles a layer only alone.

    The compiler sets flags of the whole process while it traces. Calls of compiled layers then fail in other threads, and
    PyTorch's own functions choose operations that suit a compiler. A thread inside must not wait for another thread.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside: set[int] = set()  # threads that run layers
        self._compiles = False

    @contextmanager
    def entered(self, board: Board) -> Iterator[None]:
        """Run layers in the block, forward or backward. Raises `Stopped` if the engine stops before."""
        thread = threading.get_ident()
        with self._changed:
            self._wait(board, "waits for a layer to be compiled", lambda: not self._compiles)
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
            self._wait(board, "waits for a layer to be compiled", lambda: not self._compiles)
            self._compiles = True  # no thread enters from now on
        try:
            with self._changed:
                self._wait(board, "waits until no thread runs a layer", lambda: not self._inside)
            yield
        finally:
            with self._changed:
                self._compiles = False
                if was_inside:
                    self._inside.add(thread)
                self._changed.notify_all()

    def _wait(self, board: Board, what: str, condition: Callable[[], bool]) -> None:
        with nullcontext() if condition() else board.waits(what):
            while not condition():
                board.raise_if_stopped()
                self._changed.wait(LOCK_POLL_S)


# One for all engines of the process, as the compiler's flags are.
LAYER_GATE = LayerGate()
