"""What is found in a source before the run starts: records that are all unusable, and names of special tokens in text."""

import random

import pytest
import tokenizers

from tests.support.batch_contents import loader_of, write_lines
from tests.support.conversations import answer, question, released, with_templates
from tests.support.vocabularies import FAMILIES, random_text
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, build_loader
from torchround.data.document_types import Conversation, Document
from torchround.data.reading_order import DocumentPiece
from torchround.data.tokenising import tokenise


def check(path, tokenizer, mode="skip", **source):
    data = DataTable(sources=(SourceTable(path=str(path), **source),), on_bad_record=mode)
    build_loader(data, tokenizer, 64, 2, 0, vocab_size=300).check_first_records()


@pytest.mark.parametrize(
    ("record", "content", "message"),
    [
        ({"body": "a"}, "text", r"line 2: no field 'text'; fields: body"),
        ({"texts": "a"}, "text", r"line 2: no field 'text'; fields: texts; nearest: texts"),
        ({"prompt": "a", "completion": "b"}, "text", r'content = "prompt_completion"\?'),
        ({"question": "a", "answer": "b"}, "text", r'content = "prompt_completion"\?'),
        ({"instruction": "a", "output": "b"}, "text", r'content = "alpaca"\?'),
        ({"tokens": [1, 300]}, "tokens", "token ids from 1 to 300; the vocabulary has 0 to 299"),
    ],
)
def test_a_mistake_of_all_records_is_found_before_the_run_even_if_bad_records_are_skipped(
    tmp_path, tokenizer, record, content, message
):
    path = write_lines(tmp_path / "x.jsonl", ["", *[record] * 20])
    with pytest.raises(DataError, match=r"source '.*x.jsonl': " + f".*{message}"):
        check(path, tokenizer, content=content)


def test_one_bad_record_at_the_beginning_is_found_only_if_it_would_stop_the_run(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", ["broken", {"text": "a"}])
    check(path, tokenizer)
    with pytest.raises(DataError, match=r"x.jsonl, line 1: not valid JSON"):
        check(path, tokenizer, "stop")
    check(write_lines(path, [{"text": "a"}, "broken"]), tokenizer, "stop")


def test_token_ids_of_the_models_vocabulary_are_legal_beyond_the_tokenizers(tmp_path, tokenizer):
    """The model here has 300 tokens, the tokenizer 259."""
    path = write_lines(tmp_path / "x.jsonl", [{"tokens": [1, 299, *range(70)]}])
    check(path, tokenizer, content="tokens")
    source = SourceTable(path=str(path), content="tokens")
    data = DataTable(sources=(source,), epochs=2, shuffle_sequences=0)
    loader, resumed = (build_loader(data, tokenizer, 16, 2, 0, vocab_size=300) for _ in range(2))
    assert int(next(loader).tokens.max()) == 299
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed).tokens.tolist() == next(loader).tokens.tolist()


# Special tokens in text.


@pytest.fixture
def llama3(chat_tokenizers):
    return chat_tokenizers["llama3"]


def tokens_of(tokenizer, content, special_tokens=False):
    piece = DocumentPiece(content, 0, 0, Document("here"), first=True, last=True, special_tokens=special_tokens)
    return tokenise(tokenizer, piece).tokens.tolist()


def test_a_chat_that_is_already_written_has_the_tokens_that_its_messages_have(llama3):
    spans = with_templates(llama3, released("llama3"))(Conversation((question("Hi there"), answer("Hello"))))
    written, expected = "".join(span.text for span in spans), tokens_of(llama3, spans)
    assert tokens_of(llama3, written, special_tokens=True) == expected
    # Without the key, names are text: no document can fake a turn.
    as_text = tokens_of(llama3, written)
    assert len(as_text) > len(expected) and llama3.special_id("<|eot_id|>") not in as_text


def test_text_with_special_tokens_has_the_tokens_of_the_package_tokenizers(chat_folders, llama3):
    reference = tokenizers.Tokenizer.from_file(str(chat_folders["llama3"] / "tokenizer.json"))
    generator, special = random.Random(0), list(FAMILIES["llama3"].special)
    for _ in range(100):
        text = "".join(random_text(generator) + generator.choice(special) for _ in range(3)) + "end"
        expected = reference.encode(text, add_special_tokens=False).ids
        begins = [] if expected[0] == llama3.bos_id else [llama3.bos_id]
        assert tokens_of(llama3, text, special_tokens=True) == [*begins, *expected, llama3.eos_id]


def test_bos_and_the_end_of_a_document_are_not_written_twice(tokenizer):
    assert tokens_of(tokenizer, "<|bos|>a<|eos|>\n", special_tokens=True) == [256, 97, 257, 10]
    assert tokens_of(tokenizer, "a", special_tokens=True) == [256, 97, 257]


def test_the_key_reaches_the_batches_and_is_part_of_the_position(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "<|bos|>a<|eos|>"}])
    special, plain = (
        loader_of(SourceTable(path=str(path), special_tokens=value), tokenizer, 3, 1) for value in (True, False)
    )
    assert next(special).tokens.tolist() == [[256, 97, 257]]
    with pytest.raises(DataError, match="as text with special tokens"):
        plain.load_state_dict(special.state_dict())


def test_names_of_special_tokens_in_text_are_warned_of_once_and_not_with_the_key(tmp_path, tokenizer, caplog):
    path = write_lines(tmp_path / "x.jsonl", [{"text": "plain"}] * 30 + [{"text": "<|bos|>user: a<|eos|>"}] * 9)
    check(path, tokenizer, special_tokens=True)
    assert caplog.text == ""
    check(path, tokenizer)
    assert caplog.text.count("x.jsonl, line 31 holds <|bos|>") == 1
    assert caplog.text.count("special_tokens = true") == 1
