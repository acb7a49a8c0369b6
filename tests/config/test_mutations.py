"""Random mistakes: a mutated TOML is either taken exactly as written or refused by a message that names the key."""

import tempfile
from pathlib import Path

import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import Config, ConfigError, load_config
from torchround.config.key_types import UNSET

VALID = {
    "run": {"name": "x", "seed": 1},
    "model": {"family": "llama3", "flavor": "debug"},
    "tokenizer": {"name": "bytes"},
    "data": {"sources": [{"path": "corpus.txt", "weight": 1.5}], "shuffle": False},
    "training": {"steps": 20, "seq_len": 64, "global_batch_size": 8, "micro_batch_size": 2, "max_norm": 0.5},
    "engine": {
        "update": "sync",
        "rounds": 2,
        "num_devices": 2,
        "plan": {"forward": [1, 1], "fused": 1, "backward": [2], "rounds": 2},
    },
    "optimizer": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "lr_schedule": {"warmup_steps": 5, "decay": "linear"},
    "validation": {"interval_steps": 0, "max_batches": 2},
}
KEYS = [(table, key) for table, keys in VALID.items() for key in keys]
WORDS = st.sampled_from(["none", "auto", "sync", "debug", "", "x", "2", "true", "steps", "bytes", "[1]"])
SCALARS = st.one_of(
    st.booleans(), st.integers(-3, 70), st.integers(), st.floats(), WORDS, st.text(max_size=5), st.dates()
)
VALUES = st.recursive(
    SCALARS.filter(lambda value: not isinstance(value, str) or value.isprintable()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["path", "forward", "fused", "odd"]), inner, max_size=3)
    ),
    max_leaves=5,
)


def text_of(tables):
    return tomli_w.dumps(tables)


def load_text(text):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.toml")
        path.write_bytes(text.encode("utf-8", errors="surrogatepass"))
        try:
            return load_config(path)
        except ConfigError as error:
            return error


def holds(config, raw):
    """Return whether a config holds what was written: same values, lists as tuples, integers perhaps as floats."""
    if isinstance(raw, dict):
        return all(
            # A run without steps and epochs gets a default number of steps.
            (raw_value == UNSET and getattr(config, key) in (None, 1000)) or holds(getattr(config, key), raw_value)
            for key, raw_value in raw.items()
        )
    if isinstance(raw, list):
        return len(config) == len(raw) and all(holds(*pair) for pair in zip(config, raw, strict=True))
    return bool(config == raw) and isinstance(config, bool) == isinstance(raw, bool)


def check(raw, name):
    outcome = load_text(text_of(raw))
    if isinstance(outcome, ConfigError):
        assert name in str(outcome)
    else:
        assert holds(outcome, raw)


@given(st.sampled_from(KEYS), VALUES)
@settings(max_examples=100, deadline=None)
def test_a_wrong_value_is_refused_by_key_or_taken_as_written(place, value):
    table, key = place
    check({**VALID, table: {**VALID[table], key: value}}, key)


@given(st.sampled_from([*VALID, "engin", "Training", "parallelism"]), VALUES)
@settings(max_examples=100, deadline=None)
def test_a_wrong_or_unknown_table_is_refused_by_its_name(table, value):
    outcome = load_text(text_of({**VALID, table: value}))
    if isinstance(outcome, ConfigError):
        assert table in str(outcome)
    else:
        assert table in VALID and isinstance(value, dict)


@given(st.integers(0, 10**6), st.text(max_size=3), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_a_damaged_text_gives_a_config_or_a_config_error_and_nothing_else(at, put, cut):
    text = text_of(VALID)
    assert isinstance(load_text(text), Config)
    at %= len(text)
    assert isinstance(load_text(text[:at] + put + text[at + cut :]), Config | ConfigError)
