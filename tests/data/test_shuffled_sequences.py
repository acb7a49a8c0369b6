"""Shuffled sequences: the same sequences within each window, in another order, from any position, for any workers."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from tests.data.conftest import MakeLoader
from tests.support.batch_contents import content
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, Loader, Tokenizer, build_loader, build_validation_loader
from torchround.data.packing import best_fit as best_fit_module
from torchround.data.packing.contiguous import PackedSequence
from torchround.data.packing.window_shuffle import SequenceShuffler, auto_window

SEQ_LEN = 64
WINDOW = 8


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make groups so small that a window has several, and some windows end inside a group."""
    monkeypatch.setattr(best_fit_module, "GROUP_SEQUENCES", 5)


def sequences(loader: Loader) -> list[Any]:
    """List each sequence of all batches: tokens, labels, positions and document ids."""
    return [row for batch in content(loader) for row in zip(*batch, strict=True)]


def book_share(loader: Loader) -> list[int]:
    """Count the sequences of the book, which is all one letter, in each batch of 16."""
    letter = ord("b")
    return [int((batch.tokens[:, 1:-1] == letter).all(dim=1).sum()) for batch in loader]


def test_a_book_of_300_sequences_is_spread_over_all_batches_by_default(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """The book is a quarter of 1200 sequences: a random batch has 4 of it, and 11 are four standard deviations more."""
    lines = ["b" * (300 * SEQ_LEN), *(f"other {number:03} " * 32 for number in range(180))]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": line}) for line in lines))
    source = SourceTable(path=str(tmp_path / "x.jsonl"))
    shares = []
    for keys in ({}, {"shuffle_sequences": 0}):
        data = DataTable(sources=(source,), epochs=1, **keys)
        shares.append(book_share(build_loader(data, tokenizer, SEQ_LEN, 16, 0)))
    mixed, plain = shares
    assert sum(mixed) == sum(plain) >= 299 and len(mixed) == len(plain) > 70
    assert max(plain) == 16
    assert max(mixed) <= 11
    assert sum(share > 0 for share in mixed) > 0.9 * len(mixed)


def test_the_default_shuffles_text_and_neither_whole_documents_nor_data_in_their_listed_order(
    make_loader: MakeLoader,
) -> None:
    for keys, is_shuffled in (({}, True), ({"packing": "best_fit"}, False), ({"shuffle": False}, False)):
        loader = make_loader(seq_len=SEQ_LEN, shuffle_sequences="auto", **keys)
        next(loader)
        assert ("window" in loader.state_dict()["position"]) == is_shuffled


def test_a_default_window_has_16_mi_tokens_and_at_most_4096_sequences() -> None:
    assert [auto_window(seq_len) for seq_len in (1, 256, 2048, 8192, 131072, 10**6)] == [
        *(4096, 4096, 4096),
        *(2048, 128, 128),
    ]


def test_the_default_window_of_a_run_is_kept_by_a_position_of_another_window(make_loader: MakeLoader) -> None:
    """A config without the key continues a run that was begun with one."""
    keys: dict[str, Any] = {"seq_len": SEQ_LEN, "epochs": 1}
    whole = content(make_loader(**keys, shuffle_sequences=WINDOW))
    first = make_loader(**keys, shuffle_sequences=WINDOW)
    before = content(islice(first, 5))
    assert before + resumed(make_loader(**keys, shuffle_sequences="auto"), first.state_dict()) == whole


def test_a_window_ends_with_an_epoch_of_small_data(tmp_path: Path, tokenizer: Tokenizer) -> None:
    """Each document fills one sequence, so that the documents of a window can be told."""
    texts = [f"{number:02}".ljust(SEQ_LEN - 2, ".") for number in range(20)]
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl")),))
    loader = build_loader(data, tokenizer, SEQ_LEN, 1, 0)
    numbers = [tokenizer.decode(next(loader).tokens[0, 1:3].tolist()) for _ in range(100)]
    for start in range(0, 100, 20):
        assert sorted(numbers[start : start + 20]) == [f"{number:02}" for number in range(20)]
    assert loader.state_dict()["position"]["window"] == 5


def test_the_epochs_that_are_read_rise_evenly_if_an_epoch_is_smaller_than_a_window(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    lines = [json.dumps({"text": f"document {number:03} " * 8}) for number in range(80)]
    (tmp_path / "x.jsonl").write_text("\n".join(lines))
    data = DataTable(sources=(SourceTable(path=str(tmp_path / "x.jsonl")),), epochs=1)
    loader = build_loader(data, tokenizer, SEQ_LEN, 4, 0)
    read = [loader.epochs_read() for _ in loader]
    even = [min(1.0, (number + 1) / len(read)) for number in range(len(read))]
    # The last batch may have fewer sequences, so each other one is a little more than its share.
    assert len(read) > 30 and read == pytest.approx(even, abs=1 / len(read))


class CountingPacker(IterableWrapper):
    """Numbered sequences of two tokens, in epochs of 50 documents; counts what was asked for."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count))
        self.asked = 0

    def next(self) -> PackedSequence:
        number = np.array([super().next()] * 2)
        self.asked += 1
        return PackedSequence(number, number, np.array([0, 1]), np.array([0, 0]))

    def get_state(self) -> dict[str, Any]:
        progress = {"epoch": self.asked // 50, "drawn": self.asked, "used": 0, "bad": 0}
        return {**super().get_state(), "reader": {"sources": [progress]}}


@pytest.mark.parametrize("window", [1, 2, 8, 50, 51])
def test_each_sequence_costs_one_of_the_next_window_and_no_more_wait_than_one_window_has(window: int) -> None:
    packer = CountingPacker(400)
    shuffler = SequenceShuffler(packer, window, seed=0)
    shuffler.reset()
    found = []
    for handed_out, row in enumerate(shuffler, start=1):
        found.append(int(row.tokens[0]))
        assert packer.asked <= min(400, window + handed_out)
    assert sorted(found) == list(range(400))


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
    first, second = ([number % WINDOW for number in orders[0][start : start + WINDOW]] for start in (0, WINDOW))
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
@example(packing="best_fit", window=2, stop=3688, workers=(0, 0))  # a window that begins inside a group
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


def test_a_bad_record_stops_a_run_where_its_window_began(make_loader: MakeLoader, corpus: Path, tmp_path: Path) -> None:
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


def test_a_window_that_is_used_up_in_changed_files_is_followed_by_the_next(
    tmp_path: Path, tokenizer: Tokenizer
) -> None:
    """The window ends with the epoch, and the records of the changed file are a third as long."""

    def loader_of(times: int) -> Loader:
        lines = [json.dumps({"text": f"document {number:03} " * times}) for number in range(40)]
        (tmp_path / "x.jsonl").write_text("\n".join(lines))
        source = SourceTable(path=str(tmp_path / "x.jsonl"))
        return build_loader(DataTable(sources=(source,), on_changed_files="go_on"), tokenizer, SEQ_LEN, 4, 0)

    before = loader_of(12)
    list(islice(before, 15))
    assert before.state_dict()["position"]["window"] == 0
    loader = loader_of(4)
    loader.load_state_dict(before.state_dict())
    assert len(list(islice(loader, 3))) == 3
    assert loader.state_dict()["position"]["window"] == 1


def test_validation_speaks_of_no_earlier_order(
    corpus: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    validation = ValidationTable(sources=(SourceTable(path=str(corpus / "*.txt")),), max_batches=1)
    batches = build_validation_loader(validation, tokenizer, SEQ_LEN, 2)
    assert len(list(batches)) == 1
    assert "order" not in caplog.text


def test_validation_is_not_shuffled(corpus: Path, tokenizer: Tokenizer) -> None:
    """Its losses can be compared between runs with and without shuffling."""
    found = []
    for window in (0, WINDOW):
        source = SourceTable(path=str(corpus / "records.jsonl"))
        data = DataTable(sources=(source,), shuffle_sequences=window, validation_fraction=0.3)
        table = ValidationTable(interval_steps=1, max_batches=3)
        found.append(content(build_validation_loader(table, tokenizer, SEQ_LEN, 2, data)))
    assert found[0] == found[1]
