"""Writes a config as TOML that can be run again: one section per table, every key, in the tables' order.

Keys without a value are left out, because TOML has no null. Tables inside tables are written inline.
"""

import json
from collections.abc import Mapping
from datetime import date, time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchround.config.config import Config


def to_toml(config: "Config") -> str:
    """Write the resolved config. Loading the text gives an equal `Config`."""
    sections = (_section(name, table) for name, table in config.model_dump(exclude_none=True).items())
    return "\n".join(sections)


def _section(name: str, table: Mapping[str, Any]) -> str:
    lines = [f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items())]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """Write a value, and each table of an array on a line of its own: lines of a file have a limit."""
    if isinstance(value, (list, tuple)) and len(value) > 1 and isinstance(value[0], Mapping):
        return "".join(("[\n", *(f"    {toml_value(item)},\n" for item in value), "]"))
    return toml_value(value)


def toml_value(value: Any) -> str:
    """Write one value on one line, as it appears to the right of `=`. Raises `TypeError` if TOML has no such type."""
    if isinstance(value, bool):  # before int, which bool is too
        return "true" if value else "false"
    if isinstance(value, str):
        return _string(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(toml_value(item) for item in value)}]"
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{_key(key)} = {toml_value(item)}" for key, item in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (date, time)):
        return value.isoformat()
    raise TypeError(f"{value!r} has no form in TOML")


def _key(key: str) -> str:
    bare = key.isascii() and key.replace("_", "").replace("-", "").isalnum()
    return key if bare else _string(key)


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants DEL escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
