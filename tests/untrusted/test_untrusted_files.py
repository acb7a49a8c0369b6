"""Headers of tensors and JSON of strangers: read unchanged, or refused before they cost memory."""

import json

import pytest

from torchround.untrusted.strict_json import parse_json
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
    "an offset that is no integer": ({"w": WHOLE | {"data_offsets": [False, 24]}}, "w has shape"),
    "sizes without end": ({"w": WHOLE | {"shape": [2**62] * 65}}, "w has shape"),
    "a shape of another size": ({"w": WHOLE | {"shape": [2**40, 2**40]}}, "w takes 24 bytes, but its shape"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_header_is_refused_with_what_is_wrong(tmp_path, kind):
    content, words = FORGED[kind]
    with pytest.raises(ValueError, match=words):
        read(written(tmp_path / "file", content))


@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_json_that_is_nested_without_end_is_an_error_of_value(ends):
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json(ends[0] * 100_000 + ("1" if ends[0] != "[" else "") + ends[1] * 100_000)
