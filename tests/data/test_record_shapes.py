"""JSON arrays, CSV, content parts, and prompts with their completions: against what was written, and what is learnt."""

import csv
import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import documents, loader_of, reading_limits, texts_of
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.formats.streams import open_source


def opened(path, **keys):
    return open_source(SourceTable(path=str(path), **keys))


def read_all(source):
    """Return the content of the readable records, and the messages of the others."""
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


@pytest.fixture
def short_lines():
    """Bound a line, and so a record, by 1000 bytes."""
    with reading_limits(MOST_LINE_BYTES=1000):
        yield


def test_an_array_on_one_line_may_be_longer_than_a_line_of_records_may_be(tmp_path, short_lines):
    texts = [f"text {number} " * 20 for number in range(50)]
    (tmp_path / "x.json").write_text(json.dumps([{"text": text} for text in texts]))
    assert read_all(opened(tmp_path / "x.json")) == (texts, [])


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"text," + b"long " * 300, "the line that ends after byte .* is longer"),
        (b"", "row 1: the header has no, an empty"),
        (b"text,text", "row 1: the header has no, an empty or a repeated name"),
        (b"text,", "row 1: the header has no, an empty or a repeated name"),
        ("text".encode("utf-16"), "row 1: the header is not valid CSV in UTF-8: .*byte 0xff"),
    ],
)
def test_a_header_of_csv_that_names_no_columns_is_refused(tmp_path, short_lines, header, message):
    (tmp_path / "x.csv").write_bytes(header + b"\na\nb\n")
    with pytest.raises(DataError, match=rf"x\.csv.*{message}"):
        opened(tmp_path / "x.csv")


@pytest.mark.parametrize(
    ("damaged", "byte"),
    [
        ('[{"text": "a"}, {"text": "b"', 16),
        ('[{"text": "ü"}, nonsense, {"text": "c"}]', 17),
        ('[{"text": "a"},]', 15),
        ('[{"text": "a"}] more', 14),
        ('[{"text": "a"} {"text": "b"}]', 15),
        ('[{"text": "a"}, 12', 18),
        ("[\n", 2),
        ('[{"text": "a"},\n', 16),
    ],
)
def test_a_damaged_json_array_is_refused_with_its_byte(tmp_path, damaged, byte):
    (tmp_path / "x.json").write_text(damaged)
    with pytest.raises(DataError, match=f"x.json: not a valid JSON array at byte {byte}: "):
        opened(tmp_path / "x.json")


def test_a_json_file_that_holds_json_lines_is_read_as_such_and_one_object_is_refused(tmp_path, tokenizer):
    path = tmp_path / "x.json"
    path.write_text('\n{"text": "a"}\n{"text": "b"}\n')
    assert read_all(opened(path))[0] == ["", "a", "b"]
    path.write_text(json.dumps({"data": [{"text": "a"}]}, indent=1))
    with pytest.raises(DataError, match=r"neither an array .* jq -c '.FIELD\[\]' .*format = \"text\" reads"):
        opened(path)
    assert read_all(opened(path, format="text"))[0] == [path.read_text()]
    path.write_text(json.dumps({"data": [{"text": "a"}]}))  # one line is a record
    with pytest.raises(DataError, match="no field 'text'; fields: data .*source keys: field, content"):
        loader_of(path, tokenizer).check_first_records()


CELLS = st.text(st.sampled_from('ab ,;"\n\tü€'), max_size=8)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=9),
    kind=st.sampled_from(["csv", "tsv", "semicolons"]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    end=st.sampled_from(["\n", "\r\n"]),
)
def test_every_row_of_csv_is_a_record_whatever_its_values_hold(tmp_path_factory, rows, kind, mark, end):
    path = tmp_path_factory.mktemp("table") / ("x.tsv" if kind == "tsv" else "x.csv")
    out, delimiter = io.StringIO(newline=""), {"csv": ",", "tsv": "\t", "semicolons": ";"}[kind]
    writer = csv.writer(out, delimiter=delimiter, lineterminator=end, quoting=csv.QUOTE_ALL)
    writer.writerows([("text", "more"), *rows])
    path.write_bytes(mark + out.getvalue().encode())
    source = opened(path)
    assert read_all(source) == ([text for text, _ in rows], [])
    assert str(source.first_documents(1)[0]) == f"{path}, row 2"


