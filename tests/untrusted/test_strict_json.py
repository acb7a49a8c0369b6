"""Strict JSON: ordinary documents parse as with the module `json`, ambiguous and overly deep ones are refused."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchround.untrusted.strict_json import MOST_NESTED, is_nested_deeper, parse_json

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


def test_the_same_name_in_different_objects_is_legal():
    assert parse_json('{"a": {"a": 1}}') == {"a": {"a": 1}}


@pytest.mark.parametrize("ends", ["[]", ('{"a":', "}")], ids=["lists", "objects"])
def test_nesting_is_limited(ends):
    def nested(depth):
        return ends[0] * depth + ("1" if ends[0] != "[" else "") + ends[1] * depth

    parse_json(nested(MOST_NESTED))
    for depth in (MOST_NESTED + 1, 100_000):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(nested(depth))


def test_depth_counts_lists_and_objects_alike():
    assert is_nested_deeper([{"a": [1]}], 2) and not is_nested_deeper([{"a": [1]}], 3)
