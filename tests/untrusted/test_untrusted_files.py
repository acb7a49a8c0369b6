"""Headers of tensors, JSON, lines and token ids of strangers: read unchanged, or refused before they cost memory."""

import io
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.untrusted.data_limits import (
    MOST_BLANK_LINES,
    MOST_LINE_BYTES,
    check_token_ids,
    read_bounded_line,
    split_bounded_lines,
)
from torchround.untrusted.strict_json import MOST_NESTED, parse_json
from torchround.untrusted.tensor_header import TensorEntry, read_tensor_header

ITEM_BYTES = {"F32": 4, "U8": 1}
WHOLE = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def written(path, entries, tensor_bytes=24, length=None):
    text = json.dumps(entries).encode()
    length = len(text) if length is None else length
    path.write_bytes(length.to_bytes(8, "little") + text + bytes(tensor_bytes))
    return path


def read(path, most_header_bytes=10_000):
    with open(path, "rb") as file:
        return read_tensor_header(file, most_header_bytes, ITEM_BYTES)


def test_entries_come_in_the_order_of_the_header_with_the_start_of_their_bytes(tmp_path):
    unknown = {"dtype": "F4", "shape": [3], "data_offsets": [24, 26]}
    content = {"__metadata__": {"format": "pt"}, "b": WHOLE, "a": unknown}
    start, entries = read(written(tmp_path / "file", content, 26))
    assert start == 8 + len(json.dumps(content))
    assert entries == {"b": TensorEntry("F32", (2, 3), 0, 24), "a": TensorEntry("F4", (3,), 24, 26)}
    assert list(entries) == ["b", "a"]


@pytest.mark.parametrize("length", [0, 5000, 2**63], ids=["none", "beyond the file", "beyond all memory"])
def test_a_header_of_an_impossible_length_is_not_read(tmp_path, length):
    with pytest.raises(EOFError, match=f"its header would take {length} of"):
        read(written(tmp_path / "file", {"w": WHOLE}, length=length))
    with pytest.raises(EOFError, match="its header would take"):
        read(written(tmp_path / "file", {"w": WHOLE}), most_header_bytes=20)
    with pytest.raises(EOFError, match="truncated: its tensors end at byte"):
        read(written(tmp_path / "file", {"w": WHOLE}, tensor_bytes=23))


FORGED = {
    "a list": ([], "not a header of tensors"),
    "no offsets": ({"w": {"dtype": "F32", "shape": [6]}}, "not a header of tensors: .*'data_offsets'"),
    "a shape below zero": ({"w": WHOLE | {"shape": [-2, -3]}}, "w has shape"),
    "offsets that go backwards": ({"w": WHOLE | {"data_offsets": [24, 0]}}, "w has shape"),
    "an offset that is no integer": ({"w": WHOLE | {"data_offsets": [False, 24]}}, "not all are integers"),
    "a shape of another size": ({"w": WHOLE | {"shape": [2**40, 2**40]}}, "w takes 24 bytes, but its shape"),
    "sizes beyond 64 bits": ({"w": WHOLE | {"shape": [10**30]}}, r"the integer 1000.* is beyond"),
    "sizes without end": ({"w": WHOLE | {"shape": [2**62] * 65}}, "65 dimensions"),
    "two tensors over each other": ({"w": WHOLE, "v": WHOLE | {"data_offsets": [0, 24]}}, "overlap"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_header_is_refused_with_what_is_wrong(tmp_path, kind):
    content, words = FORGED[kind]
    with pytest.raises(ValueError, match=words):
        read(written(tmp_path / "file", content))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(value=VALUES)
def test_ordinary_documents_are_unchanged(value):
    text = json.dumps(value)
    assert parse_json(text) == parse_json(text.encode()) == value


def test_the_error_of_a_repeated_name_says_which():
    with pytest.raises(ValueError, match="the name 'a' occurs twice"):
        parse_json('{"b": [{"a": 1, "c": 2, "a": 1}]}')


@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_nesting_is_limited(ends):
    def nested(depth):
        return ends[0] * depth + ("1" if ends[0] != "[" else "") + ends[1] * depth

    parse_json(nested(MOST_NESTED))
    for depth in (MOST_NESTED + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(depth))


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=60).map(lambda text: text.replace(b"a", b"\n")), size=st.integers(1, 9))
def test_lines_do_not_depend_on_the_chunks_that_they_come_in(data, size):
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    expected = data.split(b"\n")
    if not expected[-1]:  # an end of line at the end of the data begins no further line
        expected.pop()
    assert list(split_bounded_lines(iter(chunks))) == expected


def test_a_line_beyond_the_limit_is_refused_and_one_at_the_limit_is_not():
    most = bytes(MOST_LINE_BYTES)
    assert len(read_bounded_line(io.BytesIO(most))) == MOST_LINE_BYTES
    assert [len(line) for line in split_bounded_lines(iter([most, b"\n6"]))] == [MOST_LINE_BYTES, 1]
    with pytest.raises(ValueError, match="longer than"):
        read_bounded_line(io.BytesIO(bytes(MOST_LINE_BYTES + 1)))
    with pytest.raises(ValueError, match="longer than"):
        list(split_bounded_lines(iter([most, b"6"])))


def test_blank_lines_are_refused_only_in_long_rows():
    blank = b"\n" * MOST_BLANK_LINES
    assert len(list(split_bounded_lines(iter([blank + b"x\n", blank + b"y\n"])))) == 2 * MOST_BLANK_LINES + 2
    with pytest.raises(ValueError, match="blank lines in a row"):
        list(split_bounded_lines(iter([blank, b"\n"])))


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([0, -1], "-1 is not a token id"),
        ([2**24 + 1], "is not a token id; legal: 0 to"),
        ([True], "True is not a token id"),
        (["1"], "'1' is not a token id"),
        ([1, 2, 1], "several tokens have the id 1"),
        ([*range(50_000), 49_999], "several tokens have the id 49999"),  # found without a search for each id
    ],
)
def test_only_distinct_ids_in_range_are_legal(ids, reason):
    for legal in ([], [0], [5, 3, 2**24]):
        check_token_ids(legal)
    with pytest.raises(ValueError, match=reason):
        check_token_ids(ids)
