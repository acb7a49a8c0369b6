"""The one error of the model room: a configuration that these layers cannot build."""

from collections.abc import Iterable


class ModelConfigError(ValueError):
    """A model setting that is missing, unsupported or contradicts another; the message holds the values."""


def unknown_name(what: str, name: str, known: Iterable[str]) -> ModelConfigError:
    return ModelConfigError(f"unknown {what} {name!r}; known: {', '.join(sorted(known))}")
