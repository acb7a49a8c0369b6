"""Raw tables -> `Config`, or one `ConfigError` that lists all that is wrong with them."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchround.config.checks import find_conflicts
from torchround.config.config import Config
from torchround.config.errors import ConfigError, Problem, nearest, show
from torchround.config.legal import Slot, describe, locate
from torchround.config.overrides import COMMAND_LINE


@dataclass
class RawConfig:
    """Tables as they were given, after inheritance and overrides, with the source of each key."""

    main_source: str
    """The file that was asked for; it is named for a key that nobody gave."""

    tables: dict[str, Any] = field(default_factory=dict)

    sources: dict[str, str] = field(default_factory=dict)
    """`table.key` -> the file, or `COMMAND_LINE`, that gave it last."""

    def source_of(self, key: str) -> str:
        """Source of a key such as `data.sources[0].path`, or of the nearest key around it."""
        parts = key.replace("[", ".[").split(".")
        for length in range(len(parts), 0, -1):
            source = self.sources.get(".".join(parts[:length]))
            if source is not None:
                return source
        return self.main_source


def validate(raw: RawConfig) -> Config:
    """Check types, ranges and unknown keys, then what the tables demand of each other."""
    empty: dict[str, Any] = {name: {} for name in Config.model_fields}
    try:
        config = Config.model_validate({**empty, **raw.tables})
    except ValidationError as error:
        raise ConfigError(_problems(raw, error)) from None
    conflicts = [_conflict(raw, keys, message) for keys, message in find_conflicts(config)]
    if conflicts:
        raise ConfigError(conflicts)
    return config


def _conflict(raw: RawConfig, keys: tuple[str, ...], message: str) -> Problem:
    given = {raw.source_of(key): None for key in keys if key in raw.sources}
    return Problem(" and ".join(given) or raw.main_source, ", ".join(keys), message)


def _problems(raw: RawConfig, error: ValidationError) -> Iterator[Problem]:
    located = [(*locate(Slot(Config), _path(details)), details) for details in error.errors()]
    inside = {key for key, _, _ in located}
    seen = set()
    for key, slot, details in located:
        is_outer = any(other.startswith(f"{key}.") for other in inside)
        if key not in seen and not is_outer:
            seen.add(key)
            yield Problem(raw.source_of(key), key, _message(raw, key, slot, details))


def _path(details: ErrorDetails) -> tuple[int | str, ...]:
    return details["loc"][:-1] if _is_too_short(details) else details["loc"]


def _is_too_short(details: ErrorDetails) -> bool:
    """Of an array of fixed size, pydantic reports the element that is missing."""
    return details["type"] == "missing" and isinstance(details["loc"][-1], int)


def _message(raw: RawConfig, key: str, slot: Slot, details: ErrorDetails) -> str:
    given = details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown(key, slot, given)
    if details["type"] == "missing" and not _is_too_short(details):
        return f"missing; legal: {describe(slot)}"
    shown = show(list(given) if isinstance(given, tuple) else given)
    text = f"given {shown}; legal: {_legal(key, slot, details)}"
    if isinstance(given, str):
        return text + nearest(given, slot.choices())
    if slot.annotation is str and raw.source_of(key) == COMMAND_LINE:
        text += f"; as a string: --{key} '\"{shown}\"'"
    return text


def _legal(key: str, slot: Slot, details: ErrorDetails) -> str:
    if slot.table() is not None and "." not in key:
        return f"a table, written [{key}]"
    if details["type"] == "less_than_equal":
        return f"{describe(slot)} and at most {details['ctx']['le']}"
    return describe(slot)


def _unknown(key: str, around: Slot, given: Any) -> str:
    table = around.table()
    assert table is not None, f"{key} was refused by a table"
    outer, _, name = key.rpartition(".")
    known = table.model_fields
    hint = nearest(name, known)
    if not outer:
        return f"unknown table; legal: {', '.join(known)}{hint}"
    elsewhere = [f"{other}.{name}" for other, keys in all_keys().items() if name in keys]
    if elsewhere and not hint:
        hint = f"; nearest: {', '.join(elsewhere)}"
    return f"unknown key, given {show(given)}; legal in {outer}: {', '.join(known)}{hint}"


def all_keys() -> dict[str, tuple[str, ...]]:
    """Keys of each table, in the order of the documentation."""
    tables = {name: Slot.of_field(info).table() for name, info in Config.model_fields.items()}
    return {name: tuple(table.model_fields) for name, table in tables.items() if table is not None}
