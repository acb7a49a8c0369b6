"""Shuffled sequences: the same sequences within each window, in another order, from any position, for any workers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.conftest import MakeLoader
from tests.support.batch_contents import content
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, Loader, Tokenizer, build_validation_loader
from torchround.data.packing import best_fit as best_fit_module

SEQ_LEN = 64
WINDOW = 8


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups so small that a window has several, and some windows end inside a group."""
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 5)


def sequences(loader: Loader) -> list[Any]:
    """List each sequence of all batches: tokens, labels, positions and document ids."""
    return [row for batch in content(loader) for row in zip(*batch, strict=True)]


@pytest.mark.parametrize("packing", ["contiguous", "best_fit"])
@pytest.mark.parametrize("window", [1, 7, 64, 65536])
def test_each_window_has_the_sequences_that_it_has_without_shuffling(
    make_loader: MakeLoader, packing: str, window: int
) -> None:
    keys: dict[str, Any] = {"epochs": 1, "seq_len": SEQ_LEN, "packing": packing}
    plain = sequences(make_loader(**keys))
    mixed = sequences(make_loader(**keys, shuffle_sequences=window))
    assert len(plain) == len(mixed) > 3 * WINDOW
    for start in range(0, len(plain), window):
        assert sorted(plain[start : start + window]) == sorted(mixed[start : start + window])
    assert (plain == mixed) == (window == 1)


def test_the_seed_and_the_window_fix_the_order(make_loader: MakeLoader) -> None:
    """Documents are not shuffled here, so only the shuffle of sequences can change the order."""
    keys: dict[str, Any] = {"epochs": 1, "seq_len": SEQ_LEN, "shuffle": False}
    plain = sequences(make_loader(**keys))
    orders = []
    for seed in (0, 0, 1):
        mixed = sequences(make_loader(**keys, seed=seed, shuffle_sequences=WINDOW))
        orders.append([plain.index(row) for row in mixed])
    assert orders[0] == orders[1] != orders[2]
    first, second = (
        [number % WINDOW for number in orders[0][start : start + WINDOW]] for start in (0, WINDOW)
    )
    assert first != second


def resumed(loader: Loader, state: dict[str, Any]) -> list[Any]:
    loader.load_state_dict(json.loads(json.dumps(state)))
    return content(loader)


