"""A resolved config as TOML: read by Python's own reader, and loaded again."""

import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import Config, load_config, to_toml
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


def same_types(left: Any, right: Any) -> bool:
    return left == right and type(left) is type(right)


@given(VALUES)
@settings(max_examples=150, deadline=None)
def test_any_value_reads_back_as_it_was_written(value: Any) -> None:
    assert same_types(tomllib.loads(f"value = {toml_value(value)}")["value"], value)


def test_a_value_that_toml_cannot_write_is_refused() -> None:
    with pytest.raises(TypeError, match="no form in TOML"):
        toml_value({"a": None})


def test_dates_are_written_without_quotes() -> None:
    assert toml_value(date(2024, 1, 2)) == "2024-01-02"


NAMES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1, max_size=8).filter(
    lambda name: name != "none"
)
COUNTS = st.integers(1, 2**63 - 1)
NUMBERS = st.floats(1e-300, 1e300)
SOURCES = st.lists(
    st.fixed_dictionaries(
        {"path": NAMES},
        optional={
            "format": st.sampled_from(["auto", "text", "jsonl"]),
            "content": st.sampled_from(["text", "messages", "alpaca", "tokens"]),
            "field": NAMES,
            "weight": NUMBERS,
        },
    ),
    min_size=1,
    max_size=3,
)
PLANS = st.builds(
    lambda counts, fused: {"forward": counts, "fused": fused, "backward": counts[::-1]},
    st.lists(st.integers(1, 9), max_size=3),
    st.integers(1, 9),
)


@st.composite
def raw_configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw tables that are legal together."""
    steps = draw(st.integers(1, 10**6))
    micro = draw(st.integers(1, 10**6))
    whole = draw(st.integers(micro, 10**7))

    def table(**keys: st.SearchStrategy[Any]) -> dict[str, Any]:
        return draw(st.fixed_dictionaries({}, optional=keys))

    model = {"family": draw(NAMES), draw(st.sampled_from(["flavor", "hf_path"])): draw(NAMES)}
    if "flavor" in model and draw(st.booleans()):
        model["shape"] = {"num_layers": draw(st.integers(1, 9)), "tied_embeddings": draw(st.booleans())}
    tokenizer = draw(st.sampled_from([{"name": "bytes"}, {"path": "x"}]))
    return {
        "run": table(name=st.from_regex(r"[a-z][a-z0-9._-]{0,9}", fullmatch=True), folder=NAMES, seed=COUNTS),
        "model": model,
        "tokenizer": tokenizer,
        "data": {"sources": draw(SOURCES), **table(shuffle=st.booleans(), num_workers=st.integers(0, 256))},
        "training": {"steps": steps, "micro_batch_size": micro, "global_batch_size": whole}
        | table(seq_len=COUNTS, dtype=st.sampled_from(["float32", "bfloat16", "float16"]), max_norm=NUMBERS),
        "engine": table(
            devices=st.sampled_from(["auto", "cuda", "cpu"]),
            num_devices=COUNTS,
            device_memory_gib=NUMBERS,
            rounds=st.sampled_from([None, "auto", 1, -(-whole // micro)]),
            plan=NAMES | PLANS,
            compile=st.sampled_from([True, False, "auto"]),
        ),
        "optimizer": table(lr=NUMBERS, betas=st.lists(st.floats(0, 0.999), min_size=2, max_size=2), eps=NUMBERS),
        "lr_schedule": table(warmup_steps=st.integers(0, steps - 1), min_lr_factor=st.floats(0, 1)),
        "validation": {"interval_steps": draw(st.integers(0, 9)), "sources": draw(SOURCES)},
        "lora": table(alpha=NUMBERS, dropout=st.floats(0, 0.999), targets=st.lists(NAMES, min_size=1, max_size=3)),
    }


@given(raw_configs())
@settings(max_examples=60, deadline=None)
def test_a_resolved_config_loads_again_as_an_equal_config(raw: dict[str, Any]) -> None:
    config = Config.model_validate(raw)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.toml")
        path.write_text(to_toml(config), encoding="utf-8")
        assert load_config(path) == config


def test_a_resolved_config_names_every_key_that_has_a_value() -> None:
    config = load_config("debug.toml")
    written = tomllib.loads(to_toml(config))
    assert written == {name: _plain(table) for name, table in config.model_dump(exclude_none=True).items()}
    assert written["training"]["max_norm"] == 1.0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value
