"""Turns raw tables into a `Config`, or into one `ConfigError` that lists every mistake in them."""

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchround.config.config import Config, PlanTable
from torchround.config.conflicts import find_conflicts
from torchround.config.data_tables import SourceTable
from torchround.config.errors import COMMAND_LINE, ConfigError, mistake, nearest, show
from torchround.config.key_types import Table
from torchround.config.optimizer_tables import optimizer_tables, table_for
from torchround.config.tables import ShapeTable
from torchround.config.usual_names import nearest_value, other_way, usual_key

logger = logging.getLogger(__name__)

DEFAULT_STEPS = 1000
"""`training.steps` of a run with neither steps nor `data.epochs`."""

MOST_MISTAKES = 20
"""Mistakes that one message lists."""

GONE_KEYS = {
    "data.on_changed_files": "stop",
    "engine.share_links": "auto",
    "machines.checkpoints": "shared",
    "machines.compress": "none",
    "trace.memory": False,
}
"""Keys of earlier releases, and their defaults. The config that each run saved gives them all."""

INNER_TABLES: dict[str, type[Table]] = {
    "model.shape": ShapeTable,
    "data.sources": SourceTable,
    "validation.sources": SourceTable,
    "engine.plan": PlanTable,
}
"""The tables inside of others, by the key that holds one or an array of them."""


@dataclass
class RawConfig:
    """Unchecked tables, after inheritance and overrides, with the source of each key."""

    main_source: str
    """The file given with `--config`. Messages name it for a missing key."""

    tables: dict[str, Any] = field(default_factory=dict)

    sources: dict[str, str] = field(default_factory=dict)
    """`table.key` -> the file, or `COMMAND_LINE`, that gave its value."""

    def source_of(self, key: str) -> str:
        """Return the source of a key such as `data.sources[0].path`, or of the nearest key around it."""
        parts = key.replace("[", ".[").split(".")
        for length in range(len(parts), 0, -1):
            source = self.sources.get(".".join(parts[:length]))
            if source is not None:
                return source
        return self.main_source


def validate(raw: RawConfig) -> Config:
    """Check types, ranges and unknown keys, then what the tables demand of each other. Raises `ConfigError`."""
    # A table that is not given is an empty one, so that messages name its missing keys and not the table.
    given: dict[str, Any] = {**{name: {} for name in Config.model_fields}, **_without_gone_keys(raw)}
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_mistakes(raw, given, error)) from None
    if config.training.steps is None and config.data.epochs is None:
        config = config.with_steps(DEFAULT_STEPS)
    # Only values of the right types can be compared with each other.
    conflicts = [_conflict(raw, config, keys.split(), legal) for keys, legal in find_conflicts(config)]
    if conflicts:
        raise ConfigError(conflicts)
    return config


def _without_gone_keys(raw: RawConfig) -> dict[str, Any]:
    """Return the tables as this release knows them. What a command line gives stays, and is refused."""
    tables = dict(raw.tables)
    for name, default in GONE_KEYS.items():
        table, _, key = name.partition(".")
        if not isinstance(tables.get(table), dict) or raw.source_of(name) == COMMAND_LINE:
            continue
        tables[table] = dict(tables[table])
        if (value := tables[table].pop(key, default)) != default:
            text = "%s: %s is no longer a key; its value %s is not used"
            logger.warning(text, raw.source_of(name), name, show(value))
    return tables


def _conflict(raw: RawConfig, config: Config, keys: list[str], legal: str) -> str:
    # A key at its default has no source. A dict keeps each source once, in the order of the keys.
    sources = {raw.source_of(key): None for key in keys if key in raw.sources}
    tables = config.model_dump(exclude_none=True)
    values = [tables[table].get(key) for table, _, key in (key.partition(".") for key in keys)]
    shown = " and ".join("nothing" if value in (None, ()) else show(value) for value in values)
    source = " and ".join(sources) or raw.main_source
    return mistake(source, ", ".join(keys), f"given {shown}; legal: {legal}")


