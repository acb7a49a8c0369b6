"""Runs that began before the rules of the order changed: they keep the order that they began with."""

import hashlib
import json
from itertools import islice
from typing import Any

import pytest

from torchround.config import DataTable, SourceTable
from torchround.data import DataError, Tokenizer, build_loader

DATA = {
    "seed": 5,
    "shuffle": True,
    "tokenizer": "bytes with 259 tokens",
    "sources": ["20 documents in 829 bytes (layout 2a229ef9d6fa) as text"],
    "weights": [1.0],
    "weight_by": "source",
    "validation_fraction": 0.0,
}
# For each kind of run: its keys, the position after its fourth batch, and a hash of the tokens of the 30 batches after that.
# All three are of the last version with the earlier rules, on the records that `source` writes.
EARLIER: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "text": (
        {},
        {
            "data": {**DATA, "packing": "contiguous"},
            "position": {
                "tokens": [
                    111,
                    114,
                    100,
                    32,
                    51,
                    32,
                    114,
                    101,
                    99,
                    111,
                    114,
                    100,
                    32,
                    51,
                    32,
                    114,
                    101,
                    99,
                    111,
                    114,
                    100,
                    32,
                    51,
                    32,
                    257,
                ],
                "reader": {
                    "sources": [{"place": [6], "epoch": 1, "used": 6, "drawn": 26, "bad": 0}],
                    "source": None,
                    "offset": 0,
                },
            },
        },
        "259663914fa7cf3e",
    ),
    "windows": (
        {"shuffle_sequences": 40},
        {
            "data": {**DATA, "packing": "contiguous", "seq_len": 64, "shuffle_sequences": 40},
            "position": {
                "window": 0,
                "taken": 12,
                "packing": {
                    "tokens": [],
                    "reader": {
                        "sources": [{"place": [0], "epoch": 0, "used": 0, "drawn": 0, "bad": 0}],
                        "source": None,
                        "offset": 0,
                    },
                },
                "so_far": {
                    "reader": {
                        "sources": [{"place": [4], "epoch": 4, "used": 4, "drawn": 84, "bad": 0}],
                        "source": None,
                        "offset": 0,
                    },
                    "long": 0,
                },
            },
        },
        "c15d2dcc5d7bde8d",
    ),
    "whole": (
        {"packing": "best_fit"},
        {
            "data": {**DATA, "packing": "best_fit", "seq_len": 64, "long_documents": "cut"},
            "position": {
                "reader": {
                    "sources": [{"place": [0], "epoch": 0, "used": 0, "drawn": 0, "bad": 0}],
                    "source": None,
                    "offset": 0,
                },
                "waiting": [],
                "group": 0,
                "long": 0,
                "without": [],
                "until": None,
                "left": 12,
                "gone": [
                    [0, 117, 0],
                    [0, 131, 0],
                    [0, 57, 0],
                    [0, 69, 0],
                    [0, 82, 0],
                    [0, 87, 0],
                    [0, 67, 0],
                    [0, 76, 0],
                    [0, 44, 0],
                    [0, 58, 0],
                    [0, 28, 0],
                    [0, 31, 0],
                    [0, 62, 0],
                    [0, 66, 0],
                    [0, 33, 0],
                    [0, 35, 0],
                    [0, 93, 0],
                    [0, 92, 0],
                    [0, 53, 0],
                    [0, 49, 0],
                    [0, 83, 0],
                    [0, 86, 0],
                    [0, 50, 0],
                    [0, 56, 0],
                ],
                "so_far": {
                    "long": 0,
                    "reader": {
                        "sources": [{"place": [13], "epoch": 6, "used": 13, "drawn": 133, "bad": 0}],
                        "source": None,
                        "offset": 0,
                    },
                },
            },
        },
        "4520cda3a1a744dc",
    ),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceTable:
    path = tmp_path_factory.mktemp("earlier") / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"record {n} " * (n % 5 + 1)}) for n in range(20)))
    return SourceTable(path=str(path))


@pytest.mark.parametrize("kind", EARLIER)
def test_a_run_keeps_the_order_that_it_began_with(source: SourceTable, tokenizer: Tokenizer, kind: str) -> None:
    keys, state, digest = EARLIER[kind]
    loader = build_loader(DataTable(sources=(source,), **keys), tokenizer, 64, 3, 5)
    loader.load_state_dict(state)
    tokens = []
    for _ in range(30):
        batch = next(loader)
        tokens.append(batch.tokens.tolist())
        # The rules stay the earlier ones in every later position.
        state = json.loads(json.dumps(loader.state_dict()))
        assert "order" not in state["data"]
    assert hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("kind", EARLIER)
def test_a_new_run_has_another_order(source: SourceTable, tokenizer: Tokenizer, kind: str) -> None:
    keys, _, digest = EARLIER[kind]
    loader = build_loader(DataTable(sources=(source,), **keys), tokenizer, 64, 3, 5)
    tokens = [batch.tokens.tolist() for batch in islice(loader, 4, 34)]
    assert hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16] != digest
    assert loader.state_dict()["data"]["order"] == 2


def test_a_run_without_shuffled_sequences_is_not_continued_with_windows_of_a_given_size(
    source: SourceTable, tokenizer: Tokenizer
) -> None:
    _, state, _ = EARLIER["text"]
    loader = build_loader(DataTable(sources=(source,), shuffle_sequences=40), tokenizer, 64, 3, 5)
    with pytest.raises(DataError, match="seq_len was not set, is 64; shuffle_sequences was not set, is 40"):
        loader.load_state_dict(state)


@pytest.mark.parametrize(
    "forged", [{"order": 3}, {"order": True}, {"order": "2"}, {"shuffle_sequences": -1}, {"shuffle_sequences": 2**40}]
)
def test_rules_that_no_version_has_are_refused(
    source: SourceTable, tokenizer: Tokenizer, forged: dict[str, Any]
) -> None:
    _, state, _ = EARLIER["text"]
    loader = build_loader(DataTable(sources=(source,)), tokenizer, 64, 3, 5)
    with pytest.raises(DataError, match="the saved data position is of other data"):
        loader.load_state_dict({**state, "data": {**state["data"], **forged}})
