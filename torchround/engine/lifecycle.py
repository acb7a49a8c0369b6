"""The end of an engine's threads and devices, which never hangs.

It gives all memory back at once, whatever still refers to the engine: the next engine allocates on the same devices,
and may need all that they have.
"""

import threading
import time
import traceback
from collections.abc import Sequence

import torch

from torchround.engine.board import Board
from torchround.engine.errors import FaultLocation, PipelineError
from torchround.engine.tasks import Worker
from torchround.engine.worker.device_worker import DeviceWorker

# Time that ending allows for all threads together, and then for each bundle of an update under way. A thread
# inside a computation cannot be interrupted; it is a daemon and ends with the process.
JOIN_S = 30.0


def end_threads(
    board: Board, workers: Sequence[DeviceWorker], threads: Sequence[threading.Thread], optimizer: Worker
) -> set[str]:
    """End all threads, those of `workers` and `optimizer` included, after the board's stop, and give devices back.

    Returns the names of threads and devices that are still busy at the deadline, and keep their memory. Waits for an
    update under way as long as it moves, because only a complete one leaves a store that can be saved.
    """
    moves = optimizer.moves
    deadline_s = time.monotonic() + JOIN_S
    # A thread without an identity has not been started, because a device had no room.
    ours = [thread for thread in threads if thread.ident not in (None, threading.get_ident())]
    for thread in ours:
        thread.join(max(deadline_s - time.monotonic(), 0.0))
    while optimizer.thread.is_alive() and optimizer.moves != moves:
        moves = optimizer.moves
        optimizer.thread.join(JOIN_S)
    busy = {thread.name for thread in ours if thread.is_alive()}
    for worker in workers:
        # A device is given back only if no thread drives it any more: another engine may allocate on it at once.
        if worker.thread.name not in busy:
            # On a helper thread, because waiting for a device that hangs cannot be interrupted.
            name = worker.device.name
            helper = threading.Thread(
                target=_finish, args=(board, worker), name=f"finish {name}", daemon=True
            )
            helper.start()
            helper.join(max(deadline_s - time.monotonic(), 1.0))
            if helper.is_alive():
                busy.add(name)
    return busy


def _finish(board: Board, worker: DeviceWorker) -> None:
    """Wait until a device is idle, and release it. A fault that it raises here may be the first that is known of it."""
    device = worker.device
    try:
        try:
            device.finish()
        finally:
            worker.release()  # also if the device has failed: it computes no more
        # After the buffers are dropped, because a device may hand free memory back to its driver here.
        device.release()
    except Exception as error:  # noqa: BLE001  (CUDA's errors share no narrower class)
        board.fail(PipelineError.of(error, FaultLocation(f"device {device.name}")))


def forget_variables(error: BaseException | None, seen: set[int]) -> None:
    """Clear the local variables of all frames that an error and its causes have left. Lines and names stay."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    traceback.clear_frames(error.__traceback__)  # passes over frames that are still running
    for earlier in (error.__cause__, error.__context__):
        forget_variables(earlier, seen)


def choose_kernels() -> None:
    """Let MKL choose its kernels for this processor, on one thread.

    It does so at a function's first call in the process. Two threads at their first call may get kernels that round in
    different ways: 5 of 2400 fresh processes with four threads had other roots or logarithms in one of them.
    """
    number = torch.ones(1)
    for function in (torch.sqrt, torch.exp, torch.log, torch.tanh, torch.erf, torch.sin, torch.cos):
        function(number)
