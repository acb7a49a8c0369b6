"""One kit of faults for tests that break an engine on purpose. A fault has a place, which bears the engine's own name.

Places: a `Stream`, where an operation begins; the words of a device's event or wait; `("posts", kind)` and `("has", kind)` of a
flag; "a norm" and "an update" of the optimizer; "an allocation" of a device in its thread; and what a test itself calls.
"""

import threading
import time

import pytest
import torch

from torchround.engine import engine as controller
from torchround.engine.board import Board, Observer, Watchdog
from torchround.engine.device import PASSED, CpuDevice
from torchround.engine.tasks import DECISION, GRADIENT, PART, WEIGHTS, Access, Task

# Accesses by kind, once they have ended.
UPLOADED, WRITTEN = f"{WEIGHTS}, read", f"{WEIGHTS}, written"
LANDED, CONSUMED = f"{GRADIENT}, written", f"{GRADIENT}, read"
PART_LANDED, DECIDED = f"{PART}, written", f"{DECISION}, written"


class PlantedError(RuntimeError):
    """A fault of a device, or an error in a layer."""


class PlantedExit(BaseException):
    """An exception that `except Exception` does not catch."""


class Bomb(Observer):
    """An exception that is raised at the `hit`-th chance at a place; without one, a delay at every chance.

    Of several devices, a delay slows the second one alone. If the exception `stays`, it is raised again at each later
    chance there, and by everything that the same device does.
    """

    def __init__(self, place, exception=PlantedError, hit=1, stays=False):
        self.place, self.exception, self.hit, self.stays = place, exception, hit, stays
        self.chances, self.raised, self.device = 0, None, None
        self._lock = threading.Lock()

    def __deepcopy__(self, memo):
        return self  # all copies of a layer share it

    def __call__(self, place, device=None):
        if place == self.place:
            with self._lock:
                self.chances += 1
                is_due = self.chances == self.hit
            if self.exception is None:
                time.sleep(0.005 * (device in (None, "cpu:1")))
            elif is_due:
                self.device, self.raised = device, self.exception("planted")
                raise self.raised
        if self.stays and self.raised and (device == self.device if device else place == self.place):
            raise self.raised

    def begins(self, device, stream, reads, writes, copied_bytes):
        self(stream, device.name)

    def recorded(self, device, stream, event, what):
        self(what, device.name)
        return event

    def posted(self, token):
        if threading.current_thread() is not threading.main_thread():
            self(("posts", kind_of(token)))

    def waited(self, token):
        if threading.current_thread() is not threading.main_thread():
            self(("has", kind_of(token)))

    def touched(self, reads, writes):
        if this_thread() == "torchround optimizer":
            self("an update" if len(writes) > 1 else "one buffer" if writes else "a norm")


class ArmedDevice(CpuDevice):
    """A virtual device that gives a bomb its chances, in allocations too once it has its fixed buffers."""

    def __init__(self, index, bomb):
        super().__init__(index)
        self.watchers.append(bomb)
        self._bomb, self._entered = bomb, False

    def enter_thread(self):
        super().enter_thread()
        self._entered = True

    def allocate(self, nbytes):
        if self._entered:
            self._bomb("an allocation", self.name)
        return super().allocate(nbytes)


def armed(bomb):
    return {"observer": bomb, "wrap": lambda device: ArmedDevice(int(device.name[4:]), bomb)}


def before(patch, owner, name, bomb, when=lambda *_, **options: True):
    function = getattr(owner, name)

    def fused(*arguments, **options):
        if when(*arguments, **options):
            bomb(name)
        return function(*arguments, **options)

    patch.setattr(owner, name, fused)


class Unordered(Observer):
    """A place that orders nothing: there is "no wait", or an "empty event", or the "stale event" of the time before.

    It comes last of a device's watchers. `times` counts how often it came to effect.
    """

    def __init__(self, place, kind):
        self.place, self.kind = place, kind
        self.times, self._before = 0, {}

    def recorded(self, device, stream, event, what):
        if self.kind == "no wait" or what != self.place:
            return event
        self.times += 1
        stale, self._before[device.name] = self._before.get(device.name, PASSED), event
        return stale if self.kind == "stale event" else PASSED

    def waits(self, device, stream, event, what):
        if self.kind != "no wait" or what != self.place:
            return event
        self.times += 1
        return PASSED


# Hangs: a blocked thread stays so until the test is over, and no watchdog looks before it blocks.
@pytest.fixture
def planted(monkeypatch):
    """Make an event that a test sets once the fault has happened and a thread waits. The watchdog looks from then on."""
    event, look = threading.Event(), Watchdog._look
    monkeypatch.setattr(Watchdog, "_look", lambda watchdog: event.is_set() and look(watchdog))
    return event


@pytest.fixture
def over():
    event = threading.Event()
    yield event
    event.set()
    for thread in threading.enumerate():
        if thread.name.startswith("torchround"):
            thread.join(20)


@pytest.fixture
def brief_joins(monkeypatch):
    monkeypatch.setattr(controller, "JOIN_S", 0.1)


def lose(patch, planted, chosen):
    """Lose the first flag that is `chosen`: it does not happen. Sets `planted` once a thread waits for it."""
    happen, wait_for, lost, waited = Board.happen, Board.wait_for, [], []

    def losing(board, flag):
        if lost or not chosen(flag):
            happen(board, flag)
            return
        lost.append(flag)
        if flag in waited:
            planted.set()

    def waiting(board, flag, *arguments):
        waited.append(flag)
        if flag in lost:
            planted.set()
        wait_for(board, flag, *arguments)

    patch.setattr(Board, "happen", losing)
    patch.setattr(Board, "wait_for", waiting)


def kind_of(token):
    if isinstance(token, Access):
        return f"{token.buffer.kind}, {'written' if token.writes else 'read'}"
    if isinstance(token, Task):
        return token.name
    return token[0] if isinstance(token, tuple) else getattr(token, "kind", None)


def this_thread():
    return threading.current_thread().name


def engine_threads():
    return [t.name for t in threading.enumerate() if t.name.startswith(("torchround", "finish"))]


def wait_until(condition):
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.001)


def copied(store):
    return {name: view.clone() for name, view in store.named_views().items()}


ERRORS = (
    *(PlantedError, PlantedExit, KeyboardInterrupt, torch.OutOfMemoryError, SystemExit, MemoryError, StopIteration),
    AssertionError,
)
