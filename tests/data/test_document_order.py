"""The order of documents: copies apart, each once an epoch, and sources by their shares."""

import random
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import write_lines
from torchround.config import DataTable, SourceTable
from torchround.data import Loader
from torchround.data.formats.streams import open_source
from torchround.data.reading_order import MixSettings, Reader
from torchround.data.shuffling import EpochKey, epoch_order, shuffled

# A document begins with its own two numbers below BASE, and only there.
BASE = 100


def write_documents(path, lengths):
    """Write documents of token ids; each can be told by its first two."""
    numbered = enumerate(lengths)
    write_lines(path, [{"tokens": [n // BASE, n % BASE, *[BASE] * (length - 2)]} for n, length in numbered])
    return SourceTable(path=str(path), content="tokens")


def chat_lengths(count):
    """Return lengths as chats have them, for sequences that are an eighth as long as in real runs."""
    generator = random.Random(0)
    return [max(4, int(generator.lognormvariate(5.52, 1.07) / 8)) for _ in range(count)]


def documents_of(batch):
    begins = (batch.positions == 0) & (batch.tokens < BASE)
    rows, columns = np.nonzero(begins.numpy())
    return [
        int(batch.tokens[row, column]) * BASE + int(batch.tokens[row, column + 1])
        for row, column in zip(rows, columns, strict=True)
    ]


def share_of_copies(batches):
    copies = total = 0
    for batch in batches:
        counts = Counter(documents_of(batch)).values()
        copies += sum(count for count in counts if count > 1)
        total += sum(counts)
    return copies / total


def whole(source, **keys):
    return DataTable(sources=(source,), packing="best_fit", **keys)


@pytest.mark.parametrize(
    ("seq_len", "batch", "full"), [(2048 // 8, 32, 0.97), pytest.param(4096 // 8, 16, 0.94, marks=pytest.mark.nightly)]
)
def test_copies_of_300_chats_do_not_meet_in_a_step(tmp_path, tokenizer, seq_len, batch, full):
    """An epoch fills about two steps. The smaller groups cost little: at least `full` of the positions hold tokens."""
    data = whole(write_documents(tmp_path / "x.jsonl", chat_lengths(300)), epochs=8)
    loader = Loader(data, tokenizer, seq_len, batch, 0)
    batches = list(loader)
    assert share_of_copies(batches) == 0
    assert sum(map(loader.num_tokens, batches)) > full * sum(found.tokens.numel() for found in batches)


@pytest.mark.parametrize(("batch", "sequences", "shuffle"), [(1, 24, True), (8, 32, True), (7, 70, False)])
def test_four_steps_per_epoch_are_enough_to_keep_copies_apart(tmp_path, tokenizer, batch, sequences, shuffle):
    """Each document is a quarter of a sequence. An epoch has at least 24 sequences, six of the smallest groups."""
    source = write_documents(tmp_path / "x.jsonl", [8] * (4 * sequences))
    loader = Loader(whole(source, epochs=4, shuffle=shuffle), tokenizer, 32, batch, sequences)
    assert share_of_copies(loader) == 0


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(3, 90), min_size=1, max_size=60),
    handling=st.sampled_from(["cut", "split"]),
    epochs=st.integers(1, 3),
    held_out=st.sampled_from([0.0, 0.3]),
    batch=st.integers(1, 5),
)
def test_every_document_is_in_each_epoch_once_and_the_last_batch_has_the_rest(
    tmp_path_factory, tokenizer, lengths, handling, epochs, held_out, batch
):
    folder = tmp_path_factory.mktemp("epochs")
    sources = tuple(
        write_documents(folder / name, part).model_copy(update={"weight": weight})
        for name, part, weight in (("a.jsonl", [*lengths, 5, 6, 7], 3.0), ("b.jsonl", [9] * 17, 1.0))
    )
    data = DataTable(
        sources=sources, packing="best_fit", long_documents=handling, epochs=epochs, validation_fraction=held_out
    )
    batches = list(Loader(data, tokenizer, 32, batch, 0))
    assert {len(found.tokens) for found in batches[:-1]} <= {batch}
    counts = Counter(number for found in batches for number in documents_of(found))
    everything = Counter(range(len(lengths) + 3)) + Counter(range(17))
    if not held_out:
        assert counts == Counter({number: count * epochs for number, count in everything.items()})
    assert all(count % epochs == 0 for count in counts.values())


@pytest.mark.parametrize("epoch", [1, 5])
def test_a_later_epoch_is_in_another_order_and_no_document_moves_by_more_than_a_quarter(epoch):
    """Ranks of 10 000 random places are off by less than 3 % (Dvoretzky-Kiefer-Wolfowitz: one in 60 million)."""
    count, first = 10_000, EpochKey("0/0/0")
    later = epoch_order(count, EpochKey(f"0/0/{epoch}", first.key))
    assert sorted(later.tolist()) == list(range(count))
    places = np.empty((2, count))
    places[0, epoch_order(count, first)] = np.arange(count) / count
    places[1, later] = np.arange(count) / count
    moved = places[1] - places[0]
    assert np.abs(moved).max() < 0.25 + 0.03
    assert np.abs(moved).mean() > 0.04


@pytest.mark.parametrize("order", ["first", "later"])
def test_every_document_is_in_every_place_equally_often(order):
    """4000 orders of 5: each of the 25 counts is 800 +- 25.3 (binomial); 6 of those leave no room for chance."""

    def order_of(number):
        return shuffled(5, f"{number}") if order == "first" else epoch_order(5, EpochKey(f"{number}/1", f"{number}/0"))

    places = Counter(pair for number in range(4000) for pair in enumerate(order_of(number).tolist()))
    assert len(places) == 25
    assert all(abs(count - 800) < 6 * 25.3 for count in places.values())


@pytest.fixture(scope="module")
def counted_sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mix")
    paths = [write_lines(folder / f"{n}.jsonl", [{"text": str(n)}] * count) for n, count in enumerate((3, 7, 20))]
    return [open_source(SourceTable(path=str(path))) for path in paths]


@settings(max_examples=40, deadline=None)
@given(weights=st.tuples(*[st.floats(0.01, 100)] * 3), count=st.integers(1, 200))
def test_after_any_number_of_documents_no_source_is_ahead_of_its_share_by_more_than_one(
    counted_sources, weights, count
):
    reader = Reader(counted_sources, MixSettings(weights, shuffle=True, seed=0))
    reader.reset()
    drawn = Counter(piece.content for piece in islice(reader, count))
    for number, weight in enumerate(weights):
        assert drawn[str(number)] <= count * weight / sum(weights) + 1 + 1e-6


def test_a_shuffle_is_the_one_that_earlier_checkpoints_were_written_with():
    """Work the order out by hand from the published SplitMix64, in Python's own integers."""

    def mixed(value):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    seed = 0x14388CD00947B554
    expected = sorted(range(10), key=lambda index: mixed((seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64))
    assert shuffled(10, "0/0/0").tolist() == expected
