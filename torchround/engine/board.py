"""What may watch a run: the race checker's log does, production runs have none."""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from torchround.engine.device import Event
from torchround.engine.errors import Stopped


class Observer(Protocol):
    """Sees host hand-overs and host accesses to shared memory, in an order consistent with causality."""

    def posted(self, token: object) -> None: ...

    def waited(self, token: object) -> None: ...

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None: ...


class Unobserved:
    """The observer of production runs: sees nothing."""

    def posted(self, token: object) -> None:
        pass

    def waited(self, token: object) -> None:
        pass

    def touched(self, reads: Iterable[Tensor], writes: Iterable[Tensor]) -> None:
        pass


class Fact(NamedTuple):
    """Something that became true. `epoch` is the weight version or the pass it belongs to."""

    kind: str
    epoch: int
    key: tuple[int, ...] = ()

    def __str__(self) -> str:
        """In words, for reports."""
        return WORDS[self.kind].format(self.epoch, *self.key)


# Of each kind of fact; {0} is its epoch, {1} and {2} are its key.
WORDS = {
    "sizes": "the first pass",
    "task": "stage slot {0} to be handed out",
    "done": "stage slot {0} to be enqueued",
    "boundary": "the input of layer {1} for micro-batch {2} of pass {0}",
    "boundary gradient": "the gradient of layer {1}'s input for micro-batch {2} of pass {0}",
    "loss": "the loss of micro-batch {1} of pass {0}",
    "job": "job {0} of the optimizer",
    "updated": "the update of step {0}",
    "weights": "version {0} of bundle {1} (ordering rule 2 or 5)",
    "uploaded": "upload {2} of version {0} of bundle {1} (ordering rule 1)",
    "gradient landed": "part {2} of step {0}'s gradient of bundle {1} (ordering rule 3)",
    "gradient consumed": "the optimizer to be done with step {0}'s gradient of bundle {1} (ordering rule 4)",
    "part consumed": "the optimizer to have added part {2} of step {0}'s gradient of bundle {1} (ordering rule 4)",
    "save": "save {0}",
    "settled": "version {0} of every bundle, to save it",
    "read by save": "save {2} to have read version {0} of bundle {1} (ordering rule 6)",
    "save may be published": "save {0} to be allowed to appear",
    "save ended": "the end of save {0}",
    "saver ended": "the end of the saver",
}

SAVER_ENDED = Fact("saver ended", 0)


class Board:
    """Facts by name, each posted once with a value. Waiting threads are woken one by one, not in a herd."""

    def __init__(self, observer: Observer | None = None) -> None:
        self.observer = observer or Unobserved()
        self._lock = threading.Lock()
        self._values: dict[Fact, Any] = {}
        self._wakers: dict[Fact, list[threading.Event]] = defaultdict(list)
        self._waiting: dict[str, str] = {}
        self.posts = 0
        self._stopped = False

    def post(self, fact: Fact, value: Any = None) -> None:
        self.observer.posted(fact)
        with self._lock:
            self._values[fact] = value
            self.posts += 1
            wakers = self._wakers.pop(fact, ())
        for waker in wakers:
            waker.set()

    def wait(self, fact: Fact, look: Callable[[], None] | None = None, every_s: float = 0.0) -> Any:
        """The fact's value, once it is posted. Raises `Stopped` when the engine stopped.

        `look` is called every `every_s` while this call waits.
        """
        waker = self._waker_unless_posted(fact)
        if waker is not None:
            with self._waits(f"waits for {fact}"):
                while not waker.wait(every_s if look else None):
                    assert look is not None, "a wait without limit ended without its fact"
                    look()
        with self._lock:
            if fact not in self._values:
                raise Stopped
            value = self._values[fact]
        self.observer.waited(fact)
        return value

    def outlast(self, fact: Fact, poll_s: float = 0.005) -> None:
        """Wait for a fact that somebody posts in answer to a stop, if not before."""
        while not self.ready(fact):
            time.sleep(poll_s)
        self.observer.waited(fact)

    def ready(self, fact: Fact) -> bool:
        """Whether `wait` would return at once."""
        with self._lock:
            return fact in self._values

    def synchronize(self, event: Event, fact: Fact) -> None:
        """Wait until the device has done what `fact` says was enqueued."""
        with self._waits(f"waits for a device to finish {fact}"):
            event.synchronize()

    def waiting(self) -> dict[str, str]:
        """What each waiting thread waits for, by its name."""
        return dict(self._waiting)

    def retire(self, kinds: Iterable[str], below: int) -> None:
        """Forget facts of these kinds with an epoch below `below`, which nobody will wait for again."""
        forgotten = frozenset(kinds)
        with self._lock:
            for fact in [fact for fact in self._values if fact.kind in forgotten and fact.epoch < below]:
                del self._values[fact]

    def forget(self, fact: Fact) -> None:
        """Nobody will wait for this fact again."""
        with self._lock:
            self._values.pop(fact, None)

    def stop(self) -> None:
        """Wake every waiting thread; each wait for a fact that is not there raises `Stopped` from now on."""
        with self._lock:
            self._stopped = True
            wakers = [waker for group in self._wakers.values() for waker in group]
            self._wakers.clear()
        for waker in wakers:
            waker.set()

    def note_progress(self) -> None:
        """Something moves although nothing is posted: not a hang."""
        with self._lock:
            self.posts += 1

    def raise_if_stopped(self) -> None:
        if self._stopped:
            raise Stopped

    def _waker_unless_posted(self, fact: Fact) -> threading.Event | None:
        with self._lock:
            if fact in self._values:
                return None
            if self._stopped:
                raise Stopped
            waker = threading.Event()
            self._wakers[fact].append(waker)
            return waker

    @contextmanager
    def _waits(self, what: str) -> Iterator[None]:
        thread = threading.current_thread().name
        self._waiting[thread] = what
        try:
            yield
        finally:
            self._waiting.pop(thread, None)
