"""The life of an engine's threads: the first fault, calls that raise it, and an end that never hangs."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Protocol

from torchround.engine.board import Board
from torchround.engine.device import Device
from torchround.engine.errors import EngineUsageError, FaultLocation, PipelineError, Stopped
from torchround.engine.store.host_memory import HostPool

# How long ending waits for all threads together, and then for an update under way from one bundle to the next. One
# inside a computation cannot be interrupted; it is a daemon and ends with the process.
JOIN_S = 30.0


class Writer(Protocol):
    """What updates the host store: the optimizer's worker. `moves` grows as long as an update gets anywhere."""

    thread: threading.Thread
    moves: int


class Lifecycle:
    """Keeps the first fault, and ends threads, devices and pool once."""

    def __init__(self, board: Board, pool: HostPool, devices: Sequence[Device]) -> None:
        self.failure: PipelineError | None = None
        self._board = board
        self._pool = pool
        self._devices = devices
        self._threads: Sequence[threading.Thread] = ()
        self._writer: Writer | None = None
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        return self._stopped

    def start(self, threads: Sequence[threading.Thread], writer: Writer) -> None:
        """Start the engine's threads; those of the devices come first, in device order. `writer`'s is among them."""
        self._threads, self._writer = threads, writer
        for thread in threads:
            thread.start()

    def fail(self, failure: PipelineError) -> None:
        """Called by any thread: keep the first fault and wake everybody."""
        with self._lock:
            if self.failure is None:
                self.failure = failure
        self._board.stop()

    @contextmanager
    def call(self, is_there: bool = False) -> Iterator[None]:
        """A call of the user: raises the engine's failure instead of hanging, or of ending as if all were well.

        With `is_there`, what is asked for is known already: it is given also after the end.
        """
        if not is_there:
            self.raise_if_ended()
        try:
            yield
        except Stopped:
            self.raise_if_ended(during_call=True)
        if self.failure is not None and not is_there:
            self.raise_if_ended()

    def raise_if_ended(self, during_call: bool = False) -> None:
        """Raise the fault that ended the engine, or say that it is closed."""
        if self.failure is not None:
            self.stop()
            raise self.failure from self.failure.__cause__
        if during_call:
            raise EngineUsageError("the engine was closed during this call") from None
        if self._stopped:
            raise EngineUsageError("the engine is closed")

    def stop(self) -> None:
        """End every thread and give devices and pool back. What still runs at the deadline keeps its memory.

        An update under way is waited for as long as it moves: only a whole one leaves a store that can be saved.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        self._board.stop()
        moves = self._writer.moves if self._writer else 0
        deadline_s = time.monotonic() + JOIN_S
        ours = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in ours:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        while self._writer and self._writer.thread.is_alive() and self._writer.moves != moves:
            moves = self._writer.moves
            self._writer.thread.join(JOIN_S)
        busy = {thread.name for thread in ours if thread.is_alive()}
        for device, thread in zip_longest(self._devices, self._threads[: len(self._devices)]):
            drives = thread is not None and thread.name in busy  # no thread yet: the engine did not fit
            if not drives and not self._finish(device, deadline_s):
                busy.add(device.name)
        if not busy:
            self._pool.close()
        elif self.failure is not None:
            still = ", ".join(sorted(busy))
            self.failure.args = (f"{self.failure} (still inside a computation, with its memory: {still})",)

    def _finish(self, device: Device, deadline_s: float) -> bool:
        """Wait until a device is idle and leave it to others. False if it is not idle in time."""
        helper = threading.Thread(
            target=self._finish_device, args=(device,), name=f"finish {device.name}", daemon=True
        )
        helper.start()
        helper.join(max(deadline_s - time.monotonic(), 1.0))
        return not helper.is_alive()

    def _finish_device(self, device: Device) -> None:
        """One that has failed says so again here, or for the first time."""
        try:
            device.finish()
            device.release()
        except Exception as error:  # noqa: BLE001  (CUDA's errors share no narrower class)
            failure = PipelineError(
                FaultLocation(f"device {device.name}"), f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.fail(failure)
