"""The order within a source and the mix of several, against counting."""

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.formats.streams import open_source
from torchround.data.reading_order import MixSettings, Reader
from torchround.data.shuffling import shuffled


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Make three sources of 3, 7 and 20 one-word documents: `2-13` is document 13 of source 2."""
    folder = tmp_path_factory.mktemp("mix")
    for number, count in enumerate((3, 7, 20)):
        for index in range(count):
            (folder / f"{number}-{index:02}.txt").write_text(f"{number}-{index}")
    return [open_source(SourceTable(path=str(folder / f"{number}-*.txt"))) for number in range(3)]


def texts(reader, count=None):
    reader.reset()
    return [piece.content for piece in islice(reader, count)]


def test_each_epoch_visits_every_document_once_in_another_order(sources):
    visited = texts(Reader(sources[2:], MixSettings([1.0], shuffle=True, seed=3, epochs=3)))
    epochs = [visited[start : start + 20] for start in (0, 20, 40)]
    assert len(visited) == 60
    assert all(sorted(epoch) == sorted(f"2-{index}" for index in range(20)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


@settings(max_examples=40, deadline=None)
@given(weights=st.tuples(*[st.floats(0.01, 100)] * 3), count=st.integers(1, 200))
def test_after_any_number_of_documents_no_source_is_ahead_of_its_share_by_more_than_one(sources, weights, count):
    drawn = Counter(text[0] for text in texts(Reader(sources, MixSettings(weights, shuffle=True, seed=0)), count))
    for number, weight in enumerate(weights):
        assert drawn[str(number)] <= count * weight / sum(weights) + 1 + 1e-6


def test_a_source_without_any_text_is_an_error_and_not_an_endless_search(tmp_path):
    (tmp_path / "blank.jsonl").write_text('{"text": ""}\n\n{"text": ""}\n')
    reader = Reader(
        [open_source(SourceTable(path=str(tmp_path / "blank.jsonl")))], MixSettings([1.0], shuffle=True, seed=0)
    )
    with pytest.raises(DataError, match="none of its documents holds any text"):
        texts(reader)


@settings(max_examples=40, deadline=None)
@given(count=st.integers(0, 300), key=st.text(max_size=10))
def test_a_shuffle_is_a_permutation(count, key):
    assert sorted(shuffled(count, key).tolist()) == list(range(count))


def test_a_shuffle_is_the_one_that_earlier_checkpoints_were_written_with():
    """Work the order out by hand from the published SplitMix64, in Python's own integers."""

    def mixed(value):
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB % 2**64
        return value ^ (value >> 31)

    seed = 0x14388CD00947B554
    expected = sorted(range(10), key=lambda index: mixed((seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64))
    assert shuffled(10, "0/0/0").tolist() == expected
