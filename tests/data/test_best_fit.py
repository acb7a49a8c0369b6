"""Packing of whole documents, against what each document by itself would be."""

import random
from itertools import islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from torchround.data.errors import DataError
from torchround.data.packing.best_fit import BestFitPacker, best_fit
from torchround.data.packing.contiguous import TokenPiece
from torchround.layer import IGNORED_LABEL

PAD = 99_999
lengths_strategy = st.lists(st.integers(1, 15), max_size=60)
small_groups = pytest.mark.usefixtures("small_groups")


def numbered(lengths):
    """Make documents whose tokens are all different: token 100 d + i is the i-th of document d."""
    return [[100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def is_learnt(token):
    return token % 3 != 0


def pieces_of(documents):
    """Cut each document into one piece or two; every third token is not learnt."""
    pieces = []
    for document in documents:
        bounds = [0, *([len(document) // 2] if document[0] % 200 else []), len(document)]
        for start, end in pairwise(sorted(set(bounds))):
            part = document[start:end]
            learn = np.array([is_learnt(token) for token in part])
            pieces.append(TokenPiece(np.array(part), start == 0, learn, end == len(document)))
    return pieces


def pack(items, seq_len, long_documents="cut"):
    packer = BestFitPacker(IterableWrapper(items), seq_len, PAD, long_documents)
    packer.reset()
    return list(packer)


def expected(document):
    """Return each token and its label: the next token, if that is learnt."""
    labels = [token if is_learnt(token) else IGNORED_LABEL for token in document[1:]]
    return list(zip(document, [*labels, IGNORED_LABEL], strict=True))


def unpacked(rows):
    """Return the documents in all rows, without padding, and check each row on the way."""
    found = []
    for row in rows:
        for number in range(int(row.document_ids[-1]) + 1):
            inside = row.document_ids == number
            assert row.positions[inside].tolist() == list(range(int(inside.sum())))
            document = list(zip(row.tokens[inside].tolist(), row.labels[inside].tolist(), strict=True))
            if document[0][0] == PAD:
                assert number == row.document_ids[-1], "padding is only at the end"
                assert set(document) == {(PAD, IGNORED_LABEL)}
            else:
                found.append(document)
    return found


@small_groups
@settings(max_examples=40, deadline=None)
@given(lengths=lengths_strategy, seq_len=st.integers(4, 15), handling=st.sampled_from(["cut", "skip", "split"]))
def test_every_document_is_whole_in_one_sequence_and_a_long_one_is_handled_as_asked(lengths, seq_len, handling):
    documents = numbered(lengths)
    wanted = []
    for document in documents:
        parts = [expected(document)[low : low + seq_len] for low in range(0, len(document), seq_len)]
        keep = {"cut": 1, "skip": 0, "split": len(parts)}[handling] if len(parts) > 1 else 1
        wanted += parts[:keep]
    packer = BestFitPacker(IterableWrapper(pieces_of(documents)), seq_len, PAD, handling)
    packer.reset()
    rows = list(packer)
    assert packer.state_dict()["so_far"]["long"] == sum(length > seq_len for length in lengths)
    assert all(len(row.tokens) == seq_len for row in rows)
    assert sorted(unpacked(rows)) == sorted(wanted)


@small_groups
@settings(max_examples=30, deadline=None)
@given(lengths=lengths_strategy, seq_len=st.integers(4, 15), stop=st.integers(0, 40))
def test_a_half_used_group_continues_from_its_state(lengths, seq_len, stop):
    pieces = pieces_of(numbered(lengths))

    def lists(rows):
        return [[row.tokens.tolist(), row.labels.tolist(), row.document_ids.tolist()] for row in rows]

    packer = BestFitPacker(IterableWrapper(pieces), seq_len, PAD, "split")
    packer.reset()
    list(islice(packer, stop))
    state = packer.state_dict()
    rest = lists(list(packer))
    resumed = BestFitPacker(IterableWrapper(pieces), seq_len, PAD, "split")
    resumed.reset(state)
    assert lists(list(resumed)) == rest


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=40), room=st.integers(20, 40))
def test_no_document_would_have_fitted_better_when_it_was_placed(lengths, room):
    """Each document must be in the fullest row that had room for it, or in a new one if none had."""
    rows = []
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        fill = [sum(lengths[other] for other in row) for row in rows]
        fitting = [row for row in range(len(rows)) if fill[row] + lengths[index] <= room]
        best = max(fitting, key=lambda row: (fill[row], -row), default=None)
        if best is None:
            rows.append([index])
        else:
            rows[best].append(index)
    assert best_fit(lengths, room) == rows


def test_at_least_97_percent_of_a_realistic_mix_is_tokens():
    """Lengths as in public instruction sets: log-normal, median 250, one in 40 above 2048; longer ones are cut."""
    seq_len, generator = 1024, random.Random(0)
    lengths = [max(8, int(generator.lognormvariate(5.52, 1.07))) for _ in range(seq_len * 2)]
    pieces = [TokenPiece(np.full(length, 1), True, None) for length in lengths]
    packer = BestFitPacker(IterableWrapper(pieces), seq_len, PAD, "cut")
    packer.reset()
    rows = list(packer)
    tokens = sum(int((row.tokens != PAD).sum()) for row in rows)
    assert tokens == sum(min(length, seq_len) for length in lengths)
    assert tokens / (len(rows) * seq_len) >= 0.97


@small_groups
def test_an_error_comes_in_place_of_its_group_and_ends_the_data():
    """A group has five sequences of eight tokens here: the first group is whole, the error falls into the second."""
    error = DataError("broken")
    rows = pack([*pieces_of(numbered([8] * 5)), error, *pieces_of(numbered([3]))], 8)
    assert rows[-1] is error
    assert len(unpacked(rows[:-1])) == 4  # the fifth waits for the second group


def test_a_document_broken_off_by_a_bad_record_ends_where_the_next_one_starts():
    broken = TokenPiece(np.array([1, 2]), True, None, ends_document=False)
    rows = pack([broken, TokenPiece(np.array([4, 5]), True, None)], 8)
    assert [[token for token, _ in document] for document in unpacked(rows)] == [[1, 2], [4, 5]]


def test_an_endless_search_for_a_document_that_fits_is_an_error():
    pieces = [TokenPiece(np.arange(9), True, None, epoch=epoch) for epoch in range(10)]
    (error,) = pack(pieces, 8, "skip")
    assert isinstance(error, DataError)
    assert "training.seq_len is 8" in str(error)
