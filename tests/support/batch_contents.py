"""Turns batches back into comparable lists, and into the text of each document."""

from collections.abc import Iterable
from typing import Any

from torchround.data import Tokenizer
from torchround.layer import IGNORED_LABEL, MicroBatch

TEMPLATE = """\
{%- for message in messages %}
{{- "<|bos|>" + message.role + ":" + message.content + "<|eos|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|bos|>assistant:" }}
{%- endif %}
"""


def content(batches: Iterable[MicroBatch]) -> list[list[Any]]:
    return [[tensor.tolist() for tensor in batch.tensors()] for batch in batches]


def documents(batches: Iterable[MicroBatch], tokenizer: Tokenizer) -> list[tuple[str, str]]:
    """Return the text and the learnt text of every document, without padding."""
    found = []
    for batch in batches:
        for tokens, labels, _, ids in zip(*batch.tensors(), strict=True):
            for number in ids.unique():
                inside = ids == number
                learnt = labels[inside][labels[inside] != IGNORED_LABEL]
                text = tokenizer.decode(tokens[inside].tolist())
                if not text.startswith("<|pad|>"):
                    found.append((text, tokenizer.decode(learnt.tolist())))
    return found
