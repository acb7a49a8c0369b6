"""Packing against what each document by itself would be, and the cut of a batch against plain slicing and counting."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from torchround.data import cut, num_tokens
from torchround.data.best_fit import BestFitPacker, best_fit
from torchround.data.packing import ContiguousPacker, TokenPiece
from torchround.layer import IGNORED_LABEL, MicroBatch

PAD = 99_999
lengths_strategy = st.lists(st.integers(1, 17), max_size=60)
small_groups = pytest.mark.usefixtures("small_groups")


def numbered(lengths):
    return [[100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def is_learnt(token):
    return token % 3 != 0


def pieces_of(documents, cuts=()):
    pieces = []
    for document in documents:
        bounds = [0, *(index for index in range(1, len(document)) if document[index] % 7 in cuts), len(document)]
        for start, end in pairwise(bounds):
            tokens = np.array(document[start:end], dtype=np.int64)
            pieces.append(TokenPiece(tokens, start == 0, is_learnt(tokens), end == len(document)))
    return pieces


def expected(document):
    labels = [token if is_learnt(token) else IGNORED_LABEL for token in document[1:]]
    return list(zip(document, [*labels, IGNORED_LABEL], strict=True))


def as_lists(rows):
    return [[field.tolist() for field in (row.tokens, row.labels, row.positions, row.document_ids)] for row in rows]


def rows_of(packer):
    packer.reset()
    return list(packer)


def contiguous_rows(documents, seq_len):
    inputs = [(*pair, number) for number, document in enumerate(documents) for pair in expected(document)]
    rows = []
    for start in range(0, len(inputs), seq_len):
        part = inputs[start : start + seq_len]
        part += [(PAD, IGNORED_LABEL, -1)] * (seq_len - len(part))
        tokens, labels, owners = map(list, zip(*part, strict=True))
        positions = [index - owners.index(owner) for index, owner in enumerate(owners)]
        rows.append([tokens, labels, positions, [len(set(owners[: owners.index(owner)])) for owner in owners]])
    return rows


@settings(max_examples=80, deadline=None)
@given(lengths=st.lists(st.integers(1, 17), max_size=12), seq_len=st.integers(1, 12), cuts=st.sets(st.integers(0, 6)))
def test_contiguous_rows_are_what_the_definition_says_however_documents_come_in_pieces(lengths, seq_len, cuts):
    documents = numbered(lengths)
    rows = rows_of(ContiguousPacker(IterableWrapper(pieces_of(documents, cuts)), seq_len, PAD))
    assert as_lists(rows) == contiguous_rows(documents, seq_len)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(5, 17), min_size=1), seq_len=st.integers(1, 12), stop=st.integers(0, 5))
def test_a_half_filled_packer_continues_from_its_state(lengths, seq_len, stop):
    pieces = pieces_of(numbered(lengths))
    packer, resumed = (ContiguousPacker(IterableWrapper(pieces), seq_len, PAD) for _ in range(2))
    packer.reset()
    list(islice(packer, stop))
    state = packer.state_dict()
    rest = as_lists(packer)
    resumed.reset(state)
    assert as_lists(resumed) == rest


def unpacked(rows):
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
@given(lengths=lengths_strategy, seq_len=st.integers(4, 15), handling=st.sampled_from(["cut", "split"]))
def test_every_document_is_whole_in_one_sequence_and_a_long_one_is_handled_as_asked(lengths, seq_len, handling):
    documents = numbered(lengths)
    wanted = []
    for document in documents:
        parts = [expected(document)[low : low + seq_len] for low in range(0, len(document), seq_len)]
        wanted += parts if handling == "split" else parts[:1]
    packer = BestFitPacker(IterableWrapper(pieces_of(documents, (2, 5))), seq_len, PAD, handling)
    rows = rows_of(packer)
    assert packer.state_dict()["so_far"]["long"] == sum(length > seq_len for length in lengths)
    assert all(len(row.tokens) == seq_len for row in rows)
    assert sorted(unpacked(rows)) == sorted(wanted)


@settings(max_examples=50, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=40), room=st.integers(20, 40))
def test_no_document_would_have_fitted_better_when_it_was_placed(lengths, room):
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


def test_a_document_broken_off_by_a_bad_record_ends_where_the_next_one_starts():
    broken = TokenPiece(np.array([1, 2]), True, None, ends_document=False)
    pieces = [broken, TokenPiece(np.array([4, 5]), True, None)]
    (row,) = rows_of(BestFitPacker(IterableWrapper(pieces), 8, PAD, "cut"))
    assert [[token for token, _ in document] for document in unpacked([row])] == [[1, 2], [4, 5]]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=20),
    size=st.integers(1, 25),
)
def test_micro_batches_hold_every_sequence_once_in_order_and_the_first_ones_one_more(lengths, size):
    """The bound on documents is of the whole batch, so that it does not depend on the cut."""
    tokens = max(map(sum, lengths))
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    ids = torch.tensor([[*row, *[row[-1]] * (tokens - len(row))] for row in rows])
    numbers = torch.arange(ids.numel()).view_as(ids)
    batch = MicroBatch(numbers, numbers + 1000, numbers + 2000, ids)
    parts = cut(batch, size)
    sizes = [part.tokens.shape[0] for part in parts]
    assert len(parts) == -(-len(lengths) // size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= size
    for field in range(4):
        assert torch.equal(torch.cat([part.tensors()[field] for part in parts]), batch.tensors()[field])
    assert {part.max_documents for part in parts} == {max(map(len, lengths))}


def test_there_is_no_bound_on_documents_that_come_in_several_pieces_and_no_micro_batch_of_nothing():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    batch = MicroBatch(ids, ids, ids, ids)
    assert [part.max_documents for part in cut(batch, 1)] == [None, None]
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        cut(batch, 0)


@pytest.mark.parametrize(
    ("tokens", "labels", "ids", "count"),
    [
        ([5, 6, 7], [6, 7, 8], [0, 0, 0], 3),
        ([8, 9, 9], [-100, -100, -100], [0, 1, 1], 1),
        # A token that pads and also ends documents: a document of two tokens, and then padding or another document.
        ([5, 9, 9, 9], [9, -100, -100, -100], [0, 0, 1, 1], 2),
        ([4, 9, 5, 9], [9, -100, 9, -100], [0, 0, 1, 1], 4),
    ],
)
def test_padding_is_not_counted_as_tokens(tokens, labels, ids, count):
    columns = [torch.tensor([values]) for values in (tokens, labels, ids)]
    batch = MicroBatch(columns[0], columns[1], torch.zeros_like(columns[0]), columns[2])
    assert num_tokens(batch, pad_id=9) == count
