"""How the repository reads: sizes, names with one meaning, plain English, and no citation of a file that is not there.

Each rule is tried once on a planted offence. Rules about one file take a `Source`; rules about all take a list of them.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import THOROUGH_PLACES
from tests.support.plain_english import odd_docstrings
from tests.support.source_files import ROOT, Source, everything, everything_run, offences, product

# Sizes: a stranger finds the way if each file is one idea and each function fits on a screen.
MOST_LINES, MOST_FUNCTION_LINES = 600, 60
MOST_ODD_PERCENT = 2.0
OPEN_ENDS = ("TODO", "FIXME", "XXX", "NotImplementedError", "pytest.skip", "skipif", "xfail", "importorskip")
# Each package may have a file of these names.
SHARED_STEMS = {"__init__", "__main__", "config", "layers", "errors"}


def opens_with_a_docstring_and_stays_short(source: Source) -> Iterator[str]:
    if source.num_lines >= MOST_LINES:
        yield f"{source.num_lines} lines, {MOST_LINES} is the limit"
    if source.text and not ast.get_docstring(source.tree):
        yield "no docstring"


def has_no_function_longer_than_a_screen(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= MOST_FUNCTION_LINES:
            yield f"line {node.lineno}: {node.name} has over {MOST_FUNCTION_LINES} lines"


def gives_each_assert_a_message(source: Source) -> Iterator[str]:
    nodes = (node for node in ast.walk(source.tree) if isinstance(node, ast.Assert))
    yield from (f"line {node.lineno}: assert without a message" for node in nodes if not node.msg)


def swallows_no_error(source: Source) -> Iterator[str]:
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else ""
            passes = all(isinstance(step, ast.Pass) for step in node.body)
            if not caught or (passes and caught in ("Exception", "BaseException")):
                yield f"line {node.lineno}: except {caught}"


# Tests on an accelerator need a card, or a compiler to build the simulated one. Tests of a page need a browser, tests of a
# network the right to make one.
MAY_SKIP = {
    (f"tests/{place}.py", "pytest.skip") for place in ("accelerator/conftest", "support/browser", "support/namespaces")
}


def leaves_nothing_open_or_skipped(source: Source) -> Iterator[str]:
    for word in OPEN_ENDS:
        if word in source.text and (source.name, word) not in MAY_SKIP:
            yield word


def calls_only_float32_weights_master(source: Source) -> Iterator[str]:
    """Everywhere in the field "master weights" are the float32 copy; 16-bit copies are device weights."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ClassDef) and "master" in node.name.lower():
            yield f"line {node.lineno}: class {node.name}"


# Documents of the work on this repository that are not part of it.
FOREIGN_DOCUMENTS = re.compile(r"\b(?:DESIGN|FIGURES|HOUSE|STYLE|NEXT)\b(?!\.json)")
PATH = re.compile(r"(?<![\w/.<{-])((?:[\w-]+/)*[\w-]+\.(?:py|md|toml|sh))\b(?!\()")
# Names that stand for a user's own file.
USERS_FILES = {"config.toml", "NAME.toml", "other.toml", "run.toml", "small.toml", "tiny.toml", "child.toml"}


def cites_only_files_that_are_there(source: Source) -> Iterator[str]:
    texts = [*source.comments(), *((line, text) for _, line, text in source.docstrings())]
    for line, text in texts:
        yield from (f"line {line}: cites {found}" for found in FOREIGN_DOCUMENTS.findall(text))
        for path in PATH.findall(text):
            if Path(path).name not in USERS_FILES and path not in ENDINGS:
                yield f"line {line}: there is no {path}"


FOLDERS = ("torchround", "torchround/models", "models", "tests", "scripts", "benchmarks", "docs", "configs", ".ci")


def _endings() -> frozenset[str]:
    """Return every path of the repository, with each of its endings: `docs/data.md` and `data.md`."""
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in [*found, *ROOT.iterdir()]]
    return frozenset("/".join(part[start:]) for part in parts for start in range(len(part)))


ENDINGS = _endings()


def public_classes_of_one_name(checked: list[Source]) -> list[str]:
    places = defaultdict(list)
    for source in checked:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(source.name)
    return [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]


def files_of_one_name(checked: list[Source]) -> list[str]:
    places = defaultdict(list)
    for source in checked:
        places[source.stem].append(source.name)
    twice = {stem: found for stem, found in places.items() if len(found) > 1 and stem not in SHARED_STEMS}
    return [f"{stem}: {', '.join(found)}" for stem, found in twice.items()]


def odd_percent(checked: list[Source]) -> float:
    num_docstrings = sum(1 for source in checked for _ in source.docstrings())
    return 100 * len(offences(checked, odd_docstrings)) / num_docstrings


def other_files() -> list[Source]:
    """Read every file except this one, which holds the offences that the rules look for."""
    return [source for source in everything() if source.name != "tests/test_the_house.py"]


