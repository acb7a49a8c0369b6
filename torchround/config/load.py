"""TOML file + the files it is based on + overrides -> `Config`.

`base = "other.toml"` at the top of a file takes that file's keys, looked up beside the file itself and then in
`configs/`, as a config is; a key that the file gives replaces the base's whole value, arrays and inline tables included. `run.name` is not taken from a base, so
that two files never share a run's folder by accident. Overrides come last.
"""

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchround.config.errors import ConfigError, config_error, show
from torchround.config.run_config import Config
from torchround.config.validate import RawConfig, validate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

BASE = "base"
"""Key at the top of a file that names the file it is based on."""

MOST_BASES = 20
DEEPEST = 20
"""Nested tables and arrays of a file. The deepest key that there is, is at 4."""


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load, merge and check a run's configuration.

    `overrides` as on the command line: `["--training.steps", "20", "--engine.update=sync"]`. `path` is looked up as
    `find_config` says. Raises `ConfigError` with everything that is wrong.
    """
    return validate(read_config(path, overrides))


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RawConfig:
    """The merged tables before they are checked, with the source of each key."""
    file = find_config(path)
    raw = RawConfig(main_source=str(file))
    _merge_file(raw, file, chain=[])
    run = raw.tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", _run_name(file))
    for override in parse_overrides(overrides):
        _apply(raw, override)
    return raw


def find_config(path: str | Path) -> Path:
    """The file as given, else in `configs/` of the working directory, else in `configs/` beside `torchround/`."""
    found, looked_up = _look_up(Path(path), path)
    if found is None:
        raise config_error(str(path), "", f"no such file; looked for {looked_up}")
    return found


def _look_up(first: Path, name: str | Path) -> tuple[Path | None, str]:
    """`first`, else `name` in `configs/`; and where was looked."""
    repository = Path(__file__).parents[2]
    candidates = [first, Path("configs") / name, repository / "configs" / name]
    found = next((candidate for candidate in candidates if candidate.is_file()), None)
    return found, ", ".join(dict.fromkeys(str(candidate) for candidate in candidates))


def _run_name(file: Path) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or "run"


def _merge_file(raw: RawConfig, file: Path, chain: list[Path]) -> None:
    data = _read_toml(file)
    if BASE in data:
        _merge_file(raw, _base_file(file, data.pop(BASE), [*chain, file]), [*chain, file])
    if chain and isinstance(data.get("run"), dict):
        data["run"].pop("name", None)
    for name, table in data.items():
        raw.sources[name] = str(file)
        merged = raw.tables.get(name)
        if not (isinstance(table, dict) and isinstance(merged, dict)):
            raw.tables[name] = table
        else:
            merged.update(table)
        if isinstance(table, dict):
            raw.sources.update({f"{name}.{key}": str(file) for key in table})


def _base_file(file: Path, base: Any, chain: list[Path]) -> Path:
    if not isinstance(base, str):
        raise config_error(str(file), BASE, f"given {show(base)}; legal: a string, the path of a TOML file")
    if len(chain) > MOST_BASES:
        raise config_error(
            str(file), BASE, f"given {show(base)}; legal: a chain of at most {MOST_BASES} files"
        )
    found, looked_up = _look_up(file.parent / base, base)
    if found is None:
        raise config_error(
            str(file), BASE, f"given {show(base)}, but there is no such file; looked for {looked_up}"
        )
    if found.resolve() in [link.resolve() for link in chain]:
        path = " -> ".join(str(link) for link in [*chain, found])
        raise config_error(str(file), BASE, f"given {show(base)}, which is based on this file: {path}")
    return found


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        data = tomllib.loads(file.read_text(encoding="utf-8"))
        if _is_deeper(data, DEEPEST):
            raise RecursionError
        return data
    except UnicodeDecodeError as error:
        raise config_error(str(file), "", f"not UTF-8 text: byte {error.start} is {error.reason}") from None
    except OSError as error:
        raise config_error(str(file), "", f"cannot be read: {error.strerror}") from None
    except RecursionError:
        raise config_error(str(file), "", "not valid TOML: nested too deeply") from None
    except ValueError as error:
        raise config_error(str(file), "", f"not valid TOML: {error}") from None


def _is_deeper(data: Any, most: int) -> bool:
    """Whether tables and arrays are nested more than `most` deep; what is deeper is read by nobody."""
    level = [data]
    for _ in range(most):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
    return bool(level)


def _apply(raw: RawConfig, override: Override) -> None:
    target = raw.tables
    for length, part in enumerate(override.path[:-1], start=1):
        inner = target.get(part)
        target[part] = target = inner if isinstance(inner, dict) else {}
        raw.sources.setdefault(".".join(override.path[:length]), COMMAND_LINE)
    target[override.path[-1]] = override.value
    raw.sources[".".join(override.path)] = COMMAND_LINE


# `--table.key value` and `--table.key=value` -> key paths and TOML values.
#
# A value is read as TOML (`20`, `true`, `[1, 2]`, `'[{path = "x"}]'`); a bare word that is no TOML is a string.


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
