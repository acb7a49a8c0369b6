"""Small real corpora on disk, and loaders over them."""

import json

import pytest

from tests.support.batch_contents import TEMPLATE, loader_of, reading_limits
from tests.support.conversations import small_tokenizer
from torchround.config import SourceTable, TokenizerTable
from torchround.data import build_tokenizer


@pytest.fixture(scope="session")
def tokenizer():
    return build_tokenizer(TokenizerTable(name="bytes"))


@pytest.fixture(scope="session")
def chat_tokenizer(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    refusal = "{% if messages[0].role == 'stranger' %}{{ raise_exception('no stranger here') }}{% endif %}"
    template.write_text(refusal + TEMPLATE)
    return build_tokenizer(TokenizerTable(name="bytes", chat_template=str(template)))


@pytest.fixture
def small_groups():
    with reading_limits(GROUP_SEQUENCES=5):
        yield


@pytest.fixture
def small_blocks(small_groups):
    with reading_limits(BLOCK_RECORDS=6):
        yield


@pytest.fixture(scope="session")
def chat_folders(tmp_path_factory):
    folders = {family: tmp_path_factory.mktemp(family) for family in ("llama3", "qwen3", "gpt_oss")}
    for family, folder in folders.items():
        small_tokenizer(folder, family)
    return folders


@pytest.fixture(scope="session")
def chat_tokenizers(chat_folders):
    return {family: build_tokenizer(TokenizerTable(path=str(folder))) for family, folder in chat_folders.items()}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    for number in range(7):
        (folder / f"note-{number}.txt").write_text(f"note {number}\n" * (3**number % 41))
    (folder / "empty.txt").write_text("")
    (folder / "long.txt").write_text("".join(f"line {number} of the long one, ünïcode\n" for number in range(2000)))
    records = [{"text": f"record {number} " * (number * 7 % 23), "number": number} for number in range(40)]
    lines = [json.dumps(record) for record in records]
    (folder / "records.jsonl").write_text("\n".join(lines[:20] + ["", "   "] + lines[20:]) + "\n\n")
    return folder


@pytest.fixture(scope="session")
def make_loader(corpus, tokenizer):
    def make(folder=corpus, weights=(1.0, 2.5), seq_len=512, global_batch_size=6, seed=0, **keys):
        paths = zip(("*.txt", "records.jsonl"), weights, strict=True)
        sources = tuple(SourceTable(path=str(folder / name), weight=weight) for name, weight in paths)
        return loader_of(sources, tokenizer, seq_len, global_batch_size, seed, **{"shuffle_sequences": 0} | keys)

    return make
