"""Shuffled sequences: the same sequences within each window, in another order, from any position, for any workers."""

import json
from functools import partial
from itertools import islice

import numpy as np
import pytest
from torchdata.nodes import IterableWrapper

from tests.support.batch_contents import content, loader_of, write_lines
from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data import DataError, build_validation_loader
from torchround.data.packing.contiguous import PackedSequence
from torchround.data.packing.window_shuffle import SequenceShuffler

SEQ_LEN = 64
WINDOW = 8
# Groups are so small that a window has several, and some windows end inside a group.
pytestmark = pytest.mark.usefixtures("small_groups")


@pytest.fixture(scope="module")
def make(make_loader, tmp_path_factory):
    """Make loaders over one epoch of a note and 100 records, some 250 sequences."""
    folder = tmp_path_factory.mktemp("few")
    (folder / "note.txt").write_text("a note, " * 99)
    write_lines(folder / "records.jsonl", [{"text": f"record {n} " * (n * 7 % 23)} for n in range(100)])
    return partial(make_loader, folder=folder, seq_len=SEQ_LEN, epochs=1)


def sequences(loader):
    """List each sequence of all batches: tokens, labels, positions and document ids."""
    return [row for batch in content(loader) for row in zip(*batch, strict=True)]


def resumed(loader, state):
    loader.load_state_dict(json.loads(json.dumps(state)))
    return content(loader)


def test_a_book_of_300_sequences_is_spread_over_all_batches_by_default(tmp_path, tokenizer):
    """The book is a quarter of 1200 sequences: a random batch has 4 of it, and 11 are four standard deviations more."""
    texts = ["b" * (300 * SEQ_LEN), *(f"other {number:03} " * 32 for number in range(180))]
    path = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    mixed, plain = (
        [int((batch.tokens[:, 1:-1] == ord("b")).all(dim=1).sum()) for batch in loader]
        for loader in (
            loader_of(path, tokenizer, SEQ_LEN, 16, epochs=1, **keys) for keys in ({}, {"shuffle_sequences": 0})
        )
    )
    assert sum(mixed) == sum(plain) >= 299 and len(mixed) == len(plain) > 70
    assert max(plain) == 16
    assert max(mixed) <= 11
    assert sum(share > 0 for share in mixed) > 0.9 * len(mixed)


def test_the_default_shuffles_text_and_neither_whole_documents_nor_data_in_their_listed_order(make):
    for keys, is_shuffled in (({}, True), ({"packing": "best_fit"}, False), ({"shuffle": False}, False)):
        loader = make(shuffle_sequences="auto", **keys)
        next(loader)
        assert ("window" in loader.state_dict()["position"]) == is_shuffled


def test_the_default_window_of_a_run_is_kept_by_a_position_of_another_window(make):
    """A config without the key continues a run that was begun with one."""
    first = make(shuffle_sequences=WINDOW)
    before = content(islice(first, 5))
    after = resumed(make(shuffle_sequences="auto"), first.state_dict())
    assert before + after == content(make(shuffle_sequences=WINDOW))


def test_a_window_ends_with_an_epoch_of_small_data(tmp_path, tokenizer):
    """Each document fills one sequence, so that the documents of a window can be told."""
    texts = [{"text": f"{number:02}".ljust(SEQ_LEN - 2, ".")} for number in range(20)]
    loader = loader_of(write_lines(tmp_path / "x.jsonl", texts), tokenizer, SEQ_LEN, 1)
    numbers = [tokenizer.decode(next(loader).tokens[0, 1:3].tolist()) for _ in range(100)]
    for start in range(0, 100, 20):
        assert sorted(numbers[start : start + 20]) == [f"{number:02}" for number in range(20)]
    assert loader.state_dict()["position"]["window"] == 5


def test_the_epochs_that_are_read_rise_evenly_if_an_epoch_is_smaller_than_a_window(tmp_path, tokenizer):
    path = write_lines(tmp_path / "x.jsonl", [{"text": f"document {number:03} " * 8} for number in range(80)])
    loader = loader_of(path, tokenizer, SEQ_LEN, 4, epochs=1)
    read = [loader.epochs_read() for _ in loader]
    even = [min(1.0, (number + 1) / len(read)) for number in range(len(read))]
    # The last batch may have fewer sequences, so each other one is a little more than its share.
    assert len(read) > 30 and read == pytest.approx(even, abs=1 / len(read))


