"""Parses JSON from untrusted files, and writes it into HTML pages."""

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON document. Raises `ValueError`, also if it is nested too deeply."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def page_json(content: Any) -> str:
    """Write JSON for a `<script>` element: `<`, `>` and `&` are escaped, so no name can end it. Numbers must be finite."""
    text = json.dumps(content, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")
