"""Lines for the console."""

from contextlib import suppress

from torchround.untrusted.terminal import escape_unprintable


def say(line: str) -> None:
    """A line on the console, which may quote names of others. That nobody reads it any more, as after `| head`, does not end a run."""
    with suppress(OSError):
        print(escape_unprintable(line), flush=True)
