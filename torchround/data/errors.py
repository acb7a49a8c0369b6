"""Errors in the data that a user brings. Each message names the file, and the line if there is one."""

from torchround.untrusted.terminal import terminal_safe


class DataError(ValueError):
    """An error in a source that is missing, empty or unreadable, or in a saved position of other data."""

    def __init__(self, message: object) -> None:
        super().__init__(terminal_safe(message))


class DataFileError(DataError):
    """An error of a file, not of a record: it vanished, changed during the run, or the system could not read it.

    It stops a run whatever `data.on_bad_record` says: leaving out all that is on a lost disk would train on the rest.
    """


def cannot_be_read(path: object, error: OSError) -> DataFileError:
    """Return the error of a file that the system could not read."""
    return DataFileError(f"{path}: cannot be read: {error.strerror or error}")


class TokenizerError(DataError):
    """An error in the choice of a tokenizer, or in its file: missing, damaged or of an unsupported kind."""


class MissingTokenizerError(TokenizerError):
    """The error of a tokenizer path that does not exist. `key` is the config key that gives the path."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key, self.message = key, message
