"""The base of the engine's errors, for rooms below it that raise errors of the same family (`engine/errors.py`)."""


class EngineError(Exception):
    """Base of every error the engine raises on purpose."""


class EngineUsageError(EngineError):
    """The engine was called in an order or with a value it does not allow."""
