"""JSON arrays, content parts, and prompts with their completions: against what was written, and what is learnt."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import documents, loader_of, reading_limits, texts_of
from tests.support.conversations import answer, question
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.formats.streams import open_source


def opened(path, **keys):
    return open_source(SourceTable(path=str(path), **keys))


def read_all(source):
    read = texts_of(source, wrong=(wrong := []))
    assert len(read) + len(wrong) == source.count()
    return read, wrong


TEXTS = st.text(st.characters(codec="utf-8"), max_size=12)
ROWS = st.lists(st.fixed_dictionaries({"text": TEXTS, "b]": TEXTS | st.lists(st.integers())}), min_size=1, max_size=9)


@settings(max_examples=30, deadline=None)
@given(rows=ROWS, indent=st.sampled_from([None, 0, 3]), ascii=st.booleans(), block=st.integers(1, 40))
def test_every_element_of_a_json_array_is_a_record_however_it_is_written_and_scanned(
    tmp_path_factory, rows, indent, ascii, block
):
    path = tmp_path_factory.mktemp("array") / "x.json"
    mark = b"" if ascii else b"\xef\xbb\xbf"
    path.write_bytes(mark + json.dumps(rows, indent=indent, ensure_ascii=ascii).encode() + b"\n")
    with reading_limits(SCAN_BYTES=block):
        source = opened(path)
    assert read_all(source) == ([row["text"] for row in rows], [])
    # In another order too: records are read by their places and not one after another.
    last = source.first_documents(len(rows))[-1]
    assert source.read(last, 0)[0] == rows[-1]["text"]


def test_an_array_on_one_line_may_be_longer_than_a_line_of_records_may_be(tmp_path):
    texts = [f"text {number} " * 20 for number in range(50)]
    (tmp_path / "x.json").write_text(json.dumps([{"text": text} for text in texts]))
    with reading_limits(MOST_LINE_BYTES=1000):
        assert read_all(opened(tmp_path / "x.json")) == (texts, [])


@pytest.mark.parametrize(
    ("damaged", "byte"),
    [
        ('[{"text": "a"}, {"text": "b"', 16),
        ('[{"text": "ü"}, nonsense, {"text": "c"}]', 17),
        ('[{"text": "a"}, 12', 18),
        ("[\n", 1),
        ('[{"text": "a"},\n', 14),
    ],
)
def test_a_damaged_json_array_is_refused_with_its_byte(tmp_path, damaged, byte):
    (tmp_path / "x.json").write_text(damaged)
    with pytest.raises(DataError, match=f"x.json: not a valid JSON array at byte {byte}: "):
        opened(tmp_path / "x.json")


def test_a_json_file_that_holds_json_lines_is_read_as_such(tmp_path, tokenizer):
    path = tmp_path / "x.json"
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n')
    assert read_all(opened(path))[0] == ["", "a", "b"]
    path.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    with pytest.raises(DataError, match="x.json, line 1: not valid JSON"):
        loader_of(path, tokenizer).check_first_records()
    assert read_all(opened(path, format="text"))[0] == [path.read_text()]
    path.write_text(json.dumps({"data": [{"text": "a"}]}))  # one line is a record
    with pytest.raises(DataError, match="no field 'text'; fields: data .*source keys: field, content"):
        loader_of(path, tokenizer).check_first_records()


def trained_on(path, records, tokenizer, content="prompt_completion"):
    path.write_text(json.dumps(records))
    loader = loader_of(path, tokenizer, 128, 4, content=content, epochs=1, shuffle=False)
    return sorted(documents(loader, tokenizer))


def test_the_completion_of_a_prompt_is_learnt_and_plain_text_needs_no_template(tmp_path, tokenizer):
    calls = '[{"name": "add"}]'  # JSON as an answer, as data of function calls has it
    records = [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "", "completion": "alone <|eos|>"},
        {"prompt": "call", "completion": calls},
    ]
    assert trained_on(tmp_path / "x.json", records, tokenizer) == [
        ("<|bos|>2+2=4<|eos|>", "4<|eos|>"),
        ("<|bos|>alone <|eos|><|eos|>", "alone <|eos|><|eos|>"),
        (f"<|bos|>call{calls}<|eos|>", f"{calls}<|eos|>"),
    ]
    for prompt, completion in (("prompt", "response"), ("question", "answer"), ("question", "completion")):
        record = {"id": 1, prompt: "2+2=", completion: "4"}
        assert trained_on(tmp_path / "x.json", [record], tokenizer) == [("<|bos|>2+2=4<|eos|>", "4<|eos|>")]


def test_messages_as_prompt_and_completion_are_written_with_the_template(tmp_path, chat_tokenizer):
    records = [
        {"prompt": [question("a")], "completion": [answer("b")]},
        {"prompt": [question("c")], "completion": "d"},
        {"prompt": "e", "completion": [answer("f")]},
    ]
    assert trained_on(tmp_path / "x.json", records, chat_tokenizer) == [
        (f"<|bos|>user:{asked}<|eos|><|bos|>assistant:{said}<|eos|>", f"{said}<|eos|>")
        for asked, said in ("ab", "cd", "ef")
    ]
    # Answers in a prompt are not learnt.
    prompt = [question("a"), answer("b"), question("c")]
    ((text, learnt),) = trained_on(
        tmp_path / "x.json", [{"prompt": prompt, "completion": [answer("d")]}], chat_tokenizer
    )
    assert text.count("<|eos|>") == 4 and learnt == "d<|eos|>"


def test_parts_of_a_content_are_joined(tmp_path, chat_tokenizer):
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "this?"}]
    records = [{"messages": [question(parts), answer([{"type": "text", "text": "that"}])]}]
    assert trained_on(tmp_path / "x.json", records, chat_tokenizer, "messages") == [
        ("<|bos|>user:what is this?<|eos|><|bos|>assistant:that<|eos|>", "that<|eos|>")
    ]
