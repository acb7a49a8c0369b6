"""Contiguous packing against a token-by-token reference that knows nothing of streams or pieces."""

from itertools import pairwise
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.nodes import IterableWrapper

from torchround.data.errors import DataError
from torchround.data.packing.contiguous import ContiguousPacker, PackedSequence, TokenPiece
from torchround.layer import IGNORED_LABEL

PAD = 9999
documents_strategy = st.lists(st.integers(1, 17), max_size=12)


def numbered(lengths: list[int]) -> list[list[int]]:
    """Make documents whose tokens are all different: token 100 d + i is the i-th of document d."""
    return [[100 * number + index for index in range(length)] for number, length in enumerate(lengths)]


def pieces_of(documents: list[list[int]], cuts: set[int]) -> list[TokenPiece]:
    """Cut each document into pieces, before the tokens whose number is in `cuts`."""
    pieces = []
    for document in documents:
        bounds = [0, *(index for index in range(1, len(document)) if document[index] % 7 in cuts), len(document)]
        for start, end in pairwise(bounds):
            pieces.append(TokenPiece(np.array(document[start:end], dtype=np.int64), starts_document=start == 0))
    return pieces


def pack(items: list[Any], seq_len: int) -> list[Any]:
    packer = ContiguousPacker(IterableWrapper(items), seq_len, PAD)
    packer.reset()
    return list(packer)


def reference_rows(documents: list[list[int]], seq_len: int) -> list[dict[str, list[int]]]:
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


def as_lists(row: PackedSequence) -> dict[str, list[int]]:
    return {
        "tokens": row.tokens.tolist(),
        "labels": row.labels.tolist(),
        "positions": row.positions.tolist(),
        "document_ids": row.document_ids.tolist(),
    }


@settings(max_examples=150, deadline=None)
@given(lengths=documents_strategy, seq_len=st.integers(1, 12), cuts=st.sets(st.integers(0, 6)))
def test_rows_are_what_the_definition_says_however_documents_come_in_pieces(
    lengths: list[int], seq_len: int, cuts: set[int]
) -> None:
    documents = numbered(lengths)
    rows = [as_lists(row) for row in pack(pieces_of(documents, cuts), seq_len)]
    assert rows == reference_rows(documents, seq_len)


@settings(max_examples=60, deadline=None)
@given(lengths=documents_strategy, seq_len=st.integers(1, 12))
def test_no_token_is_lost_or_repeated_as_input_or_as_label(lengths: list[int], seq_len: int) -> None:
    documents = numbered(lengths)
    rows = pack(pieces_of(documents, set()), seq_len)
    inputs = [token for row in rows for token in row.tokens.tolist() if token != PAD]
    labels = [label for row in rows for label in row.labels.tolist() if label != IGNORED_LABEL]
    assert inputs == [token for document in documents for token in document]
    assert labels == [token for document in documents for token in document[1:]]


@settings(max_examples=60, deadline=None)
@given(lengths=documents_strategy, seq_len=st.integers(1, 12), stop=st.integers(0, 30))
def test_a_half_filled_packer_continues_from_its_state(lengths: list[int], seq_len: int, stop: int) -> None:
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


def test_padding_is_only_at_the_end_of_the_last_row() -> None:
    rows = pack(pieces_of(numbered([5, 6, 3]), set()), 4)
    padded = [(row.tokens == PAD).tolist() for row in rows]
    assert not any(any(row) for row in padded[:-1])
    assert padded[-1] == sorted(padded[-1])


def test_an_error_comes_after_the_full_rows_before_it_and_ends_the_data() -> None:
    error = DataError("broken")
    rows = pack([*pieces_of(numbered([9]), set()), error, *pieces_of(numbered([9]), set())], 4)
    assert [row.tokens.tolist() for row in rows[:-1]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows[-1] is error
