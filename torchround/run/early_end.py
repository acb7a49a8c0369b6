"""Steps whose update was left out: told as they come, and the end of a run that only has such steps.

Which update is left out, the optimizer worker decides (`optim/stability.py`, `engine/optimizer_worker.py`); it never touches
the weights, so they are those of the last good step whenever a run ends here.
"""

import logging
import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType

from torchround.config import TrainingTable
from torchround.engine.optimizer_worker import UpdateReport
from torchround.engine.results import StepResult

logger = logging.getLogger(__name__)

SHOWN = 5  # of a long list, so many from each end


class BadStepsError(Exception):
    """The run had as many bad steps in a row as its config allows."""


@dataclass(frozen=True)
class BadStep:
    """A step that learnt nothing. `tokens` were trained on before it."""

    step: int
    tokens: int
    loss: float
    update: UpdateReport

    @property
    def is_spike(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.update.grad_norm)

    def __str__(self) -> str:
        update = self.update
        where = f", micro-batches {_listed(update.not_finite)}" if update.not_finite else ""
        return (
            f"step {self.step}: {update.fault}{where}; loss {self.loss:.6g}, gradient norm {update.grad_norm:.6g}, "
            f"loss scale {update.loss_scale:g}; its data begins after {self.tokens:,} tokens of the run"
        )


class BadSteps:
    """Counts bad steps in a row; `error` is there once they were too many. A run that goes on counts anew."""

    def __init__(self, table: TrainingTable) -> None:
        self.error: BadStepsError | None = None
        self._most_in_a_row = table.max_skipped_steps
        self._stops_at_spike = table.on_spike == "stop"
        self._last_good_step = "none since the run was started"
        self._in_a_row: list[BadStep] = []

    def add(self, step: int, tokens: int, result: StepResult) -> None:
        """A finished step; steps come in order. `tokens` were trained on before it."""
        update = result.update()
        if not update.skipped:
            self._last_good_step, self._in_a_row = f"step {step}", []
        elif not update.fault:
            logger.warning(
                "step %d: the gradient overflows float16 under a loss scale of %g; its update is skipped, and a "
                "lower scale follows, as usual",
                step,
                update.loss_scale,
            )
        else:
            self._add_bad(BadStep(step, tokens, result.loss(), update))

    def _add_bad(self, bad: BadStep) -> None:
        logger.warning("%s; its update is skipped", bad)
        if self.error is not None:
            return  # the step that was under way when it was one too many
        self._in_a_row.append(bad)
        if self._stops_at_spike and bad.is_spike:
            self._stop("a spike", 'training.on_spike = "stop"')
        elif len(self._in_a_row) >= self._most_in_a_row:
            key = f"training.max_skipped_steps = {self._most_in_a_row}"
            self._stop(f"{len(self._in_a_row)} bad steps in a row", key)

    def _stop(self, reason: str, key: str) -> None:
        shown = [str(bad) for bad in self._in_a_row]
        if len(shown) > 2 * SHOWN:
            shown[SHOWN:-SHOWN] = [f"({len(shown) - 2 * SHOWN} more)"]
        steps = "".join(f"\n  {line}" for line in shown)
        self.error = BadStepsError(
            f"{reason} ({key}); the last good one: {self._last_good_step}. Bad steps leave the weights as they "
            f"were, and the run is saved:{steps}\nThe same command goes on with the data after them. If they come "
            "again, a lower optimizer.lr, an earlier checkpoint (checkpoint.load_path), or a look at that data may help."
        )


def _listed(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:SHOWN]))
    return shown + f" and {len(numbers) - SHOWN} more" * (len(numbers) > SHOWN)


# Signals that ask a run to stop: the handler only sets a flag, which the loop reads between steps.


# A scheduler's or a person's request, Control-C, a scheduler's warning ahead of its deadline, a terminal that closed.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# A cluster's scheduler signals torchrun and this process, and torchrun hands its own on: one request, not two.
SAME_REQUEST_S = 2.0


class StopRequest:
    """Within the block, each of `STOP_SIGNALS` asks for a stop after the step.

    Another one, `SAME_REQUEST_S` or more after the first, ends the process as if nobody had caught it. A signal that
    was ignored when the process started stays ignored: `nohup` and shells that start a job in the background
    mean that.
    """

    def __init__(self) -> None:
        self.signal_number: int | None = None
        self._asked_at_s = 0.0
        self._previous: dict[int, object] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as shells report it; 0 where nobody asked."""
        return 0 if self.signal_number is None else 128 + self.signal_number

    def __enter__(self) -> "StopRequest":  # noqa: PYI034  (typing.Self needs Python 3.11)
        for number in STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous.clear()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self.signal_number is None:
            self.signal_number, self._asked_at_s = number, now_s
            _tell(f"{signal.Signals(number).name}: finishing the step and saving; once more stops at once")
        elif now_s - self._asked_at_s >= SAME_REQUEST_S:
            # Not KeyboardInterrupt, whose unwinding would wait for threads in the middle of a computation.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def _tell(line: str) -> None:
    """To standard error past its buffer, which the interrupted code may be writing to."""
    with suppress(OSError):
        os.write(2, f"{line}\n".encode())
