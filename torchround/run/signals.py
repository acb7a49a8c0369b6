"""Signals that ask a run to stop: the handler only sets a flag, which the loop reads between steps."""

import os
import signal
import time
from contextlib import suppress
from types import FrameType

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
