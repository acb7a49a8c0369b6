"""The commands that users start. They alone know the model families."""


class CommandError(Exception):
    """A command line that a command cannot work with; the message says what is wrong and what is legal."""
