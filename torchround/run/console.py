"""Lines for the console."""

from contextlib import suppress


def say(line: str) -> None:
    """A line on the console. That nobody reads it any more, as after `| head`, does not end a run."""
    with suppress(OSError):
        print(line, flush=True)
