"""Runs that began before the rules of the order changed: they keep the order that they began with."""

import hashlib
import json
from itertools import islice

import pytest

from torchround.config import DataTable, SourceTable
from torchround.data import DataError, build_loader

DATA = {"seed": 5, "shuffle": True, "tokenizer": "bytes with 259 tokens", "weights": [1.0], "weight_by": "source"}
DATA |= {"sources": ["20 documents in 829 bytes (layout 2a229ef9d6fa) as text"], "validation_fraction": 0.0}
USED = "117 131 57 69 82 87 67 76 44 58 28 31 62 66 33 35 93 92 53 49 83 86 50 56"


def reader(place, epoch, used, drawn):
    progress = {"place": [place], "epoch": epoch, "used": used, "drawn": drawn, "bad": 0}
    return {"sources": [progress], "source": None, "offset": 0}


# For each kind of run: its keys, the position after its fourth batch, and a hash of the tokens of the 30 batches after that.
# All three are of the last version with the earlier rules, on the records that `source` writes.
EARLIER = {
    "text": (
        {},
        {"packing": "contiguous"},
        {"tokens": [*b"ord 3 record 3 record 3 ", 257], "reader": reader(6, 1, 6, 26)},
        "259663914fa7cf3e",
    ),
    "windows": (
        {"shuffle_sequences": 40},
        {"packing": "contiguous", "seq_len": 64, "shuffle_sequences": 40},
        {"window": 0, "taken": 12, "packing": {"tokens": [], "reader": reader(0, 0, 0, 0)}}
        | {"so_far": {"reader": reader(4, 4, 4, 84), "long": 0}},
        "c15d2dcc5d7bde8d",
    ),
    "whole": (
        {"packing": "best_fit"},
        {"packing": "best_fit", "seq_len": 64, "long_documents": "cut"},
        {"reader": reader(0, 0, 0, 0), "waiting": [], "group": 0, "long": 0, "without": [], "until": None, "left": 12}
        | {"gone": [[0, int(number), 0] for number in USED.split()]}
        | {"so_far": {"long": 0, "reader": reader(13, 6, 13, 133)}},
        "4520cda3a1a744dc",
    ),
}


@pytest.fixture(scope="module")
def loader_of(tmp_path_factory, tokenizer):
    path = tmp_path_factory.mktemp("earlier") / "x.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"record {n} " * (n % 5 + 1)}) for n in range(20)))
    return lambda **keys: build_loader(DataTable(sources=(SourceTable(path=str(path)),), **keys), tokenizer, 64, 3, 5)


def position_of(kind):
    _, more, position, _ = EARLIER[kind]
    return {"data": {**DATA, **more}, "position": position}


def digest(batches):
    return hashlib.sha256(json.dumps([batch.tokens.tolist() for batch in batches]).encode()).hexdigest()[:16]


@pytest.mark.parametrize("kind", EARLIER)
def test_a_run_keeps_the_order_that_it_began_with_and_a_new_run_has_another(loader_of, kind):
    keys, _, _, expected = EARLIER[kind]
    loader, batches = loader_of(**keys), []
    loader.load_state_dict(position_of(kind))
    for _ in range(30):
        batches.append(next(loader))
        # The rules stay the earlier ones in every later position.
        assert "order" not in loader.state_dict()["data"]
    assert digest(batches) == expected
    new = loader_of(**keys)
    assert digest(islice(new, 4, 34)) != expected and new.state_dict()["data"]["order"] == 2


def test_rules_that_no_version_has_are_refused(loader_of):
    loader, state = loader_of(), position_of("text")
    changes = [("order", 3), ("order", True), ("order", "2"), ("shuffle_sequences", -1), ("shuffle_sequences", 2**40)]
    for key, value in changes:
        with pytest.raises(DataError, match="other data"):
            loader.load_state_dict({**state, "data": {**state["data"], key: value}})