@settings(max_examples=25, deadline=None)
@given(
    packing=st.sampled_from(["contiguous", "best_fit"]),
    window=st.integers(1, 40),
    stop=st.integers(0, 10_000),
    workers=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_a_run_resumes_in_the_middle_of_a_window_with_any_number_of_workers(
    make_loader: MakeLoader, packing: str, window: int, stop: int, workers: tuple[int, int]
) -> None:
    keys: dict[str, Any] = {
        "epochs": 1,
        "seq_len": SEQ_LEN,
        "packing": packing,
        "global_batch_size": 3,
        "shuffle_sequences": window,
    }
    whole = content(make_loader(**keys))
    first = make_loader(**keys, num_workers=workers[0])
    before = content(islice(first, stop % (len(whole) + 1)))
    state = first.state_dict()
    first.close()
    assert before + resumed(make_loader(**keys, num_workers=workers[1]), state) == whole


def test_the_batch_size_may_change_in_the_middle_of_a_window(make_loader: MakeLoader) -> None:
    keys: dict[str, Any] = {"epochs": 1, "seq_len": SEQ_LEN, "shuffle_sequences": WINDOW}
    whole = sequences(make_loader(**keys))
    first = make_loader(**keys, global_batch_size=3)
    for _ in range(4):
        next(first)
    second = make_loader(**keys, global_batch_size=5)
    second.load_state_dict(first.state_dict())
    assert sequences(second) == whole[12:]


def test_a_position_does_not_hold_the_sequences_that_wait(make_loader: MakeLoader) -> None:
    """It holds at most the tokens left over from one piece of text, as without shuffling."""
    sizes = []
    for window in (0, 256):
        loader = make_loader(seq_len=SEQ_LEN, shuffle_sequences=window, shuffle=False, weights=(1e-9, 1.0))
        next(loader)
        sizes.append(len(json.dumps(loader.state_dict())))
    assert sizes[1] < sizes[0] + 2000


@pytest.mark.parametrize("change", [{"shuffle_sequences": 0}, {"shuffle_sequences": 9}, {"seq_len": 32}])
def test_a_position_is_refused_for_another_window_or_sequence_length(
    make_loader: MakeLoader, change: dict[str, int]
) -> None:
    keys: dict[str, Any] = {"seq_len": SEQ_LEN, "shuffle_sequences": WINDOW}
    first = make_loader(**keys)
    next(first)
    (name,) = change
    with pytest.raises(DataError, match=f"of other data: .*{name} was {keys[name]}, is {change[name]}"):
        make_loader(**{**keys, **change}).load_state_dict(first.state_dict())


def test_a_position_without_shuffling_is_refused_by_a_run_that_shuffles(make_loader: MakeLoader) -> None:
    first = make_loader(seq_len=SEQ_LEN)
    next(first)
    with pytest.raises(DataError, match="shuffle_sequences was not set, is 8"):
        make_loader(seq_len=SEQ_LEN, shuffle_sequences=8).load_state_dict(first.state_dict())


HOSTILE: dict[str, dict[str, Any]] = {
    "more sequences taken than a window has": {"taken": WINDOW},
    "fewer than none": {"taken": -1},
    "a window that is a word": {"window": "first"},
    "a window beyond all numbers": {"window": 10**30},
    "no state of the packer": {"packing": None},
    "a packer without tokens": {"packing": {"reader": None}},
    "no progress": {"so_far": None},
    "another field": {"further": 1},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_forged_position_is_refused(make_loader: MakeLoader, name: str) -> None:
    loader = make_loader(seq_len=SEQ_LEN, shuffle_sequences=WINDOW)
    next(loader)
    state = json.loads(json.dumps(loader.state_dict()))
    state["position"] |= HOSTILE[name]
    with pytest.raises(DataError, match="invalid data position in the checkpoint"):
        make_loader(seq_len=SEQ_LEN, shuffle_sequences=WINDOW).load_state_dict(state)


def test_a_bad_record_stops_a_run_where_its_window_began(
    make_loader: MakeLoader, corpus: Path, tmp_path: Path
) -> None:
    """No sequence of the window is trained before the record is repaired, and each is trained after."""
    records = (corpus / "records.jsonl").read_text().splitlines()
    repaired, broken = tmp_path / "repaired", tmp_path / "broken"
    for folder, line in ((repaired, records[30]), (broken, "x" * len(records[30]))):
        folder.mkdir()
        (folder / "note.txt").write_text("note")
        (folder / "records.jsonl").write_text("\n".join([*records[:30], line, *records[31:]]))
    keys: dict[str, Any] = {
        "seq_len": SEQ_LEN,
        "epochs": 1,
        "shuffle": False,
        "global_batch_size": 4,
        "shuffle_sequences": WINDOW,
    }
    whole = content(make_loader(**keys, folder=repaired))
    loader = make_loader(**keys, folder=broken)
    before: list[Any] = []
    with pytest.raises(DataError, match="not valid JSON"):
        before.extend(content([batch])[0] for batch in loader)
    assert before == whole[: len(before)] and len(before) * 4 % WINDOW == 0
    (broken / "records.jsonl").write_text((repaired / "records.jsonl").read_text())
    assert before + resumed(make_loader(**keys, folder=broken), loader.state_dict()) == whole


def test_validation_is_not_shuffled(corpus: Path, tokenizer: Tokenizer) -> None:
    """Its losses can be compared between runs with and without shuffling."""
    found = []
    for window in (0, WINDOW):
        source = SourceTable(path=str(corpus / "records.jsonl"))
        data = DataTable(sources=(source,), shuffle_sequences=window, validation_fraction=0.3)
        table = ValidationTable(interval_steps=1, max_batches=3)
        found.append(content(build_validation_loader(table, tokenizer, SEQ_LEN, 2, data)))
    assert found[0] == found[1]
