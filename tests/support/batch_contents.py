"""Small loaders over files of records; their batches as lists that can be compared, and as the text of each document."""

import json
from pathlib import Path

from torchround.config import DataTable, SourceTable
from torchround.data import build_loader
from torchround.layer import IGNORED_LABEL

TEMPLATE = """\
{%- for message in messages %}
{{- "<|bos|>" + message.role + ":" + message.content + "<|eos|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|bos|>assistant:" }}
{%- endif %}
"""


def write_lines(path, records):
    """Write records as JSON Lines; a record that is a string is written as it is."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), errors="surrogateescape")
    return path


def loader_of(source, tokenizer, seq_len=64, batch=2, seed=0, content="text", **keys):
    """Build a loader over one source, a path or a table, or several tables."""
    if isinstance(source, str | Path):
        source = SourceTable(path=str(source), content=content)
    sources = source if isinstance(source, tuple) else (source,)
    return build_loader(DataTable(sources=sources, **keys), tokenizer, seq_len, batch, seed)


def content(batches):
    return [[tensor.tolist() for tensor in batch.tensors()] for batch in batches]


def documents(batches, tokenizer):
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
