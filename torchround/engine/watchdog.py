"""Notices that nothing moves any more, and reports what every thread and every device queue waits for.

The caller's thread looks around now and then while it waits; no thread is spent on it. Three things count as movement:
flags that happen, operations that are enqueued, and points of device queues that are passed (`Device.moves`). The last one
matters on a GPU, which works on long after its thread has enqueued everything.
"""

import sys
import threading
import time
import traceback
from collections.abc import Sequence

from torchround.engine.board import LAYER_GATE, Board, Flag
from torchround.engine.device import Event
from torchround.engine.errors import FaultLocation, HangError, PipelineError, Stopped
from torchround.engine.tasks import Access
from torchround.engine.worker.device_worker import DeviceWorker

# Looks in a row that find no movement before it is a hang. Looks are counted and time is not, because a
# process that was stopped for an hour and then continued has missed one look only.
LOOKS = 8
CALLS_SHOWN = 3
LONGEST_NAP_S = 0.001  # between two questions whether a device has passed an event


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
        self._workers = workers
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
        moves = self._board.moves + sum(worker.device.moves() for worker in self._workers)
        is_still = moves == self._last_moves and not LAYER_GATE.compiles
        self._looks = self._looks + 1 if is_still else 0
        self._last_moves = moves
        if self._looks == LOOKS:
            self._board.fail(HangError(self._timeout_s, self._report()))

    def _report(self) -> list[str]:
        """Return a line for each thread; below a device's thread, a line for each of its queues that is not empty."""
        waiting = self._board.waiting()
        caller = threading.current_thread()
        lines = [f"{caller.name} (the call in progress): {waiting.get(caller.name, 'waits for a device')}"]
        for worker in self._workers:
            doing = _doing(worker.thread, waiting)
            lines.append(f"{worker.thread.name}: in {worker.device.location}: {doing}")
            lines += [f"  its {stream.value} queue {what}" for stream, what in worker.device.unfinished()]
        return lines + [f"{thread.name}: {_doing(thread, waiting)}" for thread in self._others]


def _doing(thread: threading.Thread, waiting: dict[str, str]) -> str:
    """Describe what a thread waits for, or the lines of code where it is."""
    if thread.name in waiting:
        return waiting[thread.name]
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "has ended"
    stack = traceback.extract_stack(frame, limit=CALLS_SHOWN)
    return "is in " + ", called by ".join(f"{f.name} ({f.filename}:{f.lineno})" for f in reversed(stack))
