"""Patterns of sentences that need a second reading, and what to write instead.

They were found by reading this repository's own docstrings. A text that avoids them is not yet good; a text that needs
them is rare. Only the first paragraph of a docstring is looked at, since most readers stop there.
"""

import ast
import re
from collections.abc import Iterator

from tests.support.source_files import Source

# A function's docstring opens with a verb, a class's with a noun phrase. These words open neither.
OPENING = re.compile(
    r"(of|that|those|what|where|which|whose|how|with|without|as|none|nobody|nothing|for|whatever|whoever|if|only|beside|"
    r"besides|in|on|by|than)\b",
    re.IGNORECASE,
)
PATTERNS = {
    # An actor without a name.
    r"\b(nobody|somebody|someone|whoever|whosoever|whatever)\b": "name the actor or the thing",
    # Pronouns that stand for a noun said elsewhere.
    r"\b(that|those) of (a|an|the|its|their|each|them|this|all)\b": "repeat the noun",
    r"^(that|those|it|they|this|these) (is|are|has|have|was|were)\b": "name the subject",
    # Verbs that say less than the plain one.
    r"\b(go|goes|going|went) on\b": "continues, resumes",
    r"\b(is|are) (none|told|said|nobody's)\b": "say who says what to whom, or 'is not a'",
    r"\b(lies|lay) (in|at|on|behind|before|where)\b": "is",
    # Conditions and relatives.
    r"\bor else\b|\belse (be|would|it|they|the|a)\b": "otherwise",
    r", where (a|an|the|there|that|it|they|one|no|this)\b": "if, when, or a new sentence",
}


def oddities(paragraph: str, is_of_callable: bool) -> Iterator[str]:
    """Yield what is odd about a docstring's first paragraph, with the remedy.

    `is_of_callable`: whether it documents a function or a class, whose first word is checked.
    """
    first = OPENING.match(paragraph)
    if is_of_callable and first:
        yield f"opens with {first[0]!r}: open with a verb, or a noun phrase for a class"
    for pattern, remedy in PATTERNS.items():
        found = re.search(pattern, paragraph, re.IGNORECASE)
        if found:
            yield f"{found[0]!r}: {remedy}"


def odd_docstrings(source: Source) -> Iterator[str]:
    """Yield each odd docstring of a file, once."""
    for owner, line, text in source.docstrings():
        paragraph = " ".join(text.strip().split("\n\n")[0].split())
        is_of_callable = isinstance(owner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        found = list(oddities(paragraph, is_of_callable))
        if found:
            yield f"line {line}: {paragraph[:70]!r} ({'; '.join(found)})"
