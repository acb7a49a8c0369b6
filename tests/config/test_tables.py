"""Each table by itself: types, ranges, documentation."""

from dataclasses import dataclass

import pytest
from pydantic import ValidationError

from torchround import config
from torchround.config.key_types import KeyType, Table
from torchround.config.reference import documentation

TABLES = [value for value in vars(config).values() if isinstance(value, type) and issubclass(value, Table)]
KEYS = [(table, key) for table in TABLES for key in table.model_fields if table is not config.Config]


@dataclass(frozen=True)
class Wrong:
    table: type[Table]
    values: dict[str, object]


WRONG = [
    Wrong(config.TrainingTable, {"steps": "20"}),
    Wrong(config.TrainingTable, {"steps": True}),
    Wrong(config.TrainingTable, {"steps": 20.0}),
    Wrong(config.TrainingTable, {"steps": 0}),
    Wrong(config.TrainingTable, {"steps": 2**63}),
    Wrong(config.TrainingTable, {"dtype": "float64"}),
    Wrong(config.TrainingTable, {"max_norm": -0.5}),
    Wrong(config.TrainingTable, {"max_norm": float("nan")}),
    Wrong(config.TrainingTable, {"stepps": 3}),
    Wrong(config.AdamWTable, {"lr": True}),
    Wrong(config.AdamWTable, {"lr": "1e-3"}),
    Wrong(config.AdamWTable, {"lr": 0}),
    Wrong(config.AdamWTable, {"lr": float("inf")}),
    Wrong(config.AdamWTable, {"betas": [0.9]}),
    Wrong(config.AdamWTable, {"betas": [0.9, 1.0]}),
    Wrong(config.AdamWTable, {"betas": 0.9}),
    Wrong(config.LRScheduleTable, {"min_lr_factor": 1.5}),
    Wrong(config.LRScheduleTable, {"decay": "exponential"}),
    Wrong(config.EngineTable, {"rounds": 0}),
    Wrong(config.EngineTable, {"rounds": "many"}),
    Wrong(config.EngineTable, {"num_devices": 0}),
    Wrong(config.EngineTable, {"plan": {"forward": [1], "fused": 1}}),
    Wrong(config.EngineTable, {"plan": {"forward": [0], "fused": 1, "backward": []}}),
    Wrong(config.EngineTable, {"compile": 1}),
    Wrong(config.DataTable, {"sources": []}),
    Wrong(config.DataTable, {"sources": ["corpus.txt"]}),
    Wrong(config.DataTable, {"sources": [{"path": "a", "weight": 0}]}),
    Wrong(config.DataTable, {"sources": [{"path": "a"}], "num_workers": -1}),
    Wrong(config.RunTable, {"name": "../elsewhere"}),
    Wrong(config.RunTable, {"name": "two words"}),
    Wrong(config.RunTable, {"name": ""}),
    Wrong(config.RunTable, {"seed": -1}),
    Wrong(config.ModelTable, {"flavor": "debug"}),
    Wrong(config.TokenizerTable, {"name": "words"}),
    Wrong(config.TraceTable, {"steps": [0]}),
    Wrong(config.LoraTable, {"targets": []}),
    Wrong(config.LoraTable, {"dropout": 1.0}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: f"{wrong.table.__name__}-{wrong.values}")
def test_wrong_types_ranges_and_unknown_keys_are_refused(wrong: Wrong) -> None:
    with pytest.raises(ValidationError):
        wrong.table.model_validate(wrong.values)


def test_an_integer_is_legal_for_a_number_and_becomes_a_float() -> None:
    lr = config.AdamWTable(lr=1).lr
    assert (lr, type(lr)) == (1.0, float)


def test_arrays_become_tuples_so_that_tables_can_be_hashed_and_compared() -> None:
    table = config.EngineTable.model_validate({"plan": {"forward": [2, 1], "fused": 1, "backward": [3]}})
    assert table.plan == config.PlanTable(forward=(2, 1), fused=1, backward=(3,))
    assert hash(table) == hash(config.EngineTable(plan=table.plan))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_cannot_be_changed(table: type[Table]) -> None:
    instance = table.model_construct()
    with pytest.raises(ValidationError, match="frozen"):
        setattr(instance, next(iter(table.model_fields)), 1)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_each_table_says_what_it_is_for(table: type[Table]) -> None:
    assert len(documentation(table)) > 20


@pytest.mark.parametrize(("table", "key"), KEYS, ids=lambda part: getattr(part, "__name__", part))
def test_each_key_is_documented_as_sentences(table: type[Table], key: str) -> None:
    text = documentation(table.model_fields[key])
    assert len(text) > 20 and text.endswith(".")


def test_the_tables_and_keys_that_users_and_scripts_rely_on_are_there() -> None:
    promised = {
        "run": {"name", "folder", "seed"},
        "model": {"family", "flavor", "shape", "hf_path"},
        "tokenizer": {"path", "name"},
        "data": {"sources", "shuffle", "num_workers"},
        "training": {"steps", "seq_len", "global_batch_size", "micro_batch_size", "dtype", "max_norm"},
        "engine": {"devices", "num_devices", "device_memory_gib", "update", "rounds", "recompute", "grad_dtype"}
        | {"accumulate_dtype", "plan", "measure_steps", "hang_timeout_s", "compile", "cpu_threads"},
        "optimizer": {"name", "lr", "weight_decay", "state"},
        "lr_schedule": {"warmup_steps", "decay", "min_lr_factor"},
        "checkpoint": {"interval_steps", "keep_latest_k", "load_path"},
        "validation": {"interval_steps", "sources", "max_batches"},
        "lora": {"rank", "alpha", "dropout", "targets", "path"},
        "metrics": {"log_every_steps", "wandb", "wandb_project"},
        "trace": {"steps", "memory"},
        "machines": {"timeout_s", "connections", "compress", "checkpoints", "share_host"},
    }
    tables = {name: KeyType.of_field(info).table() for name, info in config.Config.model_fields.items()}
    assert list(tables) == list(promised)
    missing = {name: promised[name] - set(table.model_fields) for name, table in tables.items() if table}
    assert not any(missing.values()), missing
    assert {"betas", "eps"} <= set(config.AdamWTable.model_fields)
