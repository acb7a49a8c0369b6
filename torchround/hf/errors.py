"""The one error of this room: a Hugging Face folder that cannot be used as it is."""

from torchround.untrusted.terminal import terminal_safe


class HFError(Exception):
    """Something is missing, damaged, or of another model; the message holds the path and the names."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))
