"""A resolved config as TOML: read by Python's own reader, and loaded again."""

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import load_config, to_toml
from torchround.config.toml_writer import toml_value

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
SCALARS = st.one_of(
    st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False), TEXT, st.dates(), st.times()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=6
)


def same_types(left, right):
    return left == right and type(left) is type(right)


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_any_value_reads_back_as_it_was_written(value):
    assert same_types(tomllib.loads(f"value = {toml_value(value)}")["value"], value)


def test_a_value_that_toml_cannot_write_is_refused():
    with pytest.raises(TypeError, match="no form in TOML"):
        toml_value({"a": None})


def plain(value):
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def test_a_resolved_config_names_every_key_that_has_a_value():
    config = load_config("debug.toml")
    written = tomllib.loads(to_toml(config))
    assert written == {name: plain(table) for name, table in config.model_dump(exclude_none=True).items()}
    assert written["training"]["max_norm"] == 1.0
