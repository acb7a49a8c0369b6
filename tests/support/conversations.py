"""Conversations in the shape of messages, tokenizers with a chat template, and what a template writes of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.vocabularies import train, write
from torchround.config import TokenizerTable
from torchround.data import Tokenizer, build_tokenizer
from torchround.data.document_types import Conversation
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import TemplateSources

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"

SAME_DAY = "{%- macro strftime_now(form) -%}{{ '26 Jul 2024' if 'b' in form else '2024-07-26' }}{%- endmacro -%}"
"""Beginning of a template that gives transformers the day that templates always see here."""


def question(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **more}


def answer(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def small_tokenizer(folder: Path, family: str) -> Tokenizer:
    """Return a family's tokenizer with the smallest vocabulary, which is quick to train."""
    write(folder, family, train(family, 300, ["abc"]))
    return build_tokenizer(TokenizerTable(path=str(folder)))


def released(name: str) -> str:
    """Return a template that writes what a released one does."""
    return (TEMPLATES / f"{name}.jinja").read_text()


def with_templates(tokenizer: Tokenizer, default: str | None, loss_on: str = "assistant", **more: Any) -> ChatTemplate:
    return ChatTemplate(replace(tokenizer, templates=TemplateSources(default, **more)), loss_on)


def written(template: ChatTemplate, messages: Sequence[Any], tools: Sequence[Any] = (), **settings: Any) -> str:
    """Return what the template writes, with learnt text in brackets ⟦ ⟧ and the rest as it is."""
    spans = template(Conversation(tuple(messages), tuple(tools), settings))
    text = "".join(f"⟦{span.text}⟧" if span.learn else span.text for span in spans)
    return text.replace("⟧⟦", "")


def learnt(template: ChatTemplate, messages: Sequence[Any], tools: Sequence[Any] = ()) -> list[str]:
    """Return the stretches of text that are learnt."""
    return [part.partition("⟧")[0] for part in written(template, messages, tools).split("⟦")[1:]]
