"""Notices that nothing moves any more, and reports what every thread and every device queue waits for.

The caller's thread looks around now and then while it waits; no thread is spent on it. Three things count as movement:
flags that happen, operations that are enqueued, and points of device queues that are passed (`QueueWatch`). The last one
matters on a GPU, which works on long after its thread has enqueued everything.
"""

import sys
import threading
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress

from torchround.engine.board import LAYER_GATE, Board, Flag
from torchround.engine.device import Device, Event, Stream
from torchround.engine.errors import FaultLocation, HangError, PipelineError, Stopped
from torchround.engine.tasks import Access
from torchround.engine.worker.device_worker import DeviceWorker, WorkerState

# Looks in a row that find no movement before it is a hang. Looks are counted and time is not, because a
# process that was stopped for an hour and then continued has missed one look only.
LOOKS = 8
CALLS_SHOWN = 3
EVENTS_AT_ONCE = 64  # recorded events between two questions which of them are passed
LONGEST_NAP_S = 0.001  # between two questions whether a device has passed an event


class QueueWatch:
    """The events that the queues of one device have not passed.

    `state` returns where in the pipeline the device's thread is; the watch keeps that with each event.
    """

    def __init__(self, device: Device, state: Callable[[], WorkerState]) -> None:
        device.note_event = self._note
        self._device = device
        self._state = state
        self._passed = 0
        self._events: dict[Stream, deque[tuple[Event, str, WorkerState]]] = {
            stream: deque() for stream in Stream
        }
        self._lock = threading.Lock()  # the device's thread and the one that looks both forget passed events

    def moves(self) -> int:
        """Return a count that grows as long as the device or its thread progresses."""
        for events in self._events.values():
            self._forget_passed(events)
        return self._device.num_enqueued + self._passed

    def unfinished(self) -> Iterator[tuple[Stream, str, WorkerState]]:
        """Yield each queue that is not empty, with its first unfinished operation or event and its state."""
        inside = self._device.inside
        for stream, events in self._events.items():
            self._forget_passed(events)
            if stream is inside:
                yield stream, "is inside an operation of", self._state()
            elif events:
                _, what, state = events[0]
                yield stream, f"has not passed {len(events)} event(s), the first one ({what}) of", state

    def _note(self, stream: Stream, event: Event, what: str) -> None:
        events = self._events[stream]
        events.append((event, what, self._state()))
        # Each question is a call of the driver, in the thread that launches kernels.
        if len(events) % EVENTS_AT_ONCE == 0:
            self._forget_passed(events)

    def _forget_passed(self, events: deque[tuple[Event, str, WorkerState]]) -> None:
        # A failed device raises where a thread waits for it. Here it only makes no progress.
        with self._lock, suppress(RuntimeError):
            # A queue passes its events in their order.
            passed = bisect_left(events, True, key=lambda entry: not entry[0].query())
            for _ in range(passed):
                events.popleft()
            self._passed += passed


class Watchdog:
    """The waits of the caller's thread, which looks meanwhile whether anything moves. A hang is the engine's fault.

    `others` are the engine's threads besides those of `workers`.
    """

    def __init__(
        self,
        board: Board,
        workers: Sequence[DeviceWorker],
        others: Sequence[threading.Thread],
        timeout_s: float,
    ) -> None:
        self._board = board
        self._watches = [(worker, QueueWatch(worker.device, worker.state)) for worker in workers]
        self._others = others
        self._timeout_s = timeout_s
        self._last_moves = -1
        self._looks = 0

    def wait_for(self, flag: Flag, words: object = None) -> None:
        """Wait for a flag, as `Board.wait_for` does. Reports say `words` in place of the flag's own."""
        # No count of moves is negative, so the first look finds movement and begins to count afresh.
        self._last_moves = -1
        self._board.wait_for(flag, words or flag, self._look, self._timeout_s / LOOKS)

    def wait_for_access(self, access: Access) -> None:
        """Wait for an access, as `Access.wait` does."""
        self.wait_for(access)
        if access.event is not None:
            self.synchronize(access.event)

    def synchronize(self, event: Event) -> None:
        """Wait for an event. Raises `Stopped` after a hang, or if the device has failed, which is the engine's fault."""
        self._last_moves = -1
        # Asked again and again instead of `event.synchronize()`, which would not return after a hang.
        nap_s, next_look_s = 1e-5, time.monotonic() + self._timeout_s / LOOKS
        try:
            while not event.query():
                self._board.raise_if_stopped()
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, LONGEST_NAP_S)
                if time.monotonic() >= next_look_s:
                    self._look()
                    next_look_s = time.monotonic() + self._timeout_s / LOOKS
            event.synchronize()
        except RuntimeError as error:
            self._board.fail(PipelineError.of(error, FaultLocation("controller")))
            raise Stopped from error

    def _look(self) -> None:
        moves = self._board.moves + sum(watch.moves() for _, watch in self._watches)
        is_still = moves == self._last_moves and time.monotonic() >= LAYER_GATE.compiles_until_s
        self._looks = self._looks + 1 if is_still else 0
        self._last_moves = moves
        if self._looks == LOOKS:
            self._board.fail(HangError(self._timeout_s, self._report()))

    def _report(self) -> list[str]:
        """Return a line for each thread; below a device's thread, a line for each of its queues that is not empty."""
        waiting = self._board.waiting()
        caller = threading.current_thread()
        lines = [f"{caller.name} (the call in progress): {waiting.get(caller.name, 'waits for a device')}"]
        for worker, watch in self._watches:
            doing = _doing(worker.thread, waiting)
            lines.append(f"{worker.thread.name}: in {worker.location(worker.state())}: {doing}")
            for stream, what, state in watch.unfinished():
                lines.append(f"  its {stream.value} queue {what} {worker.location(state)}")
        return lines + [f"{thread.name}: {_doing(thread, waiting)}" for thread in self._others]


def _doing(thread: threading.Thread, waiting: dict[str, str]) -> str:
    """Describe what a thread waits for, or the lines of code where it is."""
    if thread.name in waiting:
        return waiting[thread.name]
    frame = sys._current_frames().get(thread.ident or 0)
    calls: list[str] = []
    while frame is not None and len(calls) < CALLS_SHOWN:
        calls.append(f"{frame.f_code.co_name} ({frame.f_code.co_filename}:{frame.f_lineno})")
        frame = frame.f_back
    return f"is in {', called by '.join(calls)}" if calls else "has ended"
