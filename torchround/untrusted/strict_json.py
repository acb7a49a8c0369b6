"""Parses JSON from untrusted files, and writes it into HTML pages."""

import json
from collections.abc import Callable
from typing import Any

MOST_NESTED = 100
"""Legal nesting of objects and arrays. The files that this program writes and reads nest less than 20 deep."""


def parse_json(text: str | bytes, parse_int: Callable[[str], int] = int) -> Any:
    """Parse a JSON document. Raises `ValueError` if it is not JSON, repeats a name, or is nested too deeply."""
    try:
        content = json.loads(text, object_pairs_hook=_unique_names, parse_int=parse_int)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if is_nested_deeper(content, MOST_NESTED):
        raise ValueError("nested too deeply")
    return content


def parse_size(text: str) -> int:
    """Parse an integer of at most 64 bits: longer ones take time that grows with the square of their digits."""
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**63:
        raise ValueError(f"the integer {text[:30]} is beyond 2**63")
    return number


def is_nested_deeper(content: Any, most: int) -> bool:
    """Return whether dicts and lists are nested more than `most` deep."""
    # Level by level, without recursion: deep content must not exhaust the stack of its own check.
    level = [content] if isinstance(content, (dict, list)) else []
    for _ in range(most):
        inner = (item.values() if isinstance(item, dict) else item for item in level)
        level = [value for values in inner for value in values if isinstance(value, (dict, list))]
        if not level:
            return False
    return True


def page_json(content: Any) -> str:
    """Write JSON for a `<script>` element: `<`, `>` and `&` are escaped, so no name can end it. Numbers must be finite."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Reject duplicate names in an object: readers disagree on which one wins."""
    entries: dict[str, Any] = {}
    for name, value in pairs:
        if name in entries:
            raise ValueError(f"the name {name[:100]!r} occurs twice in one object")
        entries[name] = value
    return entries
