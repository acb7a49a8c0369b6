"""Each table by itself: types, ranges, documentation."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from torchround import config
from torchround.config import AdamWTable, DataTable, EngineTable, LoraTable, LRScheduleTable, RunTable, TrainingTable
from torchround.config.key_types import Table
from torchround.config.reference import documentation, page
from torchround.config.validate import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TABLES = [value for value in vars(config).values() if isinstance(value, type) and issubclass(value, Table)]
WRONG = [
    (TrainingTable, "steps", ["20", True, 20.0, 0, 2**63]),
    (TrainingTable, "dtype", ["float64"]),
    (TrainingTable, "max_norm", [-0.5, float("nan")]),
    (TrainingTable, "stepps", [3]),
    (AdamWTable, "lr", [True, "1e-3", 0, float("inf")]),
    (AdamWTable, "betas", [[0.9], [0.9, 1.0], 0.9]),
    (LRScheduleTable, "min_lr_factor", [1.5]),
    (LRScheduleTable, "decay", ["exponential"]),
    (EngineTable, "rounds", [0, "many"]),
    (EngineTable, "num_devices", [0]),
    (EngineTable, "plan", [{"forward": [1], "fused": 1}, {"forward": [0], "fused": 1, "backward": []}]),
    (EngineTable, "compile", [1]),
    (DataTable, "sources", [[], ["corpus.txt"], [{"path": "a", "weight": 0}]]),
    (DataTable, "num_workers", [-1]),
    (RunTable, "name", ["../elsewhere", "two words", ""]),
    (RunTable, "seed", [-1]),
    (config.ModelTable, "flavor", ["debug"]),  # without a family
    (config.TokenizerTable, "name", ["words"]),
    (config.TraceTable, "steps", [[0]]),
    (LoraTable, "targets", [[]]),
    (LoraTable, "dropout", [1.0]),
]


@pytest.mark.parametrize(("table", "key", "values"), WRONG)
def test_wrong_types_ranges_and_unknown_keys_are_refused(table, key, values):
    legal = {"sources": [{"path": "a"}]} if table is DataTable else {}
    for value in values:
        with pytest.raises(ValidationError):
            table.model_validate({**legal, key: value})


def test_an_integer_is_legal_for_a_number_and_becomes_a_float():
    lr = AdamWTable(lr=1).lr
    assert (lr, type(lr)) == (1.0, float)


def test_arrays_become_tuples_so_that_tables_can_be_hashed_and_compared():
    table = EngineTable.model_validate({"plan": {"forward": [2, 1], "fused": 1, "backward": [3]}})
    assert table.plan == config.PlanTable(forward=(2, 1), fused=1, backward=(3,))
    assert hash(table) == hash(EngineTable(plan=table.plan))


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.__name__)
def test_tables_cannot_be_changed_and_tables_and_keys_are_documented(table):
    with pytest.raises(ValidationError, match="frozen"):
        setattr(table.model_construct(), next(iter(table.model_fields)), 1)
    fields = [] if table is config.Config else table.model_fields.values()
    assert all(documentation(part) for part in (table, *fields))


def test_the_page_of_all_keys_is_up_to_date_and_has_every_key_under_its_table():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m torchround.config > docs/configuration.md"
    for table, keys in all_keys().items():
        # An optimizer's table has a section of its own.
        section = "".join(text for text in page().split("\n## ") if text.startswith(f"`[{table}]"))
        assert all(f"\n**`{key}`**: " in section for key in keys), table
