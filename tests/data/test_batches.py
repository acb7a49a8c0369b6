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
def test_micro_batches_hold_every_sequence_once_in_order_and_the_first_ones_one_more(
    sequences: int, size: int
) -> None:
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


def test_padding_is_not_counted_as_tokens() -> None:
    tokens = torch.tensor([[5, 6, 7], [8, 258, 258]])
    assert num_tokens(MicroBatch(tokens, tokens, tokens, tokens), pad_id=258) == 4
