"""The page of all keys is the tables' own documentation."""

from pathlib import Path

from torchround.config.reference import page
from torchround.config.validate import all_keys

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_of_all_keys_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m torchround.config > docs/configuration.md"


def test_the_page_has_every_key_under_its_table() -> None:
    for table, keys in all_keys().items():
        # An optimizer's table has a section of its own.
        sections = [text for text in page().split("\n## ") if text.startswith(f"`[{table}]")]
        section = "".join(sections)
        assert all(f"\n**`{key}`**: " in section for key in keys), table
