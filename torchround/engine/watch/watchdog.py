"""Notices that nothing moves any more, and says what every thread and every device queue waits for.

Whoever waits looks around now and then (`Watchdog`); no thread is spent on it. What counts as moving: facts that
are posted, operations that are enqueued and, since a GPU works on long after its thread has enqueued everything,
points of its queues that are passed (`QueueWatch`).
"""

import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from torch import Tensor

from torchround.engine.board import Board, Fact
from torchround.engine.device import Device, DeviceWatcher, Event, Stream
from torchround.engine.errors import FaultLocation, HangError

# Looks in a row that find nothing moved before it is a hang. Counted rather than timed: a process that was stopped
# for an hour and goes on has missed one look.
LOOKS = 8
CALLS_SHOWN = 3
LONGEST_NAP_S = 0.001  # between two questions whether a device has passed an event


class QueueWatch(DeviceWatcher):
    """What each queue of one device has not finished.

    `position` returns where in the pipeline the device's thread is; the watch keeps that with each operation and event.
    """

    def __init__(self, device: Device, position: Callable[[], object]) -> None:
        device.watchers.append(self)
        self._position = position
        self._moves = 0
        self._inside: dict[Stream, object] = {}
        self._events: dict[Stream, deque[tuple[Event, object]]] = {stream: deque() for stream in Stream}
        self._lock = threading.Lock()  # the device's thread and the one that looks both forget passed events

    def moves(self) -> int:
        """Grows as long as the device or its thread gets anywhere."""
        for events in self._events.values():
            self._forget_passed(events)
        return self._moves

    def unfinished(self) -> dict[Stream, tuple[str, Any]]:
        """Of each queue that is not empty: what it is at, and that operation's or event's position."""
        found: dict[Stream, tuple[str, Any]] = {}
        for stream, events in self._events.items():
            self._forget_passed(events)
            if events:
                found[stream] = f"has not passed {len(events)} event(s), the first one of", events[0][1]
        for stream, position in list(self._inside.items()):
            found[stream] = "is inside an operation of", position
        return found

    def begins(
        self,
        device: Device,
        stream: Stream,
        reads: Sequence[Tensor],
        writes: Sequence[Tensor],
        copied_bytes: int,
    ) -> None:
        self._inside[stream] = self._position()

    def ends(self, device: Device, stream: Stream, copied_bytes: int) -> None:
        self._inside.pop(stream)
        self._moves += 1

    def recorded(self, device: Device, stream: Stream, event: Event) -> Event:
        events = self._events[stream]
        events.append((event, self._position()))
        self._forget_passed(events)
        return event

    def _forget_passed(self, events: deque[tuple[Event, object]]) -> None:
        # A device that has failed says so where somebody waits for it; here it just gets no further.
        with self._lock, suppress(RuntimeError):
            while events and events[0][0].query():
                events.popleft()
                self._moves += 1


class Driver(Protocol):
    """What drives a device: a worker."""

    thread: threading.Thread

    def position(self) -> Any: ...

    def place(self, position: Any) -> FaultLocation: ...


class Watchdog:
    """Looks for the caller, while it waits, whether anything moves. `on_hang` must stop the board.

    `queues` are those of the drivers' devices; `others` are the engine's further threads.
    """

    def __init__(
        self,
        board: Board,
        drivers: Sequence[Driver],
        queues: Sequence[QueueWatch],
        others: Sequence[threading.Thread],
        timeout_s: float,
        on_hang: Callable[[HangError], None],
    ) -> None:
        self._board = board
        self._drivers = drivers
        self._queues = queues
        self._others = others
        self._timeout_s = timeout_s
        self._on_hang = on_hang
        self._last_moves = -1
        self._looks = 0

    def wait(self, fact: Fact) -> Any:
        """`Board.wait` in the caller's thread."""
        self._last_moves = -1
        return self._board.wait(fact, self._look, self._timeout_s / LOOKS)

    def synchronize(self, event: Event) -> None:
        """Wait for an event in the caller's thread. Raises what a failed device raises, `Stopped` after a hang."""
        self._last_moves = -1
        nap_s, next_look_s = 1e-5, time.monotonic() + self._timeout_s / LOOKS
        while not event.query():
            self._board.raise_if_stopped()
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, LONGEST_NAP_S)
            if time.monotonic() >= next_look_s:
                self._look()
                next_look_s = time.monotonic() + self._timeout_s / LOOKS
        event.synchronize()

    def _look(self) -> None:
        moves = self._board.posts + sum(queue.moves() for queue in self._queues)
        self._looks = self._looks + 1 if moves == self._last_moves else 0
        self._last_moves = moves
        if self._looks == LOOKS:
            self._on_hang(HangError(self._timeout_s, self._report()))

    def _report(self) -> list[str]:
        """One line for each thread, and one for each queue that is not empty below its device's."""
        waiting = self._board.waiting()
        caller = threading.current_thread()
        lines = [f"{caller.name} (the call in progress): {waiting.get(caller.name, 'waits for a device')}"]
        for driver, queues in zip(self._drivers, self._queues, strict=True):
            doing = _doing(driver.thread, waiting)
            lines.append(f"{driver.thread.name}: in {driver.place(driver.position())}: {doing}")
            for stream, (what, position) in queues.unfinished().items():
                lines.append(f"  its {stream.value} queue {what} {driver.place(position)}")
        return lines + [f"{thread.name}: {_doing(thread, waiting)}" for thread in self._others]


def _doing(thread: threading.Thread, waiting: dict[str, str]) -> str:
    """What a thread waits for, or the lines of code that it is at."""
    if thread.name in waiting:
        return waiting[thread.name]
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < CALLS_SHOWN:
        calls.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return f"is in {', called by '.join(calls)}" if calls else "has ended"
