"""What ends a run before its last step: too many bad steps in a row, or a signal.

The optimizer worker decides which updates are left out (`optim/stability.py`, `engine/update.py`). A step without an
update leaves the weights of the last good step. In `bounded` a step may leave out some layers and update the others.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from types import FrameType

from torchround.config import TrainingTable
from torchround.engine.passes import StepResult

logger = logging.getLogger(__name__)

SHOWN = 5  # first entries of a long list that are shown


class BadStepsError(Exception):
    """Too many bad steps in a row, or one spike under `training.on_spike = "stop"`."""


class BadSteps:
    """A count of bad steps in a row. `error` is set once there are too many. The count restarts on resume."""

    def __init__(self, table: TrainingTable) -> None:
        self.error: BadStepsError | None = None
        self._most_in_a_row = table.max_skipped_steps
        self._stops_at_spike = table.on_spike == "stop"
        self._last_good_step = "none since this start of the run"
        self._in_a_row: list[str] = []

    def add(self, step: int, tokens: int, result: StepResult) -> None:
        """Count a finished step. Steps come in order; `tokens` were trained on before it."""
        update, loss = result.update(), result.loss()
        if not (update.skipped or update.fault):
            self._last_good_step, self._in_a_row = f"step {step}", []
            return
        if not update.fault:
            logger.warning(
                "step %d: the gradient overflows float16 under a loss scale of %g; its update is skipped, and a "
                "lower scale follows, as usual",
                *(step, update.loss_scale),
            )
            return
        where = f", micro-batches {_listed(update.not_finite)}" if update.not_finite else ""
        left_out = f"not updated: {_listed(update.left_out)}" if update.left_out else "its update is skipped"
        text = (
            f"step {step}: {update.fault}{where}; loss {loss:.6g}, gradient norm {update.grad_norm:.6g}, loss scale "
            f"{update.loss_scale:g}; its data begins after {tokens:,} tokens of the run; {left_out}"
        )
        logger.warning("%s", text)
        if self.error is not None:
            return  # this step was already under way when the limit was reached
        self._in_a_row.append(text)
        # Every bad step is a spike or not finite.
        is_spike = math.isfinite(loss) and math.isfinite(update.grad_norm)
        if self._stops_at_spike and is_spike:
            reason = 'a spike (training.on_spike = "stop")'
        elif (count := len(self._in_a_row)) >= self._most_in_a_row:
            reason = f"{count} bad steps in a row (training.max_skipped_steps = {self._most_in_a_row})"
        else:
            return
        steps = "".join(f"\n  {line}" for line in self._in_a_row[:SHOWN])  # each had a warning of its own
        self.error = BadStepsError(
            f"{reason}; the last good one: {self._last_good_step}. The run is saved:{steps}\nThe same command continues "
            "with the data after them. If they come again, try a lower optimizer.lr or an earlier checkpoint "
            "(checkpoint.load_path), or look at that data."
        )


def _listed(items: Sequence[object]) -> str:
    shown = ", ".join(map(str, items[:SHOWN]))
    return shown + f" and {len(items) - SHOWN} more" * (len(items) > SHOWN)


# Signals. The handler only sets a flag, which the loop reads between steps.

# In this order: the request of a scheduler or a person, Control-C, a scheduler's warning ahead of its deadline, and a
# terminal that closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A cluster's scheduler signals both torchrun and this process, and torchrun passes its signal on. Signals this close
# together are one request.
SAME_REQUEST_S = 2.0


class StopRequest(ExitStack):
    """A block in which each of `STOP_SIGNALS` on any machine asks the run to stop after the step.

    `signal_number` is that of this machine. What counts are the `signals` that the machines exchange once for each step, by
    rank. Another signal, `SAME_REQUEST_S` or more after the first, ends the process as an uncaught one does. A signal that
    was ignored when the process started stays ignored: `nohup` and shells that start background jobs ask for that.
    """

    def __init__(self, machines: Sequence[str]) -> None:
        super().__init__()
        self.signal_number: int | None = None
        self._machines = machines
        self.signals: Sequence[int | None] = [None]
        self._asked_at_s = 0.0

    def reason(self) -> tuple[str, int] | None:
        """Return why the run stops, and the exit code of all: 128 + the first machine's signal; None without a signal."""
        asked = [(rank, number) for rank, number in enumerate(self.signals) if number is not None]
        if not asked:
            return None
        names = [f"{self._machines[rank]} got {signal.Signals(number).name}; " for rank, number in asked]
        by = "".join(names) if len(self._machines) > 1 else ""
        return f"{by}run the same command to continue", 128 + asked[0][1]

    def __enter__(self) -> "StopRequest":  # noqa: PYI034  (typing.Self needs Python 3.11)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.callback(signal.signal, number, signal.signal(number, self._ask))
        return self

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal_number is None:
            self.signal_number, self._asked_at_s = number, now_s
            name = signal.Signals(number).name
            line = f"{name}: finishing the steps under way and saving; another signal stops at once\n"
            # Not through the buffer of standard error, which the interrupted code may be writing to.
            with suppress(OSError):
                os.write(2, line.encode())
        elif now_s - self._asked_at_s >= SAME_REQUEST_S:
            # No KeyboardInterrupt: its unwinding would wait for threads that are in the middle of a computation.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