def test_a_file_opens_with_what_it_is_for_and_stays_short() -> None:
    assert offences(everything(), opens_with_a_docstring_and_stays_short) == []


def test_no_function_is_longer_than_a_screen() -> None:
    assert offences(everything(), has_no_function_longer_than_a_screen) == []


def test_an_invariant_says_what_was_expected() -> None:
    assert offences(everything_run(), gives_each_assert_a_message) == []


def test_no_error_is_swallowed() -> None:
    assert offences(everything_run(), swallows_no_error) == []


def test_nothing_is_left_open_or_skipped() -> None:
    assert offences(other_files(), leaves_nothing_open_or_skipped) == []


def test_master_means_float32() -> None:
    assert offences(product(), calls_only_float32_weights_master) == []


def test_no_file_is_cited_that_is_not_in_the_repository() -> None:
    assert offences(other_files(), cites_only_files_that_are_there) == []


def test_no_page_cites_a_document_that_is_not_in_the_repository() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [
        f"{page.name}: {match[0]}" for page in pages for match in FOREIGN_DOCUMENTS.finditer(page.read_text("utf-8"))
    ]
    assert found == []


def test_a_public_class_name_has_one_meaning() -> None:
    assert public_classes_of_one_name(product()) == []


def test_a_file_name_has_one_meaning() -> None:
    assert files_of_one_name(product()) == []


def test_every_place_of_thorough_tests_exists() -> None:
    assert all((ROOT / place).exists() for place in THOROUGH_PLACES)


def test_docstrings_are_plain_english() -> None:
    for checked in (product(), other_files()):
        assert odd_percent(checked) < MOST_ODD_PERCENT, "\n".join(offences(checked, odd_docstrings))


# Each rule finds its offence.

LONG_FUNCTION = '"""Doc."""\n\n\ndef long() -> None:\n' + "    pass\n" * MOST_FUNCTION_LINES
EXAMPLES: list[tuple[Callable[[Source], Iterator[str]], str, str]] = [
    (opens_with_a_docstring_and_stays_short, "torchround/x.py", "x = 1\n"),
    (opens_with_a_docstring_and_stays_short, "torchround/x.py", '"""Doc."""\n' * MOST_LINES),
    (has_no_function_longer_than_a_screen, "torchround/x.py", LONG_FUNCTION),
    (gives_each_assert_a_message, "torchround/x.py", "assert x\n"),
    (swallows_no_error, "torchround/x.py", "try:\n    f()\nexcept Exception:\n    pass\n"),
    (swallows_no_error, "torchround/x.py", "try:\n    f()\nexcept:\n    g()\n"),
    (leaves_nothing_open_or_skipped, "tests/x.py", "# TODO: the rest\n"),
    (leaves_nothing_open_or_skipped, "tests/x.py", "import pytest\npytest.skip('no GPU')\n"),
    (calls_only_float32_weights_master, "torchround/x.py", "class MasterCopy:\n    pass\n"),
    (cites_only_files_that_are_there, "torchround/x.py", "# DESIGN section 7\n"),
    (cites_only_files_that_are_there, "torchround/x.py", '"""See docs/not_a_page.md."""\n'),
    (cites_only_files_that_are_there, "torchround/x.py", "# As `not_a_module.py` does.\n"),
    (odd_docstrings, "torchround/x.py", 'def f():\n    """Of a batch, its length."""\n'),
    (odd_docstrings, "torchround/x.py", 'class A:\n    """Position that nobody reads."""\n'),
    (odd_docstrings, "torchround/x.py", 'x = 1\n"""The step, where there is one."""\n'),
    (odd_docstrings, "torchround/x.py", '"""A run that goes on."""\n'),
]


# A function's own text holds its address, which differs between the processes of pytest-xdist.
@pytest.mark.parametrize(
    ("rule", "name", "text"), EXAMPLES, ids=[f"{rule.__name__}-{text[:40]!r}" for rule, _, text in EXAMPLES]
)
def test_a_rule_about_a_file_finds_a_planted_offence(
    rule: Callable[[Source], Iterator[str]], name: str, text: str
) -> None:
    assert offences([Source(name, text)], rule) != []


def test_the_rules_about_all_files_find_planted_offences() -> None:
    twins = [
        Source("torchround/a/x.py", "class A:\n    pass\n\n\n"),
        Source("torchround/b/x.py", "class A:\n    pass\n"),
    ]
    assert public_classes_of_one_name(twins) == ["A: torchround/a/x.py, torchround/b/x.py"]
    assert files_of_one_name(twins) == ["x: torchround/a/x.py, torchround/b/x.py"]
    odd, plain = '"""Nobody knows."""\n', '"""Store of weights."""\n'
    assert odd_percent([Source("a.py", odd), Source("b.py", plain)]) == 50.0
