"""Prints docs/configuration.md from the tables' docstrings; a test keeps the file equal to it."""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Any, cast

from pydantic_core import PydanticUndefined

from torchround.config.key_types import MAX_INT, Table
from torchround.config.load import show
from torchround.config.optimizer_tables import optimizer_tables
from torchround.config.tables import Config, PlanTable, ShapeTable, SourceTable

PAGE_HEAD = """\
# Configuration

Reference: every key of a run's TOML file. `python -m torchround.config` writes this page from the docstrings of
`torchround/config/`. Do not edit it.

`python train.py --config NAME.toml` looks the file up as given, then in `configs/` of the working directory and of the
repository. One message names every mistake (file, key, type, range, combination) before any work begins, and the exit
code is 2.

**Inheritance.** `base = "other.toml"`, the first line of a file, takes all keys of the other file, which is looked up
beside it, then in `configs/`. A key that is given again replaces the base's whole value. `run.name` is not inherited.
`"none"` clears an optional key: `flavor = "none"`.

**Command line.** Any key can follow the file: `--training.steps 20`, `--engine.update=sync`,
`--data.sources '[{path = "corpus/*.txt"}]'`, `--engine.plan.fused 2`. The value is read as TOML. A bare word that is not
TOML is a string. `--print-config` prints the result.
"""


def page() -> str:
    text = PAGE_HEAD
    for title, table in _tables():
        text += f"\n## {title}\n\n{cleandoc(table.__doc__ or '')}\n"
        schemas = table.model_json_schema()["properties"]
        for key, info in table.model_fields.items():
            is_set = info.default is not PydanticUndefined and info.default is not None
            default = f" (default {show(info.default)})" if is_set else ""
            text += (
                f"\n**`{key}`**: {_describe(schemas[key])}{default}\n\n{cleandoc(info.description or '')}\n"
            )
    return text


def _tables() -> Iterator[tuple[str, type[Table]]]:
    for name, info in Config.model_fields.items():
        if name != "optimizer":
            yield f"`[{name}]`", cast(type[Table], info.annotation)
            continue
        for optimizer, its_table in optimizer_tables().items():
            # A program's own optimizers are not part of this documentation.
            if its_table.__module__.startswith("torchround."):
                yield f'`[{name}], name = "{optimizer}"`', its_table
    yield "`model.shape`", ShapeTable
    yield "Elements of `data.sources` and `validation.sources`", SourceTable
    yield "`engine.plan`", PlanTable


_WORDS = {
    "minimum": "of at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _describe(schema: dict[str, Any]) -> str:
    """Say in words what a JSON schema allows, for example `integer of at least 1 or "auto"`."""
    if "anyOf" in schema:
        return " or ".join(_describe(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(show(choice) for choice in schema.get("enum", [schema.get("const")]))
    if schema.get("type") == "array":
        return f"array, each element {_describe(schema.get('items') or schema['prefixItems'][0])}"
    # The bound of all integers is left out: it matters only to a user who exceeds it.
    bounds = [
        f"{words} {schema[name]}" for name, words in _WORDS.items() if schema.get(name, MAX_INT) != MAX_INT
    ]
    return " ".join([schema.get("type", "table").replace("object", "table"), " and ".join(bounds)]).strip()


if __name__ == "__main__":
    print(page(), end="")
