"""Contiguous packing against a token-by-token reference, and the cut of a batch against plain slicing and counting."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from torchround.data import cut, num_tokens
from torchround.data.errors import DataError
from torchround.data.packing.contiguous import ContiguousPacker, TokenPiece
from torchround.layer import IGNORED_LABEL, MicroBatch

PAD = 9999
documents_strategy = st.lists(st.integers(1, 17), max_size=12)


def numbered(lengths):
    """Make documents whose tokens are all different: token 100 d + i is the i-th of document d."""
    return [[100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def pieces_of(documents, cuts):
    """Cut each document into pieces, before the tokens whose number is in `cuts`."""
    pieces = []
    for document in documents:
        bounds = [0, *(index for index in range(1, len(document)) if document[index] % 7 in cuts), len(document)]
        for start, end in pairwise(bounds):
            pieces.append(TokenPiece(np.array(document[start:end], dtype=np.int64), starts_document=start == 0))
    return pieces


def pack(items, seq_len):
    packer = ContiguousPacker(IterableWrapper(items), seq_len, PAD)
    packer.reset()
    return list(packer)


def reference_rows(documents, seq_len):
    """Return the content of each row by the definition: inputs in order, and the document's next token as label."""
    inputs = [(token, number) for number, document in enumerate(documents) for token in document]
    following = {token: after for document in documents for token, after in pairwise(document)}
    rows = []
    for start in range(0, len(inputs), seq_len):
        part = inputs[start : start + seq_len]
        part += [(PAD, -1)] * (seq_len - len(part))
        owners = [owner for _, owner in part]
        rows.append(
            {
                "tokens": [token for token, _ in part],
                "labels": [following.get(token, IGNORED_LABEL) for token, _ in part],
                "positions": [index - owners.index(owner) for index, owner in enumerate(owners)],
                "document_ids": [len(set(owners[: owners.index(owner)])) for owner in owners],
            }
        )
    return rows


def as_lists(row):
    return {
        "tokens": row.tokens.tolist(),
        "labels": row.labels.tolist(),
        "positions": row.positions.tolist(),
        "document_ids": row.document_ids.tolist(),
    }


@settings(max_examples=80, deadline=None)
@given(lengths=documents_strategy, seq_len=st.integers(1, 12), cuts=st.sets(st.integers(0, 6)))
def test_rows_are_what_the_definition_says_however_documents_come_in_pieces(lengths, seq_len, cuts):
    documents = numbered(lengths)
    rows = [as_lists(row) for row in pack(pieces_of(documents, cuts), seq_len)]
    assert rows == reference_rows(documents, seq_len)


@settings(max_examples=40, deadline=None)
@given(lengths=documents_strategy, seq_len=st.integers(1, 12), stop=st.integers(0, 30))
def test_a_half_filled_packer_continues_from_its_state(lengths, seq_len, stop):
    pieces = pieces_of(numbered(lengths), {3})
    packer = ContiguousPacker(IterableWrapper(pieces), seq_len, PAD)
    packer.reset()
    for _ in zip(range(stop), packer, strict=False):
        pass
    state = packer.state_dict()
    rest = [as_lists(row) for row in packer]
    resumed = ContiguousPacker(IterableWrapper(pieces), seq_len, PAD)
    resumed.reset({**state, "tokens": state["tokens"].tolist()})
    assert [as_lists(row) for row in resumed] == rest


def test_an_error_comes_after_the_full_rows_before_it_and_ends_the_data():
    error = DataError("broken")
    rows = pack([*pieces_of(numbered([9]), set()), error, *pieces_of(numbered([9]), set())], 4)
    assert [row.tokens.tolist() for row in rows[:-1]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows[-1] is error


def batch_of(sequences, tokens=3):
    base = torch.arange(sequences * tokens).reshape(sequences, tokens)
    return MicroBatch(base, base + 1000, base + 2000, base + 3000)


@settings(max_examples=40, deadline=None)
@given(sequences=st.integers(1, 40), size=st.integers(1, 45))
def test_micro_batches_hold_every_sequence_once_in_order_and_the_first_ones_one_more(sequences, size):
    batch = batch_of(sequences)
    parts = cut(batch, size)
    sizes = [part.tokens.shape[0] for part in parts]
    assert len(parts) == -(-sequences // size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    assert sizes[0] <= size
    for field in range(4):
        joined = torch.cat([part.tensors()[field] for part in parts])
        assert torch.equal(joined, batch.tensors()[field])


def test_a_micro_batch_size_below_one_is_refused_with_the_value():
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        cut(batch_of(2), 0)


def row(tokens, labels, document_ids):
    tensors = [torch.tensor([values]) for values in (tokens, labels, document_ids)]
    return MicroBatch(tensors[0], tensors[1], torch.zeros_like(tensors[0]), tensors[2])


def test_padding_is_not_counted_as_tokens():
    assert num_tokens(row([5, 6, 7], [6, 7, 8], [0, 0, 0]), pad_id=9) == 3
    assert num_tokens(row([8, 9, 9], [-100, -100, -100], [0, 1, 1]), pad_id=9) == 1


def test_a_token_that_pads_and_also_ends_documents_is_counted_where_it_ends_one():
    """Each row is a document of two tokens, the second with the id of padding, and then padding or nothing."""
    assert num_tokens(row([5, 9, 9, 9], [9, -100, -100, -100], [0, 0, 1, 1]), pad_id=9) == 2
    assert num_tokens(row([4, 9, 5, 9], [9, -100, 9, -100], [0, 0, 1, 1]), pad_id=9) == 4


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=9),
    size=st.integers(1, 9),
)
def test_the_bound_on_documents_is_of_the_whole_batch_and_does_not_depend_on_the_cut(lengths, size):
    tokens = max(map(sum, lengths))
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    ids = torch.tensor([[*row, *[row[-1]] * (tokens - len(row))] for row in rows])
    batch = MicroBatch(ids, ids, ids, ids)
    bounds = {part.max_documents for part in cut(batch, size)}
    assert bounds == {max(map(len, lengths))}


def test_there_is_no_bound_on_documents_that_come_in_several_pieces():
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    assert [part.max_documents for part in cut(MicroBatch(ids, ids, ids, ids), 1)] == [None, None]
