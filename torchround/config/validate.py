"""Turns raw tables into a `Config`, or into one `ConfigError` that lists every mistake in them."""

import logging
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchround.config.errors import ConfigError, nearest, show
from torchround.config.key_types import Table
from torchround.config.optimizer_tables import optimizer_tables, table_for
from torchround.config.tables import Config, PlanTable, ShapeTable, SourceTable
from torchround.planning.update_modes import mode_of, modes_where

logger = logging.getLogger(__name__)

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
        yield (
            "lora.base lora.dora",
            '"bf16", because magnitudes in files are lengths of weights that are not packed',
        )
    if lora.base_cache is not None and lora.base == "bf16":
        yield "lora.base_cache lora.base", "a packed format, whose weights the folder keeps"
    if lora.map_base and lora.base != "bf16" and lora.base_cache is None:
        yield "lora.map_base lora.base lora.base_cache", "a folder whose files hold the packed weights"
    if lora.experts_by_need is True and (lora.base == "bf16" or lora.map_base or config.engine.compile):
        keys = "lora.experts_by_need lora.base lora.map_base engine.compile"
        yield keys, '"auto", or true with a packed base in memory and compile = false'
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
