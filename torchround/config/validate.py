"""Turns raw tables into a `Config`, or into one `ConfigError` that lists every mistake in them.

The second half checks what tables demand of each other. It opens no files and needs no devices and no model; the code
that opens a file, a device or a model checks what that demands.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from torchround.config.config import Config, PlanTable
from torchround.config.errors import COMMAND_LINE, ConfigError, mistake, nearest, show
from torchround.config.key_types import KeyType, describe, locate
from torchround.config.optimizer_tables import optimizer_tables, table_for
from torchround.config.usual_names import nearest_value, other_way, usual_key

DEFAULT_STEPS = 1000
"""`training.steps` of a run with neither steps nor `data.epochs`."""

MOST_MISTAKES = 20
"""Mistakes that one message lists."""

Conflict = tuple[tuple[str, ...], str]
"""The keys that cannot be used together, and a message with their values."""


@dataclass
class RawConfig:
    """Unchecked tables, after inheritance and overrides, with the source of each key."""

    main_source: str
    """The file given with `--config`. Messages name it for a missing key."""

    tables: dict[str, Any] = field(default_factory=dict)

    sources: dict[str, str] = field(default_factory=dict)
    """`table.key` -> the file, or `COMMAND_LINE`, that gave its value."""

    digest: str = ""
    """Checksum of what the file and its bases say, before overrides. Comments and the order of keys do not change it."""

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
    empty: dict[str, Any] = {name: {} for name in Config.model_fields}
    try:
        config = Config.model_validate({**empty, **raw.tables})
    except ValidationError as error:
        raise ConfigError(_mistakes(raw, error)) from None
    if config.training.steps is None and config.data.epochs is None:
        config = config.with_steps(DEFAULT_STEPS)
    # Only values of the right types can be compared with each other.
    conflicts = [_conflict(raw, keys, message) for keys, message in find_conflicts(config)]
    if conflicts:
        raise ConfigError(conflicts)
    return config


def _conflict(raw: RawConfig, keys: tuple[str, ...], message: str) -> str:
    # A key at its default has no source. A dict keeps each source once, in the order of the keys.
    given = {raw.source_of(key): None for key in keys if key in raw.sources}
    return mistake(" and ".join(given) or raw.main_source, ", ".join(keys), message)


def _mistakes(raw: RawConfig, error: ValidationError) -> Iterator[str]:
    found = error.errors()
    # Each mistake is compared with all others and with known names: a forged file may have any number of them.
    located = [(*_locate(raw, _path(details)), details) for details in found[:MOST_MISTAKES]]
    # Pydantic also reports the table around a wrong key, and a union once per member: one line per key is enough.
    inside = {key for key, _, _ in located}
    seen = set()
    for key, key_type, details in located:
        is_outer = any(other.startswith(f"{key}.") for other in inside)
        if key not in seen and not is_outer:
            seen.add(key)
            yield mistake(raw.source_of(key), key, _message(raw, key, key_type, details))
    if len(found) > MOST_MISTAKES:
        yield f"and {len(found) - MOST_MISTAKES} more"


def _locate(raw: RawConfig, path: Sequence[int | str]) -> tuple[str, KeyType]:
    """Follow the path of an error. Below `optimizer` the table is the one that the name there chooses."""
    if path == ("optimizer", "name"):
        return "optimizer.name", KeyType(Literal[tuple(optimizer_tables())])
    if path[0] == "optimizer" and len(path) > 1:
        key, key_type = locate(KeyType(table_for(raw.tables["optimizer"])), path[1:])
        return f"optimizer.{key}", key_type
    return locate(KeyType(Config), path)


def _path(details: ErrorDetails) -> tuple[int | str, ...]:
    return details["loc"][:-1] if _is_too_short(details) else details["loc"]


def _is_too_short(details: ErrorDetails) -> bool:
    """Return whether an array of fixed size is too short: pydantic reports its missing element."""
    return details["type"] == "missing" and isinstance(details["loc"][-1], int)


def _message(raw: RawConfig, key: str, key_type: KeyType, details: ErrorDetails) -> str:
    given = details["input"]
    if details["type"] == "extra_forbidden":
        return _unknown(key, key_type, given)
    if details["type"] == "missing" and not _is_too_short(details):
        return f"missing; legal: {describe(key_type)}"
    shown = show(list(given) if isinstance(given, tuple) else given)
    text = f"given {shown}; legal: {_legal(key, key_type, details)}"
    if isinstance(given, str):
        return text + nearest_value(given, key_type.choices())
    if (
        key_type.annotation is str
        and not isinstance(given, list | dict)
        and raw.source_of(key) == COMMAND_LINE
    ):
        text += f"; as a string: --{key} '\"{shown}\"'"
    return text


def _legal(key: str, key_type: KeyType, details: ErrorDetails) -> str:
    if key_type.table() is not None and "." not in key:
        return f"a table, written [{key}]"
    if details["type"] == "less_than_equal":
        return f"{describe(key_type)} and at most {details['ctx']['le']}"
    return describe(key_type)


def _unknown(key: str, around: KeyType, given: Any) -> str:
    table = around.table()
    assert table is not None, f"only a table refuses the unknown key {key}"
    outer, _, name = key.rpartition(".")
    known = table.model_fields
    meant = usual_key(name)
    hint = f"; nearest: {meant}" if meant else other_way(key) or other_way(name) or nearest(name, known)
    # A name that is like no key of this table may be a key of another.
    elsewhere = [f"{other}.{name}" for other, keys in all_keys().items() if name in keys and other != outer]
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
    tables = {name: KeyType.of_field(info).table() for name, info in Config.model_fields.items()}
    keys = {name: tuple(table.model_fields) for name, table in tables.items() if table is not None}
    every_optimizer = (key for table in optimizer_tables().values() for key in table.model_fields)
    return keys | {"optimizer": tuple(dict.fromkeys(every_optimizer))}


# Conflicts: each check yields the keys that cannot be used together and a message with their values.


def find_conflicts(config: Config) -> Iterator[Conflict]:
    """Find what keeps tables, each legal by itself, from being used together."""
    for check in (
        _model,
        _tokenizer,
        _batch,
        _accumulation,
        _rounds,
        _keeping,
        _bounded,
        _lr_schedule,
        _validation,
        _checkpoint,
        _engine,
        _lora,
    ):
        yield from check(config)


def _model(config: Config) -> Iterator[Conflict]:
    table = config.model
    given = {"model.flavor": table.flavor, "model.shape": table.shape, "model.hf_path": table.hf_path}
    if not any(value is not None for value in given.values()):
        message = 'none is given; legal: one of them, for example flavor = "debug"'
        yield tuple(given), message
    for key in ("model.flavor", "model.shape"):
        if given[key] is not None and table.hf_path is not None:
            shown = f'"{table.flavor}"' if key == "model.flavor" else "a table"
            yield (
                (key, "model.hf_path"),
                f'given {shown} and "{table.hf_path}"; legal: one of them ("none" clears a key that a base file set)',
            )


def _tokenizer(config: Config) -> Iterator[Conflict]:
    path, name = config.tokenizer.path, config.tokenizer.name
    if path is not None and name is not None:
        message = (
            f'given "{path}" and "{name}"; legal: one of them ("none" clears a key that a base file set)'
        )
        yield ("tokenizer.path", "tokenizer.name"), message
    if path is None and name is None and config.model.hf_path is None:
        message = 'no tokenizer is given; legal: path, or name = "bytes", or model.hf_path'
        yield ("tokenizer.path", "tokenizer.name", "model.hf_path"), message


def _batch(config: Config) -> Iterator[Conflict]:
    micro, whole = config.training.micro_batch_size, config.training.global_batch_size
    if micro > whole:
        message = f"given {micro} and {whole}; legal: a micro-batch of at most global_batch_size sequences"
        yield ("training.micro_batch_size", "training.global_batch_size"), message
    if whole % config.data.streams:
        message = f"given {config.data.streams} and {whole}; legal: a batch that is a multiple of the streams"
        yield ("data.streams", "training.global_batch_size"), message


def _accumulation(config: Config) -> Iterator[Conflict]:
    dtype = config.training.dtype
    if config.training.fp16_accumulation and dtype != "float16":
        message = f'given true and "{dtype}"; legal: true with "float16"'
        yield ("training.fp16_accumulation", "training.dtype"), message


def _rounds(config: Config) -> Iterator[Conflict]:
    rounds, plan = config.engine.rounds, config.engine.plan
    batch_keys = ("training.global_batch_size", "training.micro_batch_size")
    legal = f"legal: 1 to {config.num_micro_batches}, the number of micro-batches of a step"
    if isinstance(rounds, int) and rounds > config.num_micro_batches:
        yield ("engine.rounds", *batch_keys), f"given {rounds} rounds; {legal}"
    if not isinstance(plan, PlanTable) or plan.rounds is None:
        return
    if plan.rounds > config.num_micro_batches:
        yield ("engine.plan", *batch_keys), f"given {plan.rounds} rounds; {legal}"
    if rounds not in (None, "auto", plan.rounds):
        yield (
            ("engine.rounds", "engine.plan"),
            f'given {rounds} and {plan.rounds}; legal: the same, or rounds = "auto"',
        )


def _keeping(config: Config) -> Iterator[Conflict]:
    setting, plan = config.engine.keep_activations, config.engine.plan
    if setting != "auto" and isinstance(plan, PlanTable) and plan.kept is not None:
        shown = show(list(setting) if isinstance(setting, tuple) else setting)
        message = f'given {shown} and a plan that says what is kept; legal: one of them, with "auto" beside such a plan'
        yield ("engine.keep_activations", "engine.plan"), message


def _bounded(config: Config) -> Iterator[Conflict]:
    engine, training = config.engine, config.training
    if engine.update != "bounded":
        if engine.stale_layers != "auto":
            message = (
                f'given {engine.stale_layers} and "{engine.update}"; legal: "auto", or update = "bounded"'
            )
            yield ("engine.stale_layers", "engine.update"), message
        return
    if training.dtype == "float16":
        yield (
            ("engine.update", "training.dtype"),
            'given "bounded" and "float16", whose overflows skip whole steps; legal: "bfloat16" or "float32"',
        )
    if training.max_norm and training.clip == "global":
        yield (
            ("engine.update", "training.clip", "training.max_norm"),
            f'given "bounded", "global" and {training.max_norm}; legal: training.clip = "layer", or training.max_norm = 0',
        )
    rounds = engine.plan.rounds if isinstance(engine.plan, PlanTable) else None
    for key, value in (("engine.rounds", engine.rounds), ("engine.plan", rounds)):
        if value not in (None, 1, "auto"):
            message = f'given {value} rounds and "bounded", whose first gradients would wait for the last round; legal: 1 round'
            yield (key, "engine.update"), message


def _lr_schedule(config: Config) -> Iterator[Conflict]:
    warmup, steps = config.lr_schedule.warmup_steps, config.training.steps
    # Steps that data.epochs make are checked once they are counted.
    if steps is not None and warmup >= steps:
        message = (
            f"given {warmup} and {steps}; legal: a warm-up of at most steps - 1 = {steps - 1}; "
            f"for example --lr_schedule.warmup_steps {min(steps - 1, steps // 10)}"
        )
        yield ("lr_schedule.warmup_steps", "training.steps"), message


def _validation(config: Config) -> Iterator[Conflict]:
    is_on = config.validation.interval_steps > 0
    if is_on and not config.validation.sources and not config.data.validation_fraction:
        message = (
            f"given {config.validation.interval_steps}, no sources and 0; legal: at least one source, "
            "or a data.validation_fraction above 0, or an interval of 0 for off"
        )
        yield ("validation.interval_steps", "validation.sources", "data.validation_fraction"), message
    table = config.validation
    needing = {"keep_best": table.keep_best, "patience": table.patience, "prompts": list(table.prompts)}
    for key, value in needing.items():
        if value and not is_on:
            yield (
                (f"validation.{key}", "validation.interval_steps"),
                f"given {show(value)} and 0; legal: an interval above 0, which switches validation on",
            )
    sources = [f"{name}.sources" for name in ("data", "validation")]
    of_ids = any(source.content == "tokens" for source in (*config.data.sources, *table.sources))
    if table.prompts and of_ids and config.tokenizer.name == "bytes":
        yield (
            ("validation.prompts", *sources, "tokenizer.name"),
            'given prompts, token ids and "bytes"; legal: the tokenizer that made the ids, because prompts are text',
        )


def _checkpoint(config: Config) -> Iterator[Conflict]:
    if config.checkpoint.load == "weights" and config.checkpoint.load_path is None:
        yield (
            ("checkpoint.load", "checkpoint.load_path"),
            'given "weights" and no folder; legal: the folder of the checkpoint that holds them',
        )


def _engine(config: Config) -> Iterator[Conflict]:
    plan, update, correction = config.engine.plan, config.engine.update, config.engine.delay_correction
    if correction == "predict" and update == "bounded":
        message = (
            'given "predict" and "bounded", which has one copy of the weights: before a prediction could take the place of '
            'what the backward reads, the update itself is due; legal: "auto" or "none"'
        )
        yield ("engine.delay_correction", "engine.update"), message
    elif correction == "predict" and update != "async":
        message = f'given "{correction}" and "{update}"; legal: "auto" or "none", or update = "async", which has the delay'
        yield ("engine.delay_correction", "engine.update"), message
    elif correction == "predict" and not config.optimizer.can_predict:
        name = config.optimizer.name
        message = f'given "{correction}" and "{name}", whose state does not tell its next step; legal: "auto" or "none"'
        yield ("engine.delay_correction", "optimizer.name"), message
    if update == "bounded" and not config.optimizer.updates_by_layer:
        name = config.optimizer.name
        message = (
            f'given "{update}" and "{name}", whose updates need the devices, which would wait for each gradient before the '
            'next forward; legal: "sync" or "async"'
        )
        yield ("engine.update", "optimizer.name"), message
    if isinstance(plan, PlanTable) and sum(plan.forward) != sum(plan.backward):
        message = (
            f"forward stages hold {sum(plan.forward)} layers, backward stages {sum(plan.backward)}; "
            "legal: the same number in both, all layers except the fused ones"
        )
        yield ("engine.plan",), message


def _lora(config: Config) -> Iterator[Conflict]:
    if config.checkpoint.export == "adapters" and config.lora.rank == 0:
        yield (
            ("checkpoint.export", "lora.rank"),
            'given "adapters" and 0; legal: "weights" if no adapters are trained',
        )
    if config.lora.map_base and config.lora.rank == 0:
        yield (
            ("lora.map_base", "lora.rank"),
            "given true and 0; legal: true with adapters (a rank above 0), which freeze the base",
        )
    if config.lora.map_base and config.model.hf_path is None:
        yield (
            ("lora.map_base", "model.hf_path"),
            "given true and no folder; legal: a folder with the base's files",
        )
    if config.lora.path is None:
        return
    if config.lora.rank == 0:
        yield (
            ("lora.path", "lora.rank"),
            f'given "{config.lora.path}" and 0; legal: the rank of those adapters',
        )
    elif config.model.hf_path is None:
        message = f'given "{config.lora.path}" and no folder; legal: the weights that the adapters belong to'
        yield ("lora.path", "model.hf_path"), message
