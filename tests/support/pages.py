"""Python examples of the documentation, as modules that tests work with."""

import re
import sys
from types import ModuleType

from tests.support.processes import ROOT


def example_text(page, containing):
    """Find the one Python example of a page that has this text in it."""
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (found,) = (block for block in blocks if containing in block)
    return found


def example(page, containing):
    name = f"example_of_{page.rpartition('/')[2].removesuffix('.md')}"
    if name not in sys.modules:
        sys.modules[name] = ModuleType(name)  # dataclasses look it up
        exec(compile(example_text(page, containing), page, "exec"), sys.modules[name].__dict__)  # noqa: S102  (our own page)
    return sys.modules[name]
