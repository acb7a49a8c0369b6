"""The error of a configuration: every mistake in it, in one message for the person who wrote it."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

from torchround.untrusted.terminal import terminal_safe

MODEL_FOLDER = "legal: a local folder with config.json (a name on the Hugging Face hub is not downloaded)"
"""The legal values of `model.hf_path`, for messages."""

COMMAND_LINE = "command line"
"""The source that messages name for a key given as `--table.key value`."""


class ConfigError(ValueError):
    """A configuration that cannot be run. `train.py` prints the text and ends with exit code 2."""

    def __init__(self, mistakes: Iterable[str]) -> None:
        lines = tuple(mistakes)
        heading = (f"{len(lines)} problems in the configuration",) if len(lines) > 1 else ()
        super().__init__(terminal_safe(*heading, *lines))


def config_error(source: str, key: str, message: str) -> ConfigError:
    """Make a `ConfigError` of one mistake: the file or `COMMAND_LINE`, the dotted key or "", and what is legal."""
    return ConfigError([": ".join(part for part in (source, key, message) if part)])


def show(value: Any) -> str:
    """Write a value on one line of a message, shortened."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(given: str, known: Iterable[str]) -> str:
    """Return `; nearest: x` for the known name most like `given`, ignoring case; empty if none is alike."""
    by_lower_case = {name.lower(): name for name in known}
    matches = get_close_matches(given.lower(), by_lower_case, n=1, cutoff=0.6)
    return f"; nearest: {by_lower_case[matches[0]]}" if matches else ""
