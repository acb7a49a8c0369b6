"""Lines that say how far long work is, on a terminal and in a log file alike.

Work that ends within `EVERY_S` seconds prints nothing. Longer work prints a line now and then, so that a run is never
silent for minutes. Lines do not overwrite each other, so they mix well with the lines of other threads.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

from torchround.untrusted.terminal import escape_unprintable

EVERY_S = 10.0


class Progress:
    """The amount that is done of some work. One thread at a time advances it.

    `work` names the work for the line, such as `saving step-500`. `total` is the whole amount, None if it is not known.
    `text` writes an amount with its unit. Lines go to standard error: some commands print results to standard output.
    """

    def __init__(
        self,
        work: str,
        total: int | None = None,
        text: Callable[[int], str] = "{:,}".format,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.done = 0
        self._work = work
        self._total = total
        self._text = text
        self._clock = clock
        self._next_s = clock() + EVERY_S

    def advance(self, amount: int = 1, *, silent: bool = False) -> None:
        """Count more as done. Print the line if it is due, unless `silent`."""
        self.done += amount
        now_s = self._clock()
        if silent or now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        # A closed console must not end the work.
        with suppress(OSError, ValueError):
            print(escape_unprintable(self.line()), file=sys.stderr, flush=True)

    def line(self) -> str:
        """Return the line, such as `saving step-500: 3.20 GiB of 12.10 GiB (26 %)`."""
        share = f" of {self._text(self._total)} ({self.done / self._total:.0%})" if self._total else ""
        return f"{self._work}: {self._text(self.done)}{share.replace('%', ' %')}"
