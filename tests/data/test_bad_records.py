"""Records that cannot be used, before a run and during it, and names of special tokens in text."""

import json
import random

import pytest
import tokenizers

from tests.support.batch_contents import content, loader_of, write_lines
from tests.support.conversations import answer, question, released, with_templates
from tests.support.vocabularies import FAMILIES, random_text
from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Loader
from torchround.data.document_types import Conversation, Document
from torchround.data.loader import open_sources
from torchround.data.reading_order import DocumentPiece
from torchround.data.tokenising import tokenise

pytestmark = pytest.mark.usefixtures("small_groups")


def until_it_stops(loader, message):
    batches = []
    with pytest.raises(DataError, match=message):
        batches.extend(loader)
    return batches


GOOD = '{"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}'
ASKED = '{"instruction": "q", "output": "a"'


def marked(**marks):
    return json.dumps({"messages": [question("q"), answer("a", **marks)]})


BAD = [
    ("text", "broken", "not valid JSON"),
    ("text", '["no object"]', "a JSON list, not an object"),
    ("text", '{"body": "b", "also": 1}', "no field 'text'; fields: also, body .*source keys: field, content"),
    ("text", '{"text": 7}', "the text is a int"),
    ("text", '{"text": null}', "the text is null"),
    ("text", '{"text": "\udcff"}', r"not valid UTF-8 \(byte 0xff"),
    ("text", '{"a":' * 100_000, "not valid JSON"),
    ("messages", '{"text": "x"}', "no field 'messages' or 'conversations'; fields: text .*source keys: field"),
    ("messages", '{"messages": []}', "the conversation is an empty list, not a list of messages"),
    ("messages", '{"messages": ["x"]}', "message 0 is a str"),
    ("messages", '{"messages": [{"content": "x"}]}', "message 0 has no role; fields: content"),
    ("messages", '{"messages": [{"role": "user", "text": "x"}]}', r"message 0 \(user\): the content is null"),
    ("messages", '{"messages": [{"role": "user", "content": 7}]}', "the content is a int"),
    ("messages", '{"messages": [{"role": "user", "content": "x"}]}', "no message of the assistant; roles: user"),
    ("messages", GOOD.replace("]}", '], "tools": "{"}'), "field 'tools' is not valid JSON"),
    ("messages", GOOD.replace('"user"', '"stranger"'), "error in chat template .*no stranger here"),
    ("messages", GOOD[:-1] + ', "system": 7}', "field 'system' is a int"),
    ("messages", marked(weight=0.5), r"message 1: weight and train are \[0.5, None\]; legal"),
    ("messages", marked(weight="0"), r"weight and train are \['0', None\]; legal"),
    ("messages", marked(train="no"), r"weight and train are \[None, 'no'\]; legal"),
    (
        "messages",
        GOOD.replace('"q"', '[{"type": "text", "text": "q"}, {"type": "image_url"}]'),
        r"message 0 \(user\): the content is a list; legal: .* of parts of type 'text'",
    ),
    ("messages", '{"conversations": [{"from": 7, "value": "v"}]}', "message 0 has no role; fields: from"),
    ("alpaca", '{"instruction": "q"}', "no field 'output'; fields: instruction"),
    ("alpaca", '{"instruction": "q", "outputs": "a"}', "no field 'output'; .*; nearest: outputs"),
    ("alpaca", '{"instruction": "q", "output": null}', r"message 1 \(assistant\): the content is null"),
    ("alpaca", '{"instruction": [7], "output": "a"}', r"message 0 \(user\): the content is a list"),
    ("alpaca", ASKED + ', "input": 7}', "field 'input' is a int"),
    ("alpaca", ASKED + ', "system": ["s"]}', "field 'system' is a list"),
    (
        "prompt_completion",
        '{"prompt": "a", "completions": "b"}',
        "no field 'completion' or 'response' or 'answer'; .*; nearest: completions",
    ),
    ("prompt_completion", '{"prompt": "a", "completion": ""}', "the completion is an empty string"),
    ("prompt_completion", '{"prompt": "a", "completion": null}', "the completion is null, not a list of messages"),
    ("prompt_completion", '{"prompt": "a", "completion": [{"role": "user", "content": "b"}]}', "no message of the"),
    ("tokens", '{"tokens": [259]}', "token ids from 259 to 259; the vocabulary has 0 to 258"),
    ("tokens", '{"tokens": "1 2"}', "not a list of integers"),
    ("tokens", '{"tokens": [1, true]}', "not a list of integers"),
]
GOOD_OF = {"text": '{"text": "a"}', "messages": GOOD, "alpaca": ASKED + "}", "tokens": '{"tokens": [1]}'}
GOOD_OF["prompt_completion"] = '{"prompt": "a", "completion": "b"}'


