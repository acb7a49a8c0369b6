"""The repository's Python files as rules see them: name, text and syntax tree."""

import ast
import io
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = ("train.py", "scripts", "benchmarks")
# A search does not follow the link from the package to the models, so they are named.
PACKAGE = ("torchround", "torchround/models")


@dataclass(frozen=True)
class Source:
    """One Python file. `name` is its path from the repository's root."""

    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parse the text as Python 3.10, the oldest version that the package supports."""
        return ast.parse(self.text, feature_version=(3, 10))

    @property
    def num_lines(self) -> int:
        """Count the lines."""
        return len(self.text.splitlines())

    @property
    def stem(self) -> str:
        """Return the file's name without its folder and `.py`."""
        return Path(self.name).stem

    @property
    def module(self) -> str:
        """Return the dotted name under which the file is imported."""
        return self.name.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    @property
    def room(self) -> str:
        """Return the package or module below `torchround` that the file belongs to; empty for other files."""
        parts = self.name.split("/")
        return parts[1].removesuffix(".py") if parts[0] == "torchround" else ""

    def docstrings(self) -> Iterator[tuple[ast.AST, int, str]]:
        """Yield (owner, line, text) of every docstring, those under attributes and constants included."""
        for node in ast.walk(self.tree):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            for before, statement in zip([None, *body], body, strict=False):
                is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
                if not is_text or not isinstance(statement.value.value, str):
                    continue
                owner = node if before is None else before
                yield owner, statement.lineno, statement.value.value

    def comments(self) -> Iterator[tuple[int, str]]:
        """Yield (line, text) of every comment."""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string


Rule = Callable[[Source], Iterator[str]]
"""Yields the offences of one file, each as a text that names the line."""


@cache
def sources(*parts: str) -> list[Source]:
    """Read the Python files in folders, or single files, named from the root. Read once per process."""
    paths = {path for part in parts for path in [ROOT / part, *(ROOT / part).rglob("*.py")] if path.is_file()}
    return [Source(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in sorted(paths)]


def library() -> list[Source]:
    """Read the package."""
    return sources(*PACKAGE)


def product() -> list[Source]:
    """Read the package and `train.py`: what the measures of size and language count."""
    return sources(*PACKAGE, "train.py")


def everything_run() -> list[Source]:
    """Read the package and every program."""
    return sources(*PACKAGE, *PROGRAMS)


def everything() -> list[Source]:
    """Read every Python file, tests included."""
    return sources(*PACKAGE, *PROGRAMS, "tests")


def offences(checked: list[Source], rule: Rule) -> list[str]:
    """Apply a rule to files. Returns all offences, each with its file."""
    assert checked, "a rule over no files holds for nothing"
    return [f"{source.name}: {offence}" for source in checked for offence in rule(source)]
