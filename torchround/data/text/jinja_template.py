"""Compiles a chat template, a Jinja program, with the functions and filters that released templates use."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from torchround.data.errors import DataError, TokenizerError
from torchround.untrusted.template_sandbox import LimitedEnvironment

# `strftime_now` always gives this day, so that a run resumed tomorrow reads the same text as today. Llama 3.1's
# template falls back to it.
FIXED_DAY = datetime.datetime(2024, 7, 26)


class RenderTemplate(Protocol):
    """A compiled template. `settings` are further variables, and replace special tokens of the same name."""

    def __call__(
        self,
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        """Write a conversation. Raises `DataError` if the template fails or exceeds its limits."""


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistants' turns for other trainers and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the tag by its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, tokens: Mapping[str, str]) -> RenderTemplate:
    """Compile a chat template.

    `tokens`: names of the special tokens that the template may ask for, such as `bos_token`. Raises `TokenizerError`
    if the source is not Jinja.
    """
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=FIXED_DAY.strftime)
    try:
        template = environment.from_string(environment.metered(source))
    except (TemplateError, RecursionError, ValueError) as error:
        raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        messages: Sequence[Any],
        tools: Sequence[Any] | None,
        add_generation_prompt: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        environment.begin()
        variables = {
            **tokens,
            **(settings or {}),
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except Exception as error:  # expressions in a template can raise every Python error
            raise DataError(f"error in the chat template: {type(error).__name__}: {error}") from error

    return render


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **further: Any) -> str:
    """Write JSON for a model to read: no HTML escapes, and letters of all scripts unescaped."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **further)


def raise_exception(message: str) -> NoReturn:
    """Raise the error by which a template refuses a conversation."""
    raise TemplateError(message)
