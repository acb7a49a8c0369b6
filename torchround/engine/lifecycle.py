"""The life of an engine's threads: the first fault, calls that raise it, and an end that never hangs.

The end gives all memory back at once, whatever still refers to the engine: the next engine allocates on the
same devices, and may need all that they have.
"""

import atexit
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest

import torch

from torchround.engine.board import Board
from torchround.engine.device import Device
from torchround.engine.errors import MIXED, EngineUsageError, FaultLocation, PipelineError, Stopped
from torchround.engine.exchange import StepExchange
from torchround.engine.store.host_memory import HostPool
from torchround.engine.store.host_store import HostStore
from torchround.engine.tasks import Worker
from torchround.engine.worker.device_worker import DeviceWorker

# Time that ending allows for all threads together, and then for each bundle of an update under way. A thread
# inside a computation cannot be interrupted; it is a daemon and ends with the process.
JOIN_S = 30.0


class Lifecycle:
    """The first fault of an engine, and the end of its threads, devices and pool, which comes once.

    `stop` calls `settle` once no thread runs any more, and then closes the pool.
    """

    def __init__(
        self,
        board: Board,
        store: HostStore,
        pool: HostPool,
        devices: Sequence[Device],
        settle: Callable[[], None],
    ) -> None:
        self.failure: PipelineError | None = None
        self._board = board
        self._store = store
        self._pool = pool
        self._devices = devices
        self._settle = settle
        self._workers: Sequence[DeviceWorker] = ()
        self._threads: Sequence[threading.Thread] = ()
        self._optimizer: Worker | None = None
        self._exchange: StepExchange | None = None
        self._lock = threading.Lock()
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped

    def allocate(self, workers: Sequence[DeviceWorker]) -> None:
        """Allocate the device memory of the workers, one for each device; `stop` gives it back."""
        self._workers = workers
        try:
            for worker in workers:
                worker.allocate()
        except BaseException:
            self.stop()  # gives back what was allocated on the devices that had room
            raise

    def start(self, threads: Sequence[threading.Thread], optimizer: Worker, exchange: StepExchange) -> None:
        """Start the engine's threads. Device threads come first, in device order; `optimizer`'s is among the others."""
        self._threads, self._optimizer, self._exchange = threads, optimizer, exchange
        choose_kernels()
        atexit.register(self._stop_at_exit, os.getpid())
        for thread in threads:
            thread.start()

    def fail(self, failure: PipelineError) -> None:
        """Keep the first fault and wake every waiting thread. Any thread may call this."""
        with self._lock:
            is_first = self.failure is None
            self.failure = self.failure or failure
        self._board.stop()
        if is_first and self._exchange is not None:
            self._exchange.fail(failure)

    @contextmanager
    def call(self, is_there: bool = False) -> Iterator[None]:
        """Run a call of the user, raising the engine's failure instead of hanging or returning as if all were well.

        `is_there` says that the answer is known already; the user gets it even after the end.
        """
        if not is_there:
            self.raise_if_ended()
        try:
            yield
        except Stopped:
            self.raise_if_ended(during_call=True)
        # The call has its answer, but a fault came meanwhile, for example one that the
        # update's second try overcame.
        if self.failure is not None and not is_there:
            self.raise_if_ended()

    def raise_if_ended(self, during_call: bool = False) -> None:
        """Raise the fault that ended the engine, or an error that says that it is closed."""
        if self.failure is not None:
            self.stop()
            raise self.failure from self.failure.__cause__
        if during_call:
            raise EngineUsageError("the engine was closed during this call") from None
        if self._stopped:
            raise EngineUsageError("the engine is closed")

    def stop(self) -> None:
        """End every thread and give devices and pool back. A thread that still runs at the deadline keeps its memory.

        Waits for an update under way as long as it moves, because only a complete one leaves a store that can
        be saved.
        """
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
        atexit.unregister(self._stop_at_exit)
        self._board.stop()  # every thread unwinds at its next wait
        if self._exchange is not None:
            self._exchange.stop(self.failure)
        moves = self._optimizer.moves if self._optimizer else 0
        deadline_s = time.monotonic() + JOIN_S
        ours = [thread for thread in self._threads if thread is not threading.current_thread()]
        for thread in ours:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        while self._optimizer and self._optimizer.thread.is_alive() and self._optimizer.moves != moves:
            moves = self._optimizer.moves
            self._optimizer.thread.join(JOIN_S)
        # A device is given back only if no thread drives it any more: another
        # engine may allocate on it at once.
        busy = {thread.name for thread in ours if thread.is_alive()}
        for device, worker in zip_longest(self._devices, self._workers):
            drives = worker is not None and worker.thread.name in busy
            if not drives and not self._finish(device, worker, deadline_s):
                busy.add(device.name)
        self._note_what_is_left()
        # Memory that a device may still copy to must not be unmapped.
        if not busy:
            self._settle()
            self._pool.close()
            # The caller keeps the fault, and its traceback keeps the activations of the stage that failed.
            _forget_variables(self.failure, seen=set())
        elif self.failure is not None:
            still = ", ".join(sorted(busy))
            # Callers may hold this very object already, so its text grows in place.
            self.failure.args = (f"{self.failure} (still inside a computation, with its memory: {still})",)

    def _stop_at_exit(self, process: int) -> None:
        """End an engine that the program did not close: Python would end its threads inside C++, which aborts.

        A forked process has no such threads.
        """
        if os.getpid() == process:
            self.stop()

    def _note_what_is_left(self) -> None:
        """Say in the fault that it left the store between two updates, in `bounded` or if an update is stuck."""
        is_mixed = self._optimizer is not None and not self._store.is_consistent
        if self.failure is not None and self.failure.store_is_consistent and is_mixed:
            self.failure.store_is_consistent = False
            # Callers may hold this very object already, so its text grows in place.
            self.failure.args = (f"{self.failure} (some layers are updated: {MIXED})",)

    def _finish(self, device: Device, worker: DeviceWorker | None, deadline_s: float) -> bool:
        """Wait until a device is idle and release it. Returns False if it is not idle in time.

        There is no worker if the engine's end came before it was made.
        """
        # On a helper thread, because waiting for a device that hangs cannot be interrupted.
        helper = threading.Thread(
            target=self._finish_device, args=(device, worker), name=f"finish {device.name}", daemon=True
        )
        helper.start()
        helper.join(max(deadline_s - time.monotonic(), 1.0))
        return not helper.is_alive()

    def _finish_device(self, device: Device, worker: DeviceWorker | None) -> None:
        """Finish and release a device. A fault that it raises here may be the first that is known of it."""
        try:
            try:
                device.finish()
            finally:
                # Also if the device has failed: it computes no more.
                if worker is not None:
                    worker.release()
            # After the buffers are dropped, because a device may hand free memory back to its driver here.
            device.release()
        except Exception as error:  # noqa: BLE001  (CUDA's errors share no narrower class)
            failure = PipelineError(
                FaultLocation(f"device {device.name}"), f"{type(error).__name__}: {error}"
            )
            failure.__cause__ = error
            self.fail(failure)


def _forget_variables(error: BaseException | None, seen: set[int]) -> None:
    """Clear the local variables of all frames that an error and its causes have left. Lines and names stay."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)  # passes over frames that are still running
    for earlier in (error.__cause__, error.__context__):
        _forget_variables(earlier, seen)


def choose_kernels() -> None:
    """Let MKL choose its kernels for this processor, on one thread.

    It does so at a function's first call in the process. Two threads at their first call may get kernels that round in
    different ways: 5 of 2400 fresh processes with four threads had other roots or logarithms in one of them.
    """
    number = torch.ones(1)
    for function in (*(torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf), *(torch.sin, torch.cos)):
        function(number)
