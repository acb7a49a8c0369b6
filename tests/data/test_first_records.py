"""What is found in a source before the run starts: records that are all unusable, and names of special tokens in text."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.support.vocabularies import FAMILIES, random_text, write
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import DataError, Tokenizer, build_loader, build_tokenizer
from torchround.data.document_types import Conversation, Document
from torchround.data.reading_order import DocumentPiece
from torchround.data.text.chat import ChatTemplate
from torchround.data.tokenising import tokenise

TEMPLATES = Path(__file__).parent / "templates"


def check(path: Path, tokenizer: Tokenizer, mode: str = "skip", **source: Any) -> None:
    data = DataTable(sources=(SourceTable(path=str(path), **source),), on_bad_record=mode)
    build_loader(data, tokenizer, 64, 2, 0, vocab_size=300).check_first_records()


@pytest.mark.parametrize(
    ("record", "source", "message"),
    [
        ({"body": "a"}, {}, r"line 1: no field 'text'; fields: body"),
        ({"texts": "a"}, {}, r"line 1: no field 'text'; fields: texts; nearest: texts"),
        ({"prompt": "a", "completion": "b"}, {}, r'content = "prompt_completion"\?'),
        ({"question": "a", "answer": "b"}, {}, r'content = "prompt_completion"\?'),
        ({"instruction": "a", "output": "b"}, {}, r'content = "alpaca"\?'),
        ({"tokens": [1, 300]}, {"content": "tokens"}, "token ids from 1 to 300; the vocabulary has 0 to 299"),
    ],
)
def test_a_mistake_of_all_records_is_found_before_the_run_even_if_bad_records_are_skipped(
    tmp_path: Path, tokenizer: Tokenizer, record: dict[str, Any], source: dict[str, Any], message: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("\n" + f"{json.dumps(record)}\n" * 20)
    with pytest.raises(DataError, match=r"source '.*x.jsonl': " + f".*{message.replace('line 1', 'line 2')}"):
        check(path, tokenizer, **source)


def test_one_bad_record_at_the_beginning_is_found_only_if_it_would_stop_the_run(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('broken\n{"text": "a"}\n')
    check(path, tokenizer)
    with pytest.raises(DataError, match=r"x.jsonl, line 1: not valid JSON"):
        check(path, tokenizer, "stop")
    path.write_text('{"text": "a"}\nbroken\n')
    check(path, tokenizer, "stop")


def test_token_ids_of_the_models_vocabulary_are_legal_beyond_the_tokenizers(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The model here has 300 tokens, the tokenizer 259."""
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"tokens": [1, 299, *range(70)]}))
    check(path, tokenizer, content="tokens")
    source = SourceTable(path=str(path), content="tokens")
    data = DataTable(sources=(source,), epochs=2, shuffle_sequences=0)
    loader = build_loader(data, tokenizer, 16, 2, 0, vocab_size=300)
    batch = next(loader)
    assert int(batch.tokens.max()) == 299
    resumed = build_loader(data, tokenizer, 16, 2, 0, vocab_size=300)
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed).tokens.tolist() == next(loader).tokens.tolist()


def test_a_parquet_file_without_the_column_is_named_with_the_columns_that_there_are(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    table = pyarrow.table({"instruction": ["a"] * 9, "response": ["b"] * 9})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet, row 1: no field 'text'; fields: instruction, response"):
        check(tmp_path / "x.parquet", tokenizer)
    with_template = TokenizerTable(name="bytes", chat_template=str(tmp_path / "t.jinja"))
    (tmp_path / "t.jinja").write_text(
        "{% for m in messages %}<|bos|>{{ m.role }}:{{ m.content }}<|eos|>{% endfor %}"
        "{% if add_generation_prompt %}<|bos|>assistant:{% endif %}"
    )
    with pytest.raises(DataError, match=r"row 1: no field 'output'; fields: instruction, response"):
        check(tmp_path / "x.parquet", build_tokenizer(with_template), content="alpaca")


# Special tokens in text.


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a vocabulary with BOS and its chat template."""
    folder = tmp_path_factory.mktemp("llama3")
    write(folder, "llama3")
    (folder / "chat_template.jinja").write_text((TEMPLATES / "llama3.jinja").read_text())
    return folder


@pytest.fixture(scope="module")
def llama3(folder: Path) -> Tokenizer:
    return build_tokenizer(TokenizerTable(path=str(folder)))


def tokens_of(tokenizer: Tokenizer, content: Any, special_tokens: bool = False) -> list[int]:
    piece = DocumentPiece(content, 0, 0, Document("here"), first=True, last=True, special_tokens=special_tokens)
    return tokenise(tokenizer, piece).tokens.tolist()


CHAT = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello"}]


def test_a_chat_that_is_already_written_has_the_tokens_that_its_messages_have(llama3: Tokenizer) -> None:
    template = ChatTemplate(llama3)
    written = "".join(span.text for span in template(Conversation(tuple(CHAT))))
    expected = tokens_of(llama3, template(Conversation(tuple(CHAT))))
    assert tokens_of(llama3, written, special_tokens=True) == expected
    # Without the key, names are text: no document can fake a turn.
    as_text = tokens_of(llama3, written)
    assert len(as_text) > 2 * len(expected) and llama3.special_id("<|eot_id|>") not in as_text


def test_text_with_special_tokens_has_the_tokens_of_the_package_tokenizers(folder: Path, llama3: Tokenizer) -> None:
    import tokenizers

    reference = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    generator, special = random.Random(0), list(FAMILIES["llama3"].special)
    for _ in range(300):
        text = "".join(random_text(generator) + generator.choice(special) for _ in range(3)) + "end"
        expected = reference.encode(text, add_special_tokens=False).ids
        begins = [] if expected[0] == llama3.bos_id else [llama3.bos_id]
        assert tokens_of(llama3, text, special_tokens=True) == [*begins, *expected, llama3.eos_id]


def test_bos_and_the_end_of_a_document_are_not_written_twice(tokenizer: Tokenizer) -> None:
    assert tokens_of(tokenizer, "<|bos|>a<|eos|>\n", special_tokens=True) == [256, 97, 257, 10]
    assert tokens_of(tokenizer, "a", special_tokens=True) == [256, 97, 257]


def test_the_key_reaches_the_batches_and_is_part_of_the_position(tmp_path: Path, tokenizer: Tokenizer) -> None:
    (tmp_path / "x.jsonl").write_text(json.dumps({"text": "<|bos|>a<|eos|>"}))
    loaders = [
        build_loader(
            DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl"), special_tokens=value),)), tokenizer, 3, 1, 0
        )
        for value in (True, False)
    ]
    assert next(loaders[0]).tokens.tolist() == [[256, 97, 257]]
    with pytest.raises(DataError, match="as text with special tokens"):
        loaders[1].load_state_dict(loaders[0].state_dict())


def test_names_of_special_tokens_in_text_are_warned_of_once_and_not_with_the_key(
    tmp_path: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    lines = [{"text": "plain"}] * 30 + [{"text": "<|bos|>user: a<|eos|>"}] * 9
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    check(tmp_path / "x.jsonl", tokenizer, special_tokens=True)
    assert caplog.text == ""
    check(tmp_path / "x.jsonl", tokenizer)
    assert caplog.text.count("x.jsonl, line 31 holds <|bos|>, the name of a special token") == 1
    assert caplog.text.count("special_tokens = true") == 1