def _mistakes(raw: RawConfig, given: dict[str, Any], error: ValidationError) -> Iterator[str]:
    found = error.errors()
    # Pydantic reports a union once per member: those are one mistake.
    by_key: dict[str, list[ErrorDetails]] = {}
    for details in found[:MOST_MISTAKES]:
        by_key.setdefault(_key(given, details), []).append(details)
    for key, same in by_key.items():
        # It also reports the table around a wrong key.
        if not any(other.startswith(f"{key}.") for other in by_key):
            yield mistake(raw.source_of(key), key, _message(raw, key, same))
    if len(found) > MOST_MISTAKES:
        yield f"and {len(found) - MOST_MISTAKES} more"


def _key(given: Any, details: ErrorDetails) -> str:
    """Return the key of an error as a user writes it, such as `data.sources[0].path`.

    Pydantic's path also holds the names of union members, which the given tables do not have.
    """
    key, path = "", details["loc"]
    for part in path:
        is_missing = details["type"] == "missing" and part is path[-1]
        if isinstance(given, dict) and isinstance(part, str) and (part in given or is_missing):
            key, given = f"{key}.{part}".lstrip("."), given.get(part)
        elif isinstance(given, list) and isinstance(part, int):
            key, given = f"{key}[{part}]", given[part] if part < len(given) else None
    return key


def _message(raw: RawConfig, key: str, same: list[ErrorDetails]) -> str:
    first = same[0]
    given = first["input"]
    if first["type"] == "extra_forbidden":
        return _unknown(raw, key, given)
    if first["type"] == "missing":
        return "missing"
    if "." not in key and any(details["type"].startswith(("model", "dict")) for details in same):
        return f"given {show(given)}; legal: a table, written [{key}]"
    texts = [re.sub(r"a valid dictionary or instance of \w+", "a table", details["msg"]) for details in same]
    first_text, *others = dict.fromkeys(text.removeprefix("Value error, ") for text in texts)
    text = " or ".join([first_text, *(other.removeprefix("Input should be ") for other in others)])
    text = f"given {show(given)}; {text[0].lower()}{text[1:]}"
    if isinstance(given, str):
        expected = " ".join(each.get("ctx", {}).get("expected", "") for each in same)
        return text + nearest_value(given, re.findall("'(.*?)'", expected))
    if first["type"] == "string_type" and raw.source_of(key) == COMMAND_LINE:
        text += f"; as a string: --{key} '\"{show(given)}\"'"
    return text


def _unknown(raw: RawConfig, key: str, given: Any) -> str:
    outer, _, name = key.rpartition(".")
    tables = all_keys()
    if outer == "optimizer":
        known: tuple[str, ...] = tuple(table_for(raw.tables["optimizer"]).model_fields)
    elif outer:
        known = tables.get(outer) or tuple(INNER_TABLES[outer.partition("[")[0]].model_fields)
    else:
        known = tuple(tables)
    meant = usual_key(name)
    hint = f"; nearest: {meant}" if meant else other_way(key) or other_way(name) or nearest(name, known)
    # A name that is like no key of this table may be a key of another.
    elsewhere = [f"{other}.{name}" for other, keys in tables.items() if name in keys and other != outer]
    if not outer and not isinstance(given, dict):
        hint = f"; nearest: {', '.join(elsewhere)}" if elsewhere else hint
        return f"given {show(given)} outside of a table; a key belongs below its table's [name]{hint}"
    if not outer:
        return f"unknown table; legal: {', '.join(known)}{hint}"
    if elsewhere and not hint:
        hint = f"; nearest: {', '.join(elsewhere)}"
    others = [show(each) for each, keys in optimizer_tables().items() if name in keys.model_fields]
    if outer == "optimizer" and others:
        hint = f"; it is a key of optimizer.name = {' and '.join(others)}"
    return f"unknown key, given {show(given)}; legal in {outer}: {', '.join(known)}{hint}"


def all_keys() -> dict[str, tuple[str, ...]]:
    """Return the keys of each table, in the order of the documentation."""
    tables = {name: info.annotation for name, info in Config.model_fields.items()}
    keys = {
        name: tuple(table.model_fields)
        for name, table in tables.items()
        if isinstance(table, type) and issubclass(table, Table)
    }
    every_optimizer = (key for table in optimizer_tables().values() for key in table.model_fields)
    return keys | {"optimizer": tuple(dict.fromkeys(every_optimizer))}
