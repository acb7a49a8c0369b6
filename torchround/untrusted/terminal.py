"""Makes text from untrusted files safe to print, and prints how far long work is."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress

MOST_CHARACTERS = 2000  # of each part of a message
EVERY_S = 10.0


def terminal_safe(message: object, *lines: object) -> str:
    """Join `message` and `lines`, each indented below it, with control characters escaped.

    A part longer than `MOST_CHARACTERS` loses its middle, so it cannot fill the terminal.
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
    """Print one line to standard output. A reader that has gone away, as after `| head`, does not end the run."""
    with suppress(OSError):
        print(escape_unprintable(line), flush=True)


class Progress:
    """A line on standard error every ten seconds of long work, as `verifying: 3.2 GiB of 12.1 GiB (26 %)`.

    `total` is the whole amount, None if it is not known. `text` writes an amount with its unit. One thread at a time
    advances it.
    """

    def __init__(
        self, work: str, total: int | None = None, text: Callable[[int], str] = "{:,}".format
    ) -> None:
        self.done = 0
        self._work, self._total, self._text = work, total, text
        self._next_s = time.monotonic() + EVERY_S

    def advance(self, amount: int = 1) -> None:
        """Count more as done. Print the line if it is due."""
        self.done += amount
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + EVERY_S
        text = f"{self._work}: {self._text(self.done)}"
        if self._total:
            text += f" of {self._text(self._total)} ({100 * self.done / self._total:.0f} %)"
        # A closed console must not end the work.
        with suppress(OSError, ValueError):
            print(escape_unprintable(text), file=sys.stderr, flush=True)
