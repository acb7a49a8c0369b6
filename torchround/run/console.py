"""Lines for the console."""

from contextlib import suppress

from torchround.config.harmless import escaped


def say(line: str) -> None:
    """A line on the console, which may quote names of others. That nobody reads it any more, as after `| head`, does not end a run."""
    with suppress(OSError):
        print(escaped(line), flush=True)
