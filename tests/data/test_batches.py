"""`cut` and the token count, against plain slicing and counting."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.data import cut, num_tokens
from torchround.layer import MicroBatch


def batch_of(sequences: int, tokens: int = 3) -> MicroBatch:
    base = torch.arange(sequences * tokens).reshape(sequences, tokens)
    return MicroBatch(base, base + 1000, base + 2000, base + 3000)


@settings(max_examples=60, deadline=None)
@given(sequences=st.integers(1, 40), size=st.integers(1, 45))
def test_micro_batches_hold_every_sequence_once_in_order_and_the_first_ones_one_more(sequences: int, size: int) -> None:
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


def test_ten_sequences_by_four_are_cut_four_three_three() -> None:
    assert [part.tokens.shape[0] for part in cut(batch_of(10), 4)] == [4, 3, 3]


def test_a_micro_batch_size_below_one_is_refused_with_the_value() -> None:
    with pytest.raises(ValueError, match="micro_batch_size is 0"):
        cut(batch_of(2), 0)


def row(tokens: list[int], labels: list[int], document_ids: list[int]) -> MicroBatch:
    tensors = [torch.tensor([values]) for values in (tokens, labels, document_ids)]
    return MicroBatch(tensors[0], tensors[1], torch.zeros_like(tensors[0]), tensors[2])


def test_padding_is_not_counted_as_tokens() -> None:
    assert num_tokens(row([5, 6, 7], [6, 7, 8], [0, 0, 0]), pad_id=9) == 3
    assert num_tokens(row([8, 9, 9], [-100, -100, -100], [0, 1, 1]), pad_id=9) == 1


def test_a_token_that_pads_and_also_ends_documents_is_counted_where_it_ends_one() -> None:
    """Each row is a document of two tokens, the second with the id of padding, and then padding or nothing."""
    assert num_tokens(row([5, 9, 9, 9], [9, -100, -100, -100], [0, 0, 1, 1]), pad_id=9) == 2
    assert num_tokens(row([4, 9, 5, 9], [9, -100, 9, -100], [0, 0, 1, 1]), pad_id=9) == 4


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=20), min_size=1, max_size=9),
    size=st.integers(1, 9),
)
def test_the_bound_on_documents_is_of_the_whole_batch_and_does_not_depend_on_the_cut(
    lengths: list[list[int]], size: int
) -> None:
    tokens = max(map(sum, lengths))
    rows = [[n for n, length in enumerate(row) for _ in range(length)] for row in lengths]
    ids = torch.tensor([[*row, *[row[-1]] * (tokens - len(row))] for row in rows])
    batch = MicroBatch(ids, ids, ids, ids)
    bounds = {part.max_documents for part in cut(batch, size)}
    assert bounds == {max(map(len, lengths))}


def test_there_is_no_bound_on_documents_that_come_in_several_pieces() -> None:
    ids = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 0]])
    assert [part.max_documents for part in cut(MicroBatch(ids, ids, ids, ids), 1)] == [None, None]
