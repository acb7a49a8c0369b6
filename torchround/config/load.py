"""Loads a configuration: the command line, a TOML file, the files it is based on, and overrides (docs/configuration.md).

`run.name` is not taken from a base, so that two files never share a run's folder by accident.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from torchround.config.errors import COMMAND_LINE, ConfigError, config_error, nearest, show
from torchround.config.tables import Config
from torchround.config.validate import RawConfig, all_keys, validate

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BASES = 20
MOST_BYTES = 2**18  # of a file: another kind of file, given by mistake, may be as large as a disk
MOST_DOTS = 500  # in a line: TOML's parser takes memory that grows with the square of a dotted key's length


@dataclass(frozen=True)
class Options:
    """The parsed command line. `raw` knows the source of each key, for messages."""

    config: Config
    raw: RawConfig
    print_config: bool = False
    dry_run: bool = False

    def error(self, key: str, message: str) -> ConfigError:
        """Make the error of a mistake found after loading, such as a missing folder, in the form of all others."""
        return config_error(self.raw.source_of(key), key, message)

    def unknown_name(self, key: str, given: str, known: Iterable[str]) -> ConfigError:
        legal = " or ".join(map(show, sorted(known)))
        return self.error(key, f"given {show(given)}; legal: {legal}{nearest(given, known)}")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise config_error(COMMAND_LINE, "", message)


def parse_command_line(arguments: Sequence[str]) -> Options:
    """Parse `sys.argv[1:]`. Raises `ConfigError`. `--help` prints the flags and exits with code 0."""
    parser = _Parser(
        usage="python train.py --config NAME.toml [--print-config] [--dry-run] [--table.key VALUE ...]",
        epilog="--table.key VALUE gives any key of a config, for example --training.steps 20. VALUE is TOML; a bare "
        "word is a string. `python -m torchround.config` prints every key.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--config", metavar="NAME.toml", required=True, help="the run; looked up as given, then in configs/")
    add("--print-config", action="store_true", help="print the resolved configuration, then stop")
    add("--dry-run", action="store_true", help="print the plan and the memory it needs, then stop")
    options, rest = parser.parse_known_args(arguments)
    checked = with_overrides(read_config(options.config), parse_overrides(rest))
    return replace(checked, print_config=options.print_config, dry_run=options.dry_run)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Load, merge and check the file that `find_config` finds. Raises `ConfigError` with every mistake.

    `overrides` are written as on the command line: `["--training.steps", "20", "--engine.update=sync"]`.
    """
    return with_overrides(read_config(path), parse_overrides(overrides)).config


def to_toml(config: Config) -> str:
    """Write the resolved config. Loading the text gives an equal `Config`. Keys without a value are left out."""
    import tomli_w  # here: a benchmark on a bare machine reads configs and writes none

    return tomli_w.dumps(config.model_dump(exclude_none=True))


def users_module(name: str) -> ModuleType:
    """Import a module that a config names, from where Python looks or the working directory. Raises `ImportError`."""
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return import_module(name)


def with_overrides(raw: RawConfig, overrides: Iterable[tuple[str, Any]]) -> Options:
    """Put the values of dotted keys into the tables, and check them. Raises `ConfigError` with every mistake."""
    for key, value in overrides:
        _apply_override(raw, key, value)
    return Options(validate(raw), raw)


def read_config(path: str | Path) -> RawConfig:
    """Read and merge the tables without checking them, with the source of each key."""
    file = find_config(path)
    raw = RawConfig(main_source=str(file))
    _merge_file(raw, file)
    # Before the overrides, so that `--run.name` wins over the file's name.
    run = raw.tables.setdefault("run", {})
    if isinstance(run, dict):
        run.setdefault("name", re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem).lstrip("._-") or "run")
    return raw


def find_config(name: str | Path, named_by: Path | None = None) -> Path:
    """Find the file in the working directory (a base: beside the file that it is `named_by`), otherwise in `configs/`."""
    folder = named_by.parent if named_by else Path()
    tried = [each / name for each in (folder, Path("configs"), Path(__file__).parents[2] / "configs")]
    for file in tried:
        if file.is_file():
            return file
    message = f"no such file; looked for {', '.join(dict.fromkeys(map(str, tried)))}"
    raise config_error(str(named_by), "base", message) if named_by else config_error(str(name), "", message)