@pytest.fixture(scope="module")
def sources(tmp_path_factory, chat_tokenizer):
    folder = tmp_path_factory.mktemp("bad")
    tables = []
    for number, (kind, bad, _) in enumerate(BAD):
        path = write_lines(folder / f"{number}.jsonl", [GOOD_OF[kind], bad, GOOD_OF[kind]])
        tables.append(SourceTable(path=str(path), content=kind))
    return open_sources(DataTable(sources=tuple(tables)), chat_tokenizer)


@pytest.mark.parametrize("number", range(len(BAD)))
def test_a_bad_record_is_named_by_file_and_line_and_costs_no_other(sources, number):
    source = sources[number]
    first, bad, last = source.first_documents(3)
    assert source.read(first, 0) == source.read(last, 0)
    with pytest.raises(DataError, match=rf"{number}.jsonl, line 2: .*{BAD[number][2]}"):
        source.read(bad, 0)


@pytest.mark.parametrize(
    ("bad", "workers", "packing"),
    [(0, 0, "best_fit"), (17, 2, "contiguous"), (35, 1, "best_fit"), (59, 0, "contiguous"), (40, 2, "best_fit")],
)
def test_a_run_stopped_by_a_bad_record_continues_as_if_the_record_had_been_left_out_from_the_start(
    tmp_path, tokenizer, bad, workers, packing
):
    lines = ["broken" if n == bad else {"text": f"record {n} " * (n % 13)} for n in range(60)]
    path = write_lines(tmp_path / "x.jsonl", lines)
    keys = {"seed": 5, "epochs": 2, "packing": packing, "num_workers": workers}
    loader = loader_of(path, tokenizer, **keys)
    batches = until_it_stops(loader, rf"line {bad + 1}: not valid JSON.*data.on_bad_record = \"skip\"")
    resumed, skipping = (loader_of(path, tokenizer, on_bad_record="skip", **keys) for _ in range(2))
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert content([*batches, *resumed]) == content(skipping)


def test_skipping_ends_with_an_error_if_every_record_is_bad(tmp_path, tokenizer):
    for lines, message in (
        (["broken", "broken"], "none of its documents holds any text; 2 records were skipped as bad$"),
        (["broken", {"text": "held out"}], r"1 records were skipped as bad; data.validation_fraction 0.9 holds"),
    ):
        path = write_lines(tmp_path / "x.jsonl", lines)
        with pytest.raises(DataError, match=message):
            next(loader_of(path, tokenizer, 64, 1, on_bad_record="skip", validation_fraction=0.9))


def check(path, tokenizer, mode="skip", **source):
    data = DataTable(sources=(SourceTable(path=str(path), **source),), on_bad_record=mode)
    Loader(data, tokenizer, 64, 2, 0, vocab_size=300).check_first_records()


@pytest.mark.parametrize(
    ("record", "content", "message"),
    [
        ({"body": "a"}, "text", r"line 2: no field 'text'; fields: body"),
        ({"texts": "a"}, "text", r"line 2: no field 'text'; fields: texts; nearest: texts"),
        ({"instruction": "a", "output": "b"}, "text", "source keys: field, content"),
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
    loader, resumed = (Loader(data, tokenizer, 16, 2, 0, vocab_size=300) for _ in range(2))
    assert int(next(loader).tokens.max()) == 299
    resumed.load_state_dict(loader.state_dict())
    assert next(resumed).tokens.tolist() == next(loader).tokens.tolist()


@pytest.fixture
def llama3(chat_tokenizers):
    return chat_tokenizers["llama3"]


def tokens_of(tokenizer, content, special_tokens=False):
    piece = DocumentPiece(content, 0, Document("here"), first=True, last=True, special_tokens=special_tokens)
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
        loader_of(SourceTable(path=str(path), special_tokens=on), tokenizer, 3, 1) for on in (True, False)
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
