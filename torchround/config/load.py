"""Loads a configuration: the command line, a TOML file, the files it is based on, and overrides (docs/configuration.md).

`run.name` is not taken from a base, so that two files never share a run's folder by accident. `validate` turns the raw
tables into a `Config`, or into one `ConfigError` that lists every mistake in them.
"""

import argparse
import json
import logging
import os
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchround.config.key_types import Table
from torchround.config.optimizer_tables import optimizer_tables, table_for
from torchround.config.tables import Config, PlanTable, ShapeTable, SourceTable
from torchround.planning.update_modes import mode_of, modes_where
from torchround.untrusted.terminal import terminal_safe

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

logger = logging.getLogger(__name__)

MOST_BASES = 20
MOST_BYTES = 2**18  # of a file: another kind of file, given by mistake, may be as large as a disk
MOST_DOTS = 500  # in a line: TOML's parser takes memory that grows with the square of a dotted key's length
MOST_MISTAKES = 20  # in one message

GONE_KEYS = {
    "data.max_bad_fraction": 0.01,
    "data.on_changed_files": "stop",
    "data.streams": 1,
    "data.weight_by": "source",
    "engine.grad_dtype": "auto",
    "engine.plan.kept": None,
    "engine.share_links": "auto",
    "engine.slower_for_memory": 0.01,
    "machines.checkpoints": "shared",
    "machines.compress": "none",
    "machines.connections": 4,
    "optimizer.adjust_lr": "match_rms_adamw",
    "optimizer.nesterov": True,
    "trace.memory": False,
    "training.spike_factor": 10.0,
    "training.spike_window": 100,
}
"""Keys of earlier releases, and their defaults. The config that each run saved gives them all."""

INNER_TABLES: dict[str, type[Table]] = {
    "model.shape": ShapeTable,
    "data.sources": SourceTable,
    "validation.sources": SourceTable,
    "engine.plan": PlanTable,
}
"""The tables inside of others, by the key that holds one or an array of them."""

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


@dataclass
class RawConfig:
    """Unchecked tables, after inheritance and overrides. `sources` has the file, or `COMMAND_LINE`, of each `table.key`.

    Messages name `main_source`, the file given with `--config`, for a missing key.
    """

    main_source: str
    tables: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)

    def source_of(self, key: str) -> str:
        """Return the source of a key such as `data.sources[0].path`, or of the nearest key around it."""
        parts = key.replace("[", ".[").split(".")
        prefixes = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
        return next((self.sources[each] for each in prefixes if each in self.sources), self.main_source)


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

    @contextmanager
    def blaming(self, key: str, *mistakes: type[Exception], what: str = "") -> Iterator[None]:
        """Raise such a mistake of the block as the error of a key."""
        try:
            yield
        except mistakes as error:
            raise self.error(key, f"{what}{error}") from error

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
                text = f"given {value}, which is not valid TOML: {error}"
                raise config_error(COMMAND_LINE, key, text) from None
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


# The checks.


def validate(raw: RawConfig) -> Config:
    """Check types, ranges and unknown keys, then what the tables demand of each other. Raises `ConfigError`."""
    # A table that is not given is an empty one, so that messages name its missing keys and not the table.
    given: dict[str, Any] = {**{name: {} for name in Config.model_fields}, **_without_gone_keys(raw)}
    try:
        config = Config.model_validate(given)
    except ValidationError as error:
        raise ConfigError(_mistakes(raw, given, error)) from None
    if config.training.steps is None and config.data.epochs is None:
        config = config.with_steps(1000)
    # Only values of the right types can be compared with each other.
    conflicts, tables = [], config.model_dump(exclude_none=True)
    for named, legal in _conflicts(config):
        keys = named.split()
        values = [tables[table].get(key) for table, _, key in (key.partition(".") for key in keys)]
        shown = " and ".join("nothing" if value in (None, ()) else show(value) for value in values)
        # A key at its default has no source. A dict keeps each source once, in the order of the keys.
        sources = {raw.source_of(key): None for key in keys if key in raw.sources}
        source = " and ".join(sources) or raw.main_source
        conflicts.append(f"{source}: {', '.join(keys)}: given {shown}; legal: {legal}")
    if conflicts:
        raise ConfigError(conflicts)
    return config


