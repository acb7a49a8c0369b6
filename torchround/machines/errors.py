"""Errors of a run on several machines that a caller may catch."""


class MachineError(RuntimeError):
    """A fault of a run on several machines: which machine, what happened to it, and what this one waited for.

    `machine` is the rank of the machine at fault, None if it is not known. `waited_for` is empty if this machine
    waited for nothing. A run prints the text and ends with exit code 1.
    """

    def __init__(self, text: str, machine: int | None = None, waited_for: str = "") -> None:
        super().__init__(text)
        self.machine, self.waited_for = machine, waited_for


class MessageError(RuntimeError):
    """A message that this machine did not expect, or cannot tell from the rest of another one."""


class LaunchError(Exception):
    """A launch that cannot become a run: the same message on every machine, and exit code 2."""
