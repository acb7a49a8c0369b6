"""The pages as a whole: each says which shelf it is on, tables stay readable, words and numbers agree between pages."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
SHELVES = ("guide", "how it works", "reference", "results")
MOST_WORDS_IN_A_CELL = 20


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def cells(page: Path) -> list[str]:
    """Return the cells of a page's tables, code blocks left out."""
    prose = re.sub(r"^```.*?^```$", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    return [cell for line in prose.splitlines() if line.startswith("|") for cell in line.strip("|").split(" | ")]


def num_words(cell: str) -> int:
    """Count the words of a cell. Formulas and names in code do not count as words."""
    return len(re.findall(r"[A-Za-z][A-Za-z'-]+", re.sub(r"`[^`]*`", "", cell)))


def test_the_index_lists_every_page_once_with_its_shelf() -> None:
    listed = dict(
        reversed(found)
        for found in re.findall(r"^\| ([\w ]+) \| \[([\w.]+)\]", text_of(DOCS / "README.md"), re.MULTILINE)
    )
    assert set(listed) == {page.name for page in PAGES} - {"README.md"}
    assert set(listed.values()) == set(SHELVES)
    for page, shelf in listed.items():
        opening = text_of(DOCS / page).split("\n\n")[1].lstrip("*").lower()
        assert opening.startswith(shelf), f"{page} should begin with '{shelf}', its shelf in docs/README.md"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_a_table_cell_is_short_enough_to_read(page: Path) -> None:
    assert [cell for cell in cells(page) if num_words(cell) >= MOST_WORDS_IN_A_CELL] == []


def test_a_word_of_the_glossary_is_used() -> None:
    used = " ".join(
        text_of(path).lower() for path in [*(ROOT / "torchround").rglob("*.py"), *PAGES] if path.name != "glossary.md"
    )
    rows = re.findall(r"^\| ([\w ,-]+) \| .+ \| .+ \| .+ \|$", text_of(DOCS / "glossary.md"), re.MULTILINE)
    words = {word for row in rows for word in row.split(", ") if row != "word"}
    assert len(words) > 30
    assert [word for word in sorted(words) if word.lower() not in used] == []


def test_the_numbers_of_the_readme_are_in_the_table_of_results() -> None:
    readme = text_of(ROOT / "README.md")
    table = readme[readme.index("| measured") : readme.index("Each row, its command")]
    numbers = re.findall(r"\d+\.\d+|\b\d{2,3}\b", table)
    results = text_of(DOCS / "benchmarks.md")
    assert len(numbers) > 10
    assert [number for number in numbers if number not in results] == []