def test_bad_rows_of_csv_are_named_and_cost_no_other(tmp_path):
    lines = [b"text,more", b"a,1", b"b", b'"c"x,1', b"\xff,1", b"", b'd,"1', b"e,2"]
    (tmp_path / "x.csv").write_bytes(b"\n".join(lines))
    read, wrong = read_all(opened(tmp_path / "x.csv"))
    assert read == ["a", ""]
    expected = ("row 3: 1 values", "row 4: not valid CSV", "row 5: not valid CSV in UTF-8", "row 7: not valid CSV")
    for message, words in zip(wrong, expected, strict=True):
        assert f"x.csv, {words}" in message


def test_a_long_value_of_csv_is_read_whole(tmp_path):
    (tmp_path / "x.csv").write_text('text\n"' + "long\n" * 60_000 + '"\n')
    source = opened(tmp_path / "x.csv")
    (document,) = source.first_documents(2)
    assert source.read(document, 0)[1] is not None  # in pieces, as all long texts


def trained_on(path, records, tokenizer, content="prompt_completion"):
    """Return the text and the learnt text of each record."""
    path.write_text(json.dumps(records))
    loader = loader_of(path, tokenizer, 128, 4, content=content, epochs=1, shuffle=False)
    return sorted(documents(loader, tokenizer))


def turn(role, text):
    return {"role": role, "content": text}


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
        {"prompt": [turn("user", "a")], "completion": [turn("assistant", "b")]},
        {"prompt": [turn("user", "c")], "completion": "d"},
        {"prompt": "e", "completion": [turn("assistant", "f")]},
    ]
    assert trained_on(tmp_path / "x.json", records, chat_tokenizer) == [
        (f"<|bos|>user:{asked}<|eos|><|bos|>assistant:{said}<|eos|>", f"{said}<|eos|>")
        for asked, said in ("ab", "cd", "ef")
    ]
    # Answers in a prompt are not learnt.
    prompt = [turn("user", "a"), turn("assistant", "b"), turn("user", "c")]
    ((text, learnt),) = trained_on(
        tmp_path / "x.json", [{"prompt": prompt, "completion": [turn("assistant", "d")]}], chat_tokenizer
    )
    assert text.count("<|eos|>") == 4 and learnt == "d<|eos|>"


def test_parts_of_a_content_are_joined(tmp_path, chat_tokenizer):
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "this?"}]
    records = [{"messages": [turn("user", parts), turn("assistant", [{"type": "text", "text": "that"}])]}]
    assert trained_on(tmp_path / "x.json", records, chat_tokenizer, "messages") == [
        ("<|bos|>user:what is this?<|eos|><|bos|>assistant:that<|eos|>", "that<|eos|>")
    ]


@pytest.mark.parametrize("begins", ["[{", "\n [\r\n\t{"])
def test_messages_in_a_column_of_csv_are_read_from_their_json(tmp_path, chat_tokenizer, begins):
    out = io.StringIO(newline="")
    messages = json.dumps([turn("user", "a, b"), turn("assistant", 'said "c"')]).replace("[{", begins, 1)
    csv.writer(out).writerows([("messages",), (messages,)])
    (tmp_path / "x.csv").write_text(out.getvalue())
    loader = loader_of(tmp_path / "x.csv", chat_tokenizer, 128, 4, content="messages", epochs=1)
    assert documents(loader, chat_tokenizer) == [
        ('<|bos|>user:a, b<|eos|><|bos|>assistant:said "c"<|eos|>', 'said "c"<|eos|>')
    ]
