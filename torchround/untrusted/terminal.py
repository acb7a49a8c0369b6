"""Makes text from untrusted files safe to print, and prints how far long work is.

Every error that quotes such a file passes its message through here.
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

MOST_CHARACTERS = 2000  # of each part of a message
EVERY_S = 10.0


def terminal_safe(message: object, *lines: object) -> str:
    """Return `message`, with each of `lines` indented below it, safe to print in a terminal.

    Control characters are escaped, so they cannot command the terminal. Each part longer than `MOST_CHARACTERS`
    loses its middle, so it cannot fill the terminal.
    """
    half = MOST_CHARACTERS // 2
    parts = [str(part) for part in (message, *lines)]
    short = (text if len(text) <= MOST_CHARACTERS else f"{text[:half]} .. {text[-half:]}" for text in parts)
    return "\n  ".join(map(escape_unprintable, short))


def escape_unprintable(text: str) -> str:
    """Replace each unprintable character by its Python escape. Newlines stay. The length is not limited."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else repr(letter)[1:-1] for letter in text
    )


def say(line: str) -> None:
    """Print one line to standard output, safe for a terminal.

    A reader that has gone away, as after `| head`, does not end the run: the line is dropped.
    """
    with suppress(OSError):
        print(escape_unprintable(line), flush=True)


class Progress:
    """A line on standard error every ten seconds of long work, as `verifying: 3.2 GiB of 12.1 GiB (26 %)`.

    `total` is the whole amount, None if it is not known. `text` writes an amount with its unit. One thread at a time
    advances it.
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
        self._work, self._total, self._text, self._clock = work, total, text, clock
        self._next_s = clock() + EVERY_S

    def advance(self, amount: int = 1) -> None:
        """Count more as done. Print the line if it is due."""
        self.done += amount
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        # A closed console must not end the work.
        with suppress(OSError, ValueError):
            print(escape_unprintable(self.line()), file=sys.stderr, flush=True)

    def line(self) -> str:
        share = f" of {self._text(self._total)} ({self.done / self._total:.0%})" if self._total else ""
        return f"{self._work}: {self._text(self.done)}{share.replace('%', ' %')}"