def _merge_file(raw: RawConfig, file: Path, num_before: int = 0) -> None:
    """Merge the file's base, then the file, which is the base of `num_before` others."""
    data = _read_toml(file)
    if (base := data.pop("base", None)) is not None:
        if not isinstance(base, str) or num_before == MOST_BASES:
            legal = f"legal: the path of a TOML file, and at most {MOST_BASES} files in a chain"
            raise config_error(str(file), "base", f"given {show(base)}; {legal}")
        _merge_file(raw, find_config(base, file), num_before + 1)
    if num_before and isinstance(data.get("run"), dict):
        data["run"].pop("name", None)
    for name, table in data.items():
        raw.sources[name] = str(file)
        merged = raw.tables.get(name)
        # A table that is no table at all is kept as given: `validate` says what is wrong with it.
        if isinstance(table, dict):
            raw.sources.update({f"{name}.{key}": str(file) for key in table})
            table = {**merged, **table} if isinstance(merged, dict) else table
        raw.tables[name] = table


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise ValueError(f"longer than {MOST_BYTES >> 10} KiB")
        if any(line.count(b".") > MOST_DOTS for line in content.splitlines()):
            raise ValueError(f"a line with over {MOST_DOTS} dots (an array may take several lines)")
        return tomllib.loads(content.decode())
    except (OSError, ValueError, RecursionError) as error:
        quotes = "; a string needs quotes" if str(error).startswith("Invalid value") else ""
        raise config_error(str(file), "", f"not valid TOML: {error}{quotes}") from None


def parse_overrides(arguments: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Parse `--table.key value` and `--table.key=value` into dotted keys and values.

    A value is TOML (`20`, `true`, `[1, 2]`, `'[{path = "x"}]'`), otherwise a string. Raises `ConfigError`.
    """
    rest = list(arguments)
    while rest:
        flag, has_value, value = rest.pop(0).partition("=")
        # An argument that begins with `--` is a value only after `=`.
        if not has_value and rest and not rest[0].startswith("--"):
            has_value, value = "=", rest.pop(0)
        key = flag.removeprefix("--")
        if not flag.startswith("--") or "." not in key or not all(key.split(".")):
            names = [f"--{table}.{name}" for table, keys in all_keys().items() for name in keys]
            same = [name for name in names if name.endswith(f".{key.rpartition('.')[2]}")]
            hint = f"; nearest: {', '.join(same)}" if same else nearest(flag, ["--config", *names])
            legal = "legal: --config NAME.toml, --print-config, --dry-run, --help, --table.key VALUE"
            raise config_error(COMMAND_LINE, "", f"unexpected argument {flag}; {legal}{hint}")
        if not has_value:
            raise config_error(COMMAND_LINE, key, f"no value; write {flag} VALUE")
        parsed: dict[str, Any] = {}
        try:
            parsed = tomllib.loads(f"value = {value}")
        except (ValueError, RecursionError) as error:
            if value.lstrip().startswith(("[", "{", '"', "'")):  # a broken array, table or quoted string
                raise config_error(
                    COMMAND_LINE, key, f"given {value}, which is not valid TOML: {error}"
                ) from None
        # A line break in the text could add keys beside the value, or even a table.
        yield key, parsed["value"] if parsed.keys() == {"value"} else value


def _apply_override(raw: RawConfig, key: str, value: Any) -> None:
    parts, target = key.split("."), raw.tables
    for length, part in enumerate(parts[:-1], start=1):
        # A value that is no table gives way to one: `--engine.plan.fused 2` replaces the path of a plan.
        inner = target.get(part)
        target[part] = target = inner if isinstance(inner, dict) else {}
        raw.sources.setdefault(".".join(parts[:length]), COMMAND_LINE)
    target[parts[-1]] = value
    raw.sources[key] = COMMAND_LINE
