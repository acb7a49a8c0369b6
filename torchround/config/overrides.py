"""`--table.key value` and `--table.key=value` -> key paths and TOML values.

A value is read as TOML (`20`, `true`, `[1, 2]`, `'[{path = "x"}]'`); a bare word that is no TOML is a string.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torchround.config.errors import ConfigError, config_error

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

COMMAND_LINE = "command line"
"""Source of a key that was given as `--table.key value`, as messages name it."""


@dataclass(frozen=True)
class Override:
    path: tuple[str, ...]
    """At least a table and a key."""

    value: Any


def parse_overrides(arguments: Sequence[str]) -> Iterator[Override]:
    """Raises `ConfigError` for what is no override, or has no value, or is broken TOML."""
    rest = list(arguments)
    while rest:
        flag, value = take_flag(rest)
        path = tuple(flag.removeprefix("--").split("."))
        if not flag.startswith("--") or len(path) < 2 or not all(path):
            raise _no_override(flag)
        if value is None:
            raise config_error(COMMAND_LINE, flag.removeprefix("--"), f"no value; write {flag} VALUE")
        yield Override(path, parse_value(flag.removeprefix("--"), value))


def take_flag(rest: list[str]) -> tuple[str, str | None]:
    """Remove a flag and its value from the front. What begins with `--` is a value only after `=`."""
    flag, equals, value = rest.pop(0).partition("=")
    if equals:
        return flag, value
    if rest and not rest[0].startswith("--"):
        return flag, rest.pop(0)
    return flag, None


def parse_value(key: str, text: str) -> Any:
    """The text as a TOML value, else as a string; broken arrays, tables and quoted strings are refused."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith(("[", "{", '"', "'")):
            raise config_error(COMMAND_LINE, key, f"given {text}, which is not valid TOML: {error}") from None
        return text
    # A line break could add keys beside the value, or even a table.
    return parsed["value"] if parsed.keys() == {"value"} else text


def _no_override(argument: str) -> ConfigError:
    return config_error(COMMAND_LINE, "", f"given {argument}; a key is written --table.key VALUE")
