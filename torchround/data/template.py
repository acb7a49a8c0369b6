"""Jinja chat templates, rendered in a sandbox with what released templates expect to find.

`strftime_now` gives one fixed day: a run that is resumed tomorrow reads what it would have read today.
"""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from torchround.data.errors import DataError, TokenizerError
from torchround.data.template_limits import LimitedEnvironment

FIXED_DAY = datetime.datetime(2024, 7, 26)  # the one that Llama 3.1's template falls back to


class GenerationTag(Extension):
    """`{% generation %}` marks assistants' turns for other trainers; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Template:
    """One chat template. `tokens`: names of special tokens that it may ask for, such as `bos_token`.

    Raises `TokenizerError` where it is no Jinja.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        environment = LimitedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = to_json
        environment.globals.update(raise_exception=raise_exception, strftime_now=FIXED_DAY.strftime)
        try:
            self._template = environment.from_string(environment.metered(source))
        except (TemplateError, RecursionError, ValueError) as error:
            raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error
        self._environment = environment
        self._tokens = dict(tokens)

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        """The text of a conversation. Raises `DataError` where the template does, or cannot go on."""
        self._environment.begin()
        try:
            return self._template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
            )
        except Exception as error:  # expressions in a template raise whatever Python raises
            raise DataError(f"error in the chat template: {type(error).__name__}: {error}") from error


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **further: Any) -> str:
    """JSON for a model to read: no HTML escapes, letters of all scripts as they are."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **further)


def raise_exception(message: str) -> NoReturn:
    """What templates call on a conversation that they do not write."""
    raise TemplateError(message)
