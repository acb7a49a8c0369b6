"""Jinja's sandbox for chat templates: no files, no attributes of Python's objects."""

import datetime
import json
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

# `strftime_now` always gives this day, so that a run resumed tomorrow reads the same text as today. Llama 3.1's
# template falls back to it.
FIXED_DAY = datetime.datetime(2024, 7, 26)


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistants' turns for other trainers and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    # A random text would differ after a resume.
    del environment.filters["random"], environment.globals["lipsum"]
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=FIXED_DAY.strftime)
    return environment


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **further: Any) -> str:
    """Write JSON for a model to read: no HTML escapes, and letters of all scripts unescaped."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **further)


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