def _without_gone_keys(raw: RawConfig) -> dict[str, Any]:
    tables = deepcopy(raw.tables)
    for name, default in GONE_KEYS.items():
        *path, key = name.split(".")
        holder: Any = tables
        for table in path:
            holder = holder.get(table) if isinstance(holder, dict) else None
        if isinstance(holder, dict) and key in holder and (value := holder.pop(key)) != default:
            text = "%s: %s is no longer a key; its value %s is not used"
            logger.warning(text, raw.source_of(name), name, show(value))
    return tables


def _mistakes(raw: RawConfig, given: dict[str, Any], error: ValidationError) -> Iterator[str]:
    found = error.errors()
    # Pydantic reports a union once per member: those are one mistake.
    by_key: dict[str, list[ErrorDetails]] = {}
    for details in found[:MOST_MISTAKES]:
        by_key.setdefault(_key(given, details), []).append(details)
    for key, same in by_key.items():
        # It also reports the table around a wrong key.
        if not any(other.startswith(f"{key}.") for other in by_key):
            yield f"{raw.source_of(key)}: {key}: {_message(raw, key, same)}"
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
    kind, given = same[0]["type"], same[0]["input"]
    if kind == "missing":
        return "missing"
    if kind == "extra_forbidden":
        (outer, _, name), tables = key.rpartition("."), all_keys()
        known = tables.get(outer, tuple(tables))
        if outer == "optimizer":
            known = tuple(table_for(raw.tables["optimizer"]).model_fields)
        elif outer not in ("", *tables):
            known = tuple(INNER_TABLES[outer.partition("[")[0]].model_fields)
        elsewhere = [f"{other}.{name}" for other, keys in tables.items() if name in keys and other != outer]
        hint = f"; nearest: {', '.join(elsewhere)}" if elsewhere else nearest(name, known)
        what = "key, " if outer else "table, " if isinstance(given, dict) else "key outside of a table, "
        where = f" in {outer}" if outer else ""
        return f"unknown {what}given {show(given)}; legal{where}: {', '.join(known)}{hint}"
    if key == "optimizer.name" and isinstance(given, str):  # pydantic knows only the table that was tried
        return (
            f"given {show(given)}; legal: {', '.join(optimizer_tables())}{nearest(given, optimizer_tables())}"
        )
    texts = [re.sub(r"a valid dictionary or instance of \w+", "a table", details["msg"]) for details in same]
    first, *others = dict.fromkeys(texts)
    text = " or ".join([first, *(other.removeprefix("Input should be ") for other in others)])
    hint = nearest(given, re.findall("'(.*?)'", text)) if isinstance(given, str) else ""
    return f"given {show(given)}; {text[0].lower()}{text[1:]}{hint}"


def all_keys() -> dict[str, tuple[str, ...]]:
    tables = {name: cast(type[Table], info.annotation) for name, info in Config.model_fields.items()}
    keys = {name: tuple(table.model_fields) for name, table in tables.items()}
    every_optimizer = (key for table in optimizer_tables().values() for key in table.model_fields)
    return keys | {"optimizer": tuple(dict.fromkeys(every_optimizer))}


