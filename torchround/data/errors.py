"""What can be wrong with the data a user brings; every message names the file, and the line where there is one."""


class DataError(ValueError):
    """A source that is missing, empty or unreadable, or a saved position that belongs to other data."""


class TokenizerError(DataError):
    """No tokenizer is given, or its file is missing, damaged or of a kind that is not supported."""
