"""What can be wrong with the data a user brings; every message names the file, and the line where there is one."""

from torchround.untrusted.terminal import terminal_safe


class DataError(ValueError):
    """A source that is missing, empty or unreadable, or a saved position that belongs to other data."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class TokenizerError(DataError):
    """No tokenizer is given, or its file is missing, damaged or of a kind that is not supported."""


class MissingTokenizerError(TokenizerError):
    """There is nothing at the path that `key` gives; key and message apart, for who knows where it was given."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message
