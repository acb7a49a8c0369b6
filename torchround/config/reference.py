"""Writes the tables' documentation as text: the usage of `train.py` and docs/configuration.md.

`python -m torchround.config` prints the page; a test keeps the file equal to it.
"""

from collections.abc import Iterator
from textwrap import dedent, indent, wrap

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from torchround.config.config import Config, PlanTable
from torchround.config.data_tables import SourceTable
from torchround.config.errors import show
from torchround.config.key_types import KeyType, Table, describe
from torchround.config.model_shape import ShapeTable
from torchround.config.optimizer_tables import OptimizerTable, optimizer_tables

USAGE = """\
usage: python train.py --config NAME.toml [--table.key VALUE ...]

  --config NAME.toml   the run; looked up as given, then in configs/
  --table.key VALUE    any key below, for example --training.steps 20; VALUE is TOML, a bare word is a string
  --print-config       print the resolved configuration as TOML, then stop
  --dry-run            print the plan and the memory it needs, then stop (--print-config: and the configuration)
  --help               print this text
"""

PAGE_HEAD = """\
# Configuration

Reference: every key of a run's TOML file. `python -m torchround.config` writes this page from the docstrings of
`torchround/config/`. Do not edit it.

A run is one TOML file: `python train.py --config NAME.toml`. The name is looked up as given, then in `configs/`
of the working directory and of the repository. One message names every mistake (file, key, type, range, combination)
before any work begins, and the exit code is 2.

**Inheritance.** `base = "other.toml"`, the first line of a file, takes all keys of the other file. That file is
looked up beside the file that names it, then in `configs/`. A key that is given again replaces the base's whole value.
`run.name` is not inherited. `"none"` clears an optional key: `flavor = "none"`.

**Command line.** Any key can be given after the files: `--training.steps 20`, `--engine.update=sync`,
`--data.sources '[{path = "corpus/*.txt"}]'`, `--engine.plan.fused 2`. The value is read as TOML and checked like a
file's. A bare word that is not TOML is a string. `--print-config` prints the result.
"""


def usage() -> str:
    """Write the flags, then each key with what is legal, its default and its documentation."""
    return USAGE + "".join(_usage_table(title, table) for title, table in _tables())


def page() -> str:
    """Write the content of docs/configuration.md."""
    inner: list[tuple[str, type[Table]]] = [
        ("`model.shape`", ShapeTable),
        ("Elements of `data.sources` and `validation.sources`", SourceTable),
        ("`engine.plan`", PlanTable),
    ]
    sections = [(f"`{title}`", table) for title, table in _tables()]
    return PAGE_HEAD + "".join(_page_table(title, table) for title, table in [*sections, *inner])


def _tables() -> Iterator[tuple[str, type[Table]]]:
    """Yield each table with its title. The optimizers' follow each other."""
    for name, info in Config.model_fields.items():
        table = KeyType.of_field(info).table()
        assert table is not None, f"{name} is a table"
        if table is not OptimizerTable:
            yield f"[{name}]", table
            continue
        for optimizer, its_table in optimizer_tables().items():
            # A program's own optimizers are not part of this documentation.
            if its_table.__module__.startswith("torchround."):
                yield f'[{name}], name = "{optimizer}"', its_table


def _usage_table(title: str, table: type[Table]) -> str:
    lines = [f"\n{title}  {_first_line(table)}\n"]
    for key, info in table.model_fields.items():
        lines.append(f"  {key}: {describe(KeyType.of_field(info))}{_default(info)}\n")
        text = " ".join(documentation(info).split())
        lines.append(indent("\n".join(wrap(text, 100)), "      ") + "\n")
    return "".join(lines)


def _page_table(title: str, table: type[Table]) -> str:
    blocks = [f"\n## {title}\n\n{documentation(table)}\n"]
    for key, info in table.model_fields.items():
        legal = f"{describe(KeyType.of_field(info))}{_default(info)}"
        blocks.append(f"\n**`{key}`**: {legal}\n\n{documentation(info)}\n")
    return "".join(blocks)


def documentation(documented: FieldInfo | type[Table]) -> str:
    """Return the docstring of a key or table, without indentation."""
    text = documented.description if isinstance(documented, FieldInfo) else documented.__doc__
    assert text, f"{documented} has a docstring"
    first, _, rest = text.strip().partition("\n")
    return f"{first}\n{dedent(rest)}".strip()


def _first_line(table: type[Table]) -> str:
    return documentation(table).partition("\n")[0]


def _default(info: FieldInfo) -> str:
    if info.default is PydanticUndefined or info.default is None:
        return ""
    return f" (default {show(info.default)})"
