"""The life of an engine's threads: their start, calls that raise the first fault, and an end that never hangs.

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

import torch

from torchround.engine.board import Board
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
    """The start of an engine's threads and the one end of its threads, devices and pool.

    `others` are the threads besides those of `workers`, `optimizer`'s among them. `stop` calls `settle` once no thread
    runs any more, and then closes the pool.
    """

    def __init__(
        self,
        board: Board,
        store: HostStore,
        pool: HostPool,
        workers: Sequence[DeviceWorker],
        others: Sequence[threading.Thread],
        optimizer: Worker,
        exchange: StepExchange,
        settle: Callable[[], None],
    ) -> None:
        self.is_stopped = False
        self._board = board
        self._store = store
        self._pool = pool
        self._workers = workers
        self._threads = [*(worker.thread for worker in workers), *others]
        self._optimizer = optimizer
        self._exchange = exchange
        self._settle = settle
        self._lock = threading.Lock()

    def start(self) -> None:
        """Allocate the device memory of the workers, and start all threads."""
        try:
            for worker in self._workers:
                worker.allocate()
        except BaseException:
            self.stop()  # gives back what was allocated on the devices that had room
            raise
        choose_kernels()
        self._exchange.start()
        atexit.register(self._stop_at_exit, os.getpid())
        for thread in self._threads:
            thread.start()

    @contextmanager
    def call(self, is_known: bool = False) -> Iterator[None]:
        """Run a call of the user, raising the engine's failure instead of hanging or returning as if all were well.

        `is_known` says that the answer is known already; the user gets it even after the end.
        """
        if not is_known:
            self._raise_failure()
            if self.is_stopped:
                raise EngineUsageError("the engine is closed")
        try:
            yield
        except Stopped:
            self._raise_failure()
            raise EngineUsageError("the engine was closed during this call") from None
        # The call has its answer, but a fault came meanwhile, for example one that the
        # update's second try overcame.
        if not is_known:
            self._raise_failure()

    def _raise_failure(self) -> None:
        # Without a variable for it, which would make a reference cycle through the traceback.
        if self._board.failure is not None:
            self.stop()
            raise self._board.failure from self._board.failure.__cause__

    def stop(self) -> None:
        """End every thread and give devices and pool back. A thread that still runs at the deadline keeps its memory.

        Waits for an update under way as long as it moves, because only a complete one leaves a store that can
        be saved.
        """
        with self._lock:
            if self.is_stopped:
                return
            self.is_stopped = True
        atexit.unregister(self._stop_at_exit)
        self._board.stop()  # every thread unwinds at its next wait
        self._exchange.stop(self._board.failure)
        moves = self._optimizer.moves
        deadline_s = time.monotonic() + JOIN_S
        # None has an identity if a device had no room, and is the one that calls if a task of it ends the engine.
        ours = [thread for thread in self._threads if thread.ident not in (None, threading.get_ident())]
        for thread in ours:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        while self._optimizer.thread.is_alive() and self._optimizer.moves != moves:
            moves = self._optimizer.moves
            self._optimizer.thread.join(JOIN_S)
        busy = {thread.name for thread in ours if thread.is_alive()}
        for worker in self._workers:
            # A device is given back only if no thread drives it any more: another engine may allocate on it at once.
            if worker.thread.name in busy:
                continue
            # On a helper thread, because waiting for a device that hangs cannot be interrupted.
            name = worker.device.name
            helper = threading.Thread(target=self._finish, args=(worker,), name=f"finish {name}", daemon=True)
            helper.start()
            helper.join(max(deadline_s - time.monotonic(), 1.0))
            if helper.is_alive():
                busy.add(name)
        failure = self._board.failure
        # In `bounded`, or if an update is stuck.
        if failure is not None and failure.store_is_consistent and not self._store.is_consistent:
            failure.store_is_consistent = False
            failure.add(f"some layers are updated: {MIXED}")
        # Memory that a device may still copy to must not be unmapped.
        if not busy:
            self._settle()
            self._pool.close()
            # The caller keeps the fault, and its traceback keeps the activations of the stage that failed.
            _forget_variables(failure, seen=set())
        elif failure is not None:
            failure.add(f"still inside a computation, with its memory: {', '.join(sorted(busy))}")

    def _stop_at_exit(self, process: int) -> None:
        """End an engine that the program did not close: Python would end its threads inside C++, which aborts.

        A forked process has no such threads.
        """
        if os.getpid() == process:
            self.stop()

    def _finish(self, worker: DeviceWorker) -> None:
        """Wait until a device is idle, and release it. A fault that it raises here may be the first that is known of it."""
        device = worker.device
        try:
            try:
                device.finish()
            finally:
                worker.let_go()  # also if the device has failed: it computes no more
            # After the buffers are dropped, because a device may hand free memory back to its driver here.
            device.release()
        except Exception as error:  # noqa: BLE001  (CUDA's errors share no narrower class)
            self._board.fail(PipelineError.of(error, FaultLocation(f"device {device.name}")))


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
    for function in (torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin, torch.cos):
        function(number)
