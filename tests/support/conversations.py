"""Conversations in the shape of messages, tokenizers with a chat template, and what a template writes of them."""

from dataclasses import replace
from pathlib import Path

from tests.support.vocabularies import train, write
from torchround.config import TokenizerTable
from torchround.data import build_tokenizer
from torchround.data.document_types import Conversation
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.template_files import TemplateSource

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
LOOP = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
# The beginning of a template that gives transformers the day that templates always see here.
SAME_DAY = "{%- macro strftime_now(form) -%}{{ '26 Jul 2024' if 'b' in form else '2024-07-26' }}{%- endmacro -%}"


def question(text, **more):
    return {"role": "user", "content": text, **more}


def answer(text, **more):
    return {"role": "assistant", "content": text, **more}


def call(name, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def small_tokenizer(folder, family):
    write(folder, family, train(family, 300, ("abc",)))
    return build_tokenizer(TokenizerTable(path=str(folder)))


def released(name):
    return (TEMPLATES / f"{name}.jinja").read_text()


def with_templates(tokenizer, text, loss_on="assistant"):
    return ChatTemplate(replace(tokenizer, template=TemplateSource(text)), loss_on)


def written(template, messages, tools=()):
    """Return what the template writes, with learnt text in brackets ⟦ ⟧ and the rest as it is."""
    spans = template(Conversation(tuple(messages), tuple(tools)))
    text = "".join(f"⟦{span.text}⟧" if span.learn else span.text for span in spans)
    return text.replace("⟧⟦", "")


def plain_text(template, messages, tools=()):
    return written(template, messages, tools).replace("⟦", "").replace("⟧", "")


def learnt(template, messages, tools=()):
    return [part.partition("⟧")[0] for part in written(template, messages, tools).split("⟦")[1:]]
