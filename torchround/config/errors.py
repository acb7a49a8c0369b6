"""`ConfigError`: everything wrong with one configuration, as one message for the person who wrote it."""

from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from torchround.config.toml_writer import toml_value
from torchround.untrusted.terminal import terminal_safe

MODEL_FOLDER = "legal: a local folder with config.json (a name on the Hugging Face hub is not downloaded)"
"""What `model.hf_path` may be, for messages."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong: where it was given, which key, what was given, what is legal."""

    source: str
    """The TOML file as the user would find it, or "command line"."""

    key: str
    """Dotted key such as `training.steps`; empty when the file as a whole is at fault."""

    message: str
    """What is legal, and the nearest known key or value where there is one."""

    def __str__(self) -> str:
        return ": ".join(part for part in (self.source, self.key, self.message) if part)


class ConfigError(ValueError):
    """A configuration that cannot be run; `train.py` prints the text and ends with exit code 2."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        heading = (f"{len(self.problems)} problems in the configuration",) if len(self.problems) > 1 else ()
        super().__init__(terminal_safe(*heading, *self.problems))


def config_error(source: str, key: str, message: str) -> ConfigError:
    """A `ConfigError` with a single problem."""
    return ConfigError([Problem(source, key, message)])


def show(value: Any) -> str:
    """A value as it is written in TOML, shortened to what fits on a line of a message."""
    try:
        text = toml_value(value)
    except ValueError:  # Python writes no integer of over 4300 digits, but TOML can give one in base 16
        return "an integer too long to print"
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(given: str, known: Iterable[str]) -> str:
    """`; nearest: x` for the known name that resembles what was given most, whatever its case, or nothing."""
    by_lower_case = {name.lower(): name for name in known}
    matches = get_close_matches(given.lower(), by_lower_case, n=1, cutoff=0.6)
    return f"; nearest: {by_lower_case[matches[0]]}" if matches else ""
