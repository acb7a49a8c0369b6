"""Loads a configuration: a TOML file, the files it is based on, and overrides from the command line.

`base = "other.toml"` at the top of a file takes that file's keys. The base is looked up beside the file itself and then
in `configs/`. A key that the file gives replaces the base's whole value, including arrays and inline tables. `run.name`
is not taken from a base, so that two files never share a run's folder by accident. Overrides come last.
"""

import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from torchround.config.config import Config
from torchround.config.errors import COMMAND_LINE, config_error, show
from torchround.config.validate import RawConfig, validate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BASE = "base"
"""Key at the top of a file that names the file it is based on."""

MOST_BASES = 20
MOST_BYTES = 2**18
"""Legal size of a file: another kind of file, given by mistake, may be as large as a disk."""

MOST_DOTS = 500
"""Legal dots in a line: TOML's parser keeps every beginning of a dotted key, so memory grows with the square of its length."""

Override = tuple[tuple[str, ...], Any]
"""A key path of a table and at least one key, and its value."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load, merge and check a run's configuration.

    `overrides` are written as on the command line: `["--training.steps", "20", "--engine.update=sync"]`.
    `find_config` looks `path` up. Raises `ConfigError` with every mistake.
    """
    return validate(read_config(path, overrides))


def to_toml(config: Config) -> str:
    """Write the resolved config. Loading the text gives an equal `Config`. Keys without a value are left out."""
    import tomli_w  # here: a benchmark on a bare machine reads configs and writes none

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def users_module(name: str) -> ModuleType:
    """Import a module that a config names, from where Python looks or the working directory. Raises `ImportError`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return import_module(name)


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RawConfig:
    """Read and merge the tables without checking them, with the source of each key."""
    file = find_config(path)
    raw = RawConfig(main_source=str(file))
    _merge_file(raw, file, chain=[])
    # Before the overrides, so that `--run.name` wins over the file's name.
    run = raw.tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or "run")
    for key_path, value in parse_overrides(overrides):
        apply_override(raw, key_path, value)
    return raw


def find_config(path: str | Path) -> Path:
    """Find the file as given, otherwise in `configs/` of the working directory, otherwise in the clone's `configs/`."""
    found, looked_up = _look_up(Path(path), path)
    if found is None:
        raise config_error(str(path), "", f"no such file; looked for {looked_up}")
    return found


def _look_up(first: Path, name: str | Path) -> tuple[Path | None, str]:
    """Try `first`, then `name` in each `configs/`. Returns the file, and every path tried as a text."""
    repository = Path(__file__).parents[2]
    candidates = [first, Path("configs") / name, repository / "configs" / name]
    if first.name and not first.suffix:
        candidates += [candidate.with_name(f"{candidate.name}.toml") for candidate in candidates]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    return found, ", ".join(dict.fromkeys(str(candidate) for candidate in candidates))


def _merge_file(raw: RawConfig, file: Path, chain: list[Path]) -> None:
    """Merge the file's base, then the file. `chain` holds the files that led here, for messages about cycles."""
    data = _read_toml(file)
    if BASE in data:
        _merge_file(raw, _base_file(file, data.pop(BASE), [*chain, file]), [*chain, file])
    # A file with a chain is a base.
    if chain and isinstance(data.get("run"), dict):
        data["run"].pop("name", None)
    for name, table in data.items():
        raw.sources[name] = str(file)
        merged = raw.tables.get(name)
        # A table that is no table at all is kept as given: `validate` says what is wrong with it.
        if not (isinstance(table, dict) and isinstance(merged, dict)):
            raw.tables[name] = table
        else:
            merged.update(table)
        if isinstance(table, dict):
            raw.sources.update({f"{name}.{key}": str(file) for key in table})


def _base_file(file: Path, base: Any, chain: list[Path]) -> Path:
    given = f"given {show(base)}"
    if not isinstance(base, str):
        raise config_error(str(file), BASE, f"{given}; legal: a string, the path of a TOML file")
    if len(chain) > MOST_BASES:
        raise config_error(str(file), BASE, f"{given}; legal: a chain of at most {MOST_BASES} files")
    found, looked_up = _look_up(file.parent / base, base)
    if found is None:
        raise config_error(str(file), BASE, f"{given}, but there is no such file; looked for {looked_up}")
    if found.resolve() in [link.resolve() for link in chain]:
        path = " -> ".join(str(link) for link in [*chain, found])
        raise config_error(str(file), BASE, f"{given}, which is based on this file: {path}")
    return found


def _read_toml(file: Path) -> dict[str, Any]:
    if file.suffix in (".yaml", ".yml", ".json"):
        text = f"a config is TOML, not {file.suffix[1:].upper()}; write key = value"
        raise config_error(str(file), "", text)
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES >> 10} KiB")
        if any(line.count(b".") > MOST_DOTS for line in content.splitlines()):
            raise ValueError(f"a line with over {MOST_DOTS} dots (an array may take several lines)")
        return tomllib.loads(content.decode())
    except UnicodeDecodeError as error:
        raise config_error(str(file), "", f"not UTF-8 text: byte {error.start} is {error.reason}") from None
    except OSError as error:
        raise config_error(str(file), "", f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise config_error(str(file), "", "not valid TOML: nested too deeply") from None
    except ValueError as error:
        quotes = "; a string needs quotes" if str(error).startswith("Invalid value") else ""
        raise config_error(str(file), "", f"not valid TOML: {error}{quotes}") from None


def apply_override(raw: RawConfig, key_path: tuple[str, ...], value: Any) -> None:
    """Put the value of a key path from the command line into the tables."""
    target = raw.tables
    for length, part in enumerate(key_path[:-1], start=1):
        # A value that is no table gives way to one: `--engine.plan.fused 2` replaces the path of a plan.
        inner = target.get(part)
        target[part] = target = inner if isinstance(inner, dict) else {}
        raw.sources.setdefault(".".join(key_path[:length]), COMMAND_LINE)
    target[key_path[-1]] = value
    raw.sources[".".join(key_path)] = COMMAND_LINE


# Overrides: `--table.key value` and `--table.key=value`. A value is read as TOML (`20`, `true`, `[1, 2]`,
# `'[{path = "x"}]'`); a bare word that is not TOML is a string.


def parse_overrides(arguments: Sequence[str]) -> Iterator[Override]:
    """Parse arguments into key paths and values.

    Raises `ConfigError` for an argument that is not an override, has no value, or holds broken TOML.
    """
    rest = list(arguments)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        # An argument that begins with `--` is a value only after `=`.
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, value = "=", rest.pop(0)
        path = tuple(flag.removeprefix("--").split("."))
        if not flag.startswith("--") or len(path) < 2 or not all(path):
            raise config_error(COMMAND_LINE, "", f"given {flag}; a key is written --table.key VALUE")
        if not has_value:
            raise config_error(COMMAND_LINE, flag.removeprefix("--"), f"no value; write {flag} VALUE")
        yield path, parse_value(flag.removeprefix("--"), value)


def parse_value(key: str, text: str) -> Any:
    """Read the text as a TOML value, otherwise as a string. Broken arrays, tables and quoted strings are refused."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError) as error:
        if text.lstrip().startswith(("[", "{", '"', "'")):
            raise config_error(COMMAND_LINE, key, f"given {text}, which is not valid TOML: {error}") from None
        return text
    # A line break in the text could add keys beside the value, or even a table.
    return parsed["value"] if parsed.keys() == {"value"} else text
