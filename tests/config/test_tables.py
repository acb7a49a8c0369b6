"""Each table and key is documented, and tables cannot be changed."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from torchround import config
from torchround.config.key_types import Table
from torchround.config.reference import documentation, page
from torchround.config.validate import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
TABLES = [value for value in vars(config).values() if isinstance(value, type) and issubclass(value, Table)]


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