def _conflicts(config: Config) -> Iterator[tuple[str, str]]:
    """Check what tables, each legal by itself, demand of each other: yield the keys, and what is legal.

    No file is opened, and no device or model is needed.
    """
    model, tokenizer, training, lora = config.model, config.tokenizer, config.training, config.lora
    clears = 'one of them ("none" clears a key that a base file set)'
    if model.flavor is None and model.shape is None and model.hf_path is None:
        yield "model.flavor model.shape model.hf_path", 'one of them, for example flavor = "debug"'
    if model.family == "auto" and model.hf_path is None:
        yield "model.family model.hf_path", "the name of a family, or the folder whose family is to be found"
    for key in ("flavor", "shape"):
        if model.hf_path is not None and getattr(model, key) is not None:
            yield f"model.{key} model.hf_path", clears
    if tokenizer.path is not None and tokenizer.name is not None:
        yield "tokenizer.path tokenizer.name", clears
    for key in ("map_base", "path", "rslora", "dora", "rank_pattern", "alpha_pattern"):
        if getattr(lora, key) and lora.rank == 0:
            yield f"lora.{key} lora.rank", "a rank above 0, which trains adapters"
        elif key in ("map_base", "path") and getattr(lora, key) and model.hf_path is None:
            yield f"lora.{key} model.hf_path", "the folder of the model that the adapters belong to"
    if lora.base != "bf16" and lora.rank == 0:
        yield "lora.base lora.rank", 'a rank above 0, because trained weights are not packed, or "bf16"'
    if lora.base == "auto" and model.hf_path is None:
        yield "lora.base model.hf_path", "the folder of the release whose format is kept, or a format"
    if lora.base != "bf16" and lora.dora:
        legal = '"bf16", because magnitudes in files are lengths of weights that are not packed'
        yield "lora.base lora.dora", legal
    if lora.base_cache is not None and lora.base == "bf16":
        yield "lora.base_cache lora.base", "a packed format, whose weights the folder keeps"
    if lora.map_base and lora.base != "bf16" and lora.base_cache is None:
        yield "lora.map_base lora.base lora.base_cache", "a folder whose files hold the packed weights"
    if lora.experts_by_need is True and lora.base == "bf16":
        yield "lora.experts_by_need lora.base", '"auto", false, or a packed base such as "nf4"'
    elif lora.experts_by_need is True and lora.map_base:
        yield (
            "lora.experts_by_need lora.map_base",
            '"auto", or a base in memory, because whole stacks are mapped',
        )
    elif lora.experts_by_need is True and config.engine.compile:
        yield (
            "lora.experts_by_need engine.compile",
            '"auto", or compile = false, because compiled layers have whole stacks',
        )
    if config.checkpoint.export == "adapters" and lora.rank == 0:
        yield "checkpoint.export lora.rank", '"weights" if no adapters are trained'
    if config.checkpoint.load == "weights" and config.checkpoint.load_path is None:
        yield "checkpoint.load checkpoint.load_path", "the folder of the checkpoint that holds them"
    # Steps that data.epochs make are checked once they are counted.
    if training.steps is not None and config.lr_schedule.warmup_steps >= training.steps:
        yield "lr_schedule.warmup_steps training.steps", f"a warm-up of at most {training.steps - 1} steps"
    validation = config.validation
    if validation.interval_steps and not validation.sources and not config.data.validation_fraction:
        legal = "at least one source, or a data.validation_fraction above 0, or an interval of 0 for off"
        yield "validation.interval_steps validation.sources data.validation_fraction", legal
    for key in ("keep_best", "patience", "prompts"):
        if getattr(validation, key) and not validation.interval_steps:
            legal = "an interval above 0, which switches validation on"
            yield f"validation.{key} validation.interval_steps", legal
    yield from _update_conflicts(config)


def _update_conflicts(config: Config) -> Iterator[tuple[str, str]]:
    engine, training, optimizer = config.engine, config.training, config.optimizer
    mode = mode_of(engine.update)
    plan = engine.plan if isinstance(engine.plan, PlanTable) else None
    for key, rounds in (("engine.rounds", engine.rounds), ("engine.plan", plan and plan.rounds)):
        if isinstance(rounds, int) and rounds > config.num_micro_batches:
            legal = f"1 to {config.num_micro_batches} rounds, the micro-batches of a step"
            yield f"{key} training.global_batch_size training.micro_batch_size", legal
        if isinstance(rounds, int) and rounds > 1 and mode.updates_by_layer:
            yield f"{key} engine.update", "1 round, because the first gradients would wait for the last round"
    if engine.delay_correction == "predict" and not mode.can_predict:
        delayed = modes_where(lambda mode: mode.can_predict)
        legal = f'"auto" or "none", or update = {delayed}, which has the delay'
        yield "engine.delay_correction engine.update", legal
    elif engine.delay_correction == "predict" and not optimizer.can_predict:
        legal = '"auto" or "none", because the state of this optimizer does not tell its next step'
        yield "engine.delay_correction optimizer.name", legal
    if not mode.updates_by_layer:
        return
    if training.dtype == "float16":
        yield "engine.update training.dtype", '"bfloat16" or "float32": overflows of float16 skip whole steps'
    if training.max_norm and training.clip == "global":
        legal = 'training.clip = "layer", or training.max_norm = 0'
        yield "engine.update training.clip training.max_norm", legal
    if not optimizer.updates_by_layer:
        others = modes_where(lambda mode: not mode.updates_by_layer)
        legal = f"{others}: updates of this optimizer need the devices, which would wait for each gradient"
        yield "engine.update optimizer.name", legal


# Messages.


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
