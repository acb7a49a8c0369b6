"""Virtual devices with a link to the host whose copies take time beside computation, as they do on an accelerator.

The engine drives them as it drives accelerators. Each stream of a device is a clock: an operation begins when its stream has
done the one before it and all events that it waits for have passed. A copy takes its bytes over the link's rate, a
computation takes the seconds that its layers owe. The data itself moves at once.

Host threads have clocks too, which hand-overs pass on. Everything that the host does takes no time, so load of the machine
does not change what is measured. `pace` lets threads sleep as well, so that they come to the shared pool of host buffers in
about the order of the modelled times; a thread that runs far ahead takes buffers that earlier computations need.
"""

import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from torch import Tensor

from torchround.engine.board import Flag, Observer
from torchround.engine.device import UPLOADS, CpuDevice, Event, Mark, Stream

T = TypeVar("T")


class ModelledTime(Observer):
    """The clocks of host threads, and the seconds that the computation under way on each thread owes.

    As the engine's observer it passes times from thread to thread. With `pace` a second of the model takes so many seconds of
    the machine.
    """

    def __init__(self, pace: float = 0.0) -> None:
        self._thread = threading.local()
        self._posted: dict[object, float] = {}
        self._pace = pace
        self._start_s = time.perf_counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelledTime":
        return self  # the engine copies the layers, which hold this clock

    def now(self) -> float:
        """Return the time of the calling host thread."""
        return getattr(self._thread, "now", 0.0)

    def advance(self, seconds: float) -> None:
        """Let the calling host thread wait until this time."""
        self._thread.now = max(self.now(), seconds)

    def drive_device(self) -> None:
        """Note that the calling thread drives a device."""
        self._thread.drives_device = True

    def drives_device(self) -> bool:
        """Tell whether the calling thread drives a device."""
        return getattr(self._thread, "drives_device", False)

    def computed(self, seconds: float) -> None:
        """Note that a computation of the calling thread's device ends then."""
        time.sleep(max(self._start_s + self._pace * seconds - time.perf_counter(), 0.0))

    def sleep(self, seconds: float) -> None:
        """Let the computation under way on this thread take so much longer."""
        self._thread.owed = getattr(self._thread, "owed", 0.0) + seconds

    def taken(self) -> float:
        """Return what was owed since the last call."""
        owed: float = getattr(self._thread, "owed", 0.0)
        self._thread.owed = 0.0
        return owed

    def posted(self, token: object) -> None:
        if isinstance(token, Flag):
            self._posted.setdefault(token, self.now())

    def waited(self, token: object) -> None:
        if isinstance(token, Flag):  # others are buffers: their events say when they are free
            self.advance(self._posted.get(token, 0.0))


class ModelledEvent:
    """A point in a modelled stream: it passes at a time that is known when it is recorded."""

    def __init__(self, clock: ModelledTime, seconds: float) -> None:
        self._clock = clock
        self.seconds = seconds

    def synchronize(self) -> None:
        """Wait until then."""
        self._clock.advance(self.seconds)

    def query(self) -> bool:
        """Return True: at once in a device's thread, which does not wait for what it asks; later in any other.

        The caller of a step asks again and again instead of waiting, and nothing else would bring its clock there.
        """
        if not self._clock.drives_device():
            self.synchronize()
        return True


class ModelledMark(Mark):
    """A mark with the time of a modelled stream."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._host_s = seconds


class LinkedDevice(CpuDevice):
    """A virtual device whose streams are clocks. Each direction of its link moves `bytes_per_s`."""

    has_link = True

    def __init__(self, index: int, clock: ModelledTime, bytes_per_s: float) -> None:
        super().__init__(index)
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._ready = dict.fromkeys(Stream, 0.0)
        self.link_s = {True: 0.0, False: 0.0}  # time of copies: up, down

    def mark(self, stream: Stream) -> Mark:
        return ModelledMark(self._begin(stream))

    def enter_thread(self) -> None:
        super().enter_thread()
        self._clock.drive_device()

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
        self._clock.computed(self._ready[stream])
        return result

    def _record(self, stream: Stream) -> Event:
        return ModelledEvent(self._clock, self._begin(stream))

    def _wait(self, stream: Stream, event: Event) -> None:
        if isinstance(event, ModelledEvent):
            self._ready[stream] = max(self._ready[stream], event.seconds)
        else:
            event.synchronize()
