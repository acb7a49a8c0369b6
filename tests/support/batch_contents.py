"""Small loaders over files of records; their batches as lists that can be compared, and as the text of each document."""

import json
from contextlib import contextmanager
from pathlib import Path

import pytest

from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Loader, best_fit
from torchround.data.formats import files, sources, streams
from torchround.layer import IGNORED_LABEL

TEMPLATE = """\
{%- for message in messages %}
{{- "<|bos|>" + message.role + ":" + message.content + "<|eos|>" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|bos|>assistant:" }}
{%- endif %}
"""


@contextmanager
def reading_limits(**limits):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in limits.items():
            for module in (best_fit, sources, files, streams):
                if hasattr(module, name):
                    patch.setattr(module, name, value)
        yield


def write_lines(path, records):
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("\n".join(lines), errors="surrogateescape")
    return path


def loader_of(source, tokenizer, seq_len=64, batch=2, seed=0, content="text", **keys):
    if isinstance(source, str | Path):
        source = SourceTable(path=str(source), content=content)
    sources = source if isinstance(source, tuple) else (source,)
    return Loader(DataTable(sources=sources, **keys), tokenizer, seq_len, batch, seed)


def pieces_of(source, document):
    pieces, offset = [], 0
    while offset is not None:
        text, offset = source.read(document, offset)
        pieces.append(text)
    return pieces


def texts_of(source, key=None, wrong=None):
    texts, cursor = [], source.first_cursor()
    while (found := source.locate(cursor, key)) is not None:
        document, cursor = found
        try:
            texts.append("".join(pieces_of(source, document)))
        except DataError as error:
            if wrong is None:
                raise
            wrong.append(str(error))
    return texts


def content(batches):
    return [[tensor.tolist() for tensor in batch.tensors()] for batch in batches]


def documents(batches, tokenizer):
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
