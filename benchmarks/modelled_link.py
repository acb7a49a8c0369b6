"""Virtual devices with a link to the host whose copies take time beside computation, as they do on an accelerator.

The engine drives them as it drives accelerators: its threads only enqueue, and each stream of a device is a clock. An
operation begins when its stream has done the one before it and all events that it waits for have passed; a copy takes its
bytes over the link's rate, a computation takes the seconds that its layers owe. The data itself moves at once, because
enqueuing follows the same order.

`RealTime` anchors the clocks to the machine's: a host thread that waits for an event sleeps until then, and a thread that
enqueues late delays its device. `ModelledTime` has no clock of the machine at all: host threads have clocks of their own, which
hand-overs pass on, and everything that the host does takes no time. Load of the machine cannot change its times.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from torchround.engine.board import Observer
from torchround.engine.device import UPLOADS, CpuDevice, Event, Mark, Stream

T = TypeVar("T")


class RealTime(Observer):
    """The machine's clock, and the seconds that the layers of each thread's computation owe."""

    def __init__(self) -> None:
        self._thread = threading.local()

    def __deepcopy__(self, memo: dict[int, Any]) -> "RealTime":
        return self  # the engine copies the layers, which hold this clock

    def now(self) -> float:
        """Return the time of the calling host thread."""
        return time.perf_counter()

    def advance(self, seconds: float) -> None:
        """Let the calling host thread wait until this time."""
        time.sleep(max(seconds - time.perf_counter(), 0.0))

    def sleep(self, seconds: float) -> None:
        """Let the computation under way on this thread take so much longer."""
        self._thread.owed = getattr(self._thread, "owed", 0.0) + seconds

    def taken(self) -> float:
        """Return what was owed since the last call."""
        owed: float = getattr(self._thread, "owed", 0.0)
        self._thread.owed = 0.0
        return owed


class ModelledTime(RealTime):
    """A time that passes on devices alone. As the engine's observer it passes from thread to thread with each hand-over."""

    def __init__(self) -> None:
        super().__init__()
        self._posted: dict[object, float] = {}

    def now(self) -> float:
        return getattr(self._thread, "now", 0.0)

    def advance(self, seconds: float) -> None:
        self._thread.now = max(self.now(), seconds)

    def posted(self, token: object) -> None:
        self._posted.setdefault(token, self.now())

    def waited(self, token: object) -> None:
        self.advance(self._posted.get(token, 0.0))


class ModelledEvent:
    """A point in a modelled stream: it passes at a time that is known when it is recorded."""

    def __init__(self, clock: RealTime, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds

    def synchronize(self) -> None:
        """Wait until then."""
        self._clock.advance(self.seconds)

    def query(self) -> bool:
        """Return whether the time has come."""
        return self._clock.now() >= self.seconds


class ModelledMark(Mark):
    """A mark with the time of a modelled stream."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._host_s = seconds


class LinkedDevice(CpuDevice):
    """A virtual device whose streams are clocks. Each direction of its link moves `bytes_per_s`."""

    has_link = True

    def __init__(self, index: int, clock: RealTime, bytes_per_s: float) -> None:
        super().__init__(index)
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._ready = dict.fromkeys(Stream, 0.0)
        self.link_s = {True: 0.0, False: 0.0}  # time of copies: up, down

    def mark(self, stream: Stream) -> Mark:
        return ModelledMark(self._begin(stream))

    def finish(self) -> None:
        self._clock.advance(max(self._ready.values()))

    def _begin(self, stream: Stream) -> float:
        # The stream may be idle since long, but nothing begins before the host enqueues it.
        return max(self._ready[stream], self._clock.now())

    def _copy(self, stream: Stream, destination: Tensor, source: Tensor) -> None:
        super()._copy(stream, destination, source)
        seconds = source.nbytes / self._bytes_per_s
        self.link_s[stream in UPLOADS] += seconds
        self._ready[stream] = self._begin(stream) + seconds

    def _run(self, stream: Stream, work: Callable[[], T]) -> T:
        self._clock.taken()
        result = work()
        self._ready[stream] = self._begin(stream) + self._clock.taken()
        return result

    def _record(self, stream: Stream) -> Event:
        return ModelledEvent(self._clock, self._begin(stream))

    def _wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, ModelledEvent):
            self._ready[stream] = max(self._ready[stream], event.seconds)
        else:
            event.synchronize()


def linked_devices(count: int, clock: RealTime, bytes_per_s: float) -> Sequence[LinkedDevice]:
    """Make devices with a link each."""
    return [LinkedDevice(index, clock, bytes_per_s) for index in range(count)]