class CountingPacker(IterableWrapper):
    """Numbered sequences of two tokens, in epochs of 50 documents; counts what was asked for."""

    def __init__(self, count):
        super().__init__(range(count))
        self.asked = 0

    def next(self):
        number = np.array([super().next()] * 2)
        self.asked += 1
        return PackedSequence(number, number, np.array([0, 1]), np.array([0, 0]))

    def get_state(self):
        progress = {"epoch": self.asked // 50, "drawn": self.asked, "used": 0, "bad": 0}
        return {**super().get_state(), "reader": {"sources": [progress]}}


@pytest.mark.parametrize("window", [1, 8, 50, 51])
def test_each_sequence_costs_one_of_the_next_window_and_no_more_wait_than_one_window_has(window):
    packer = CountingPacker(400)
    shuffler = SequenceShuffler(packer, window, seed=0)
    shuffler.reset()
    found = []
    for handed_out, row in enumerate(shuffler, start=1):
        found.append(int(row.tokens[0]))
        assert packer.asked <= min(400, window + handed_out)
    assert sorted(found) == list(range(400))


@pytest.mark.parametrize(
    ("packing", "window"), [("contiguous", 1), ("best_fit", 7), ("contiguous", 64), ("best_fit", 65536)]
)
def test_each_window_has_the_sequences_that_it_has_without_shuffling(make, packing, window):
    plain = sequences(make(packing=packing))
    mixed = sequences(make(packing=packing, shuffle_sequences=window))
    assert len(plain) == len(mixed) > 64
    for start in range(0, len(plain), window):
        assert sorted(plain[start : start + window]) == sorted(mixed[start : start + window])
    assert (plain == mixed) == (window == 1)


def test_the_seed_and_the_window_fix_the_order(make):
    """Documents are not shuffled here, so only the shuffle of sequences can change the order."""
    plain, orders = sequences(make(shuffle=False)), []
    for seed in (0, 0, 1):
        mixed = sequences(make(shuffle=False, seed=seed, shuffle_sequences=WINDOW))
        orders.append([plain.index(row) for row in mixed])
    assert orders[0] == orders[1] != orders[2]
    first, second = ([number % WINDOW for number in orders[0][start : start + WINDOW]] for start in (0, WINDOW))
    assert first != second


def test_the_batch_size_may_change_in_the_middle_of_a_window(make):
    first, second = (make(shuffle_sequences=WINDOW, global_batch_size=size) for size in (3, 5))
    list(islice(first, 4))
    second.load_state_dict(first.state_dict())
    assert sequences(second) == sequences(make(shuffle_sequences=WINDOW))[12:]


def test_a_bad_record_stops_a_run_where_its_window_began(make_loader, corpus, tmp_path):
    """No sequence of the window is trained before the record is repaired, and each is trained after."""
    records = (corpus / "records.jsonl").read_text().splitlines()
    (tmp_path / "note.txt").write_text("note")
    make = partial(make_loader, folder=tmp_path, seq_len=SEQ_LEN, epochs=1, shuffle=False, global_batch_size=4)
    repaired, broken = records, [*records[:30], "x" * len(records[30]), *records[31:]]
    write_lines(tmp_path / "records.jsonl", repaired)
    whole = content(make(shuffle_sequences=WINDOW))
    write_lines(tmp_path / "records.jsonl", broken)
    loader, before = make(shuffle_sequences=WINDOW), []
    with pytest.raises(DataError, match="not valid JSON"):
        before.extend(content([batch])[0] for batch in loader)
    assert before == whole[: len(before)] and len(before) * 4 % WINDOW == 0
    write_lines(tmp_path / "records.jsonl", repaired)
    assert before + resumed(make(shuffle_sequences=WINDOW), loader.state_dict()) == whole


def test_a_window_that_is_used_up_in_changed_files_is_followed_by_the_next(tmp_path, tokenizer):
    """The window ends with the epoch, and the records of the changed file are a third as long."""

    def of(times):
        path = write_lines(tmp_path / "x.jsonl", [{"text": f"document {number:03} " * times} for number in range(40)])
        return loader_of(path, tokenizer, SEQ_LEN, 4, on_changed_files="go_on")

    before = of(12)
    list(islice(before, 15))
    assert before.state_dict()["position"]["window"] == 0
    loader = of(4)
    loader.load_state_dict(before.state_dict())
    assert len(list(islice(loader, 3))) == 3
    assert loader.state_dict()["position"]["window"] == 1


def test_validation_is_not_shuffled(corpus, tokenizer):
    """Its losses can be compared between runs with and without shuffling."""
    found = []
    for window in (0, WINDOW):
        source = SourceTable(path=str(corpus / "records.jsonl"))
        data = DataTable(sources=(source,), shuffle_sequences=window, validation_fraction=0.3)
        table = ValidationTable(interval_steps=1, max_batches=3)
        found.append(content(build_validation_loader(table, tokenizer, SEQ_LEN, 2, data)))
    assert found[0] == found[1]
