"""Documents end to end, cut every T tokens: the contiguous packing of pre-training.

The tokens of all documents, in reading order, are one stream. Sequence k holds tokens `kT .. kT + T - 1` of
it, so each token is the input of exactly one position. The label of a position is the next token of the
stream where that belongs to the same document, else `IGNORED_LABEL`; for the last position of a sequence that
next token is the first input of the following one. So a document of n tokens yields n inputs and n - 1 labels
wherever it is cut, and nothing is lost or repeated.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from torchround.data.errors import DataError
from torchround.layer import IGNORED_LABEL

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class TokenPiece:
    """A run of tokens `[n]`; `starts_document` where it is not the continuation of the piece before."""

    tokens: Ids
    starts_document: bool


@dataclass(frozen=True)
class PackedSequence:
    """One row of a batch, all `[T]`; the meanings are those of `MicroBatch`.

    Positions restart at 0 with each document and with each sequence, also where a document goes on.
    """

    tokens: Ids
    labels: Ids
    positions: Ids
    document_ids: Ids


def pack_sequence(stream: Ids, starts: Mask, seq_len: int, pad_id: int) -> PackedSequence:
    """The first `seq_len` tokens of `stream` `[n]` as one row; `starts[i]`: a document begins at token i.

    A stream with fewer tokens (the end of the data) is filled up with `pad_id` as a document of its own,
    whose labels are ignored.
    """
    num_tokens = len(stream)
    missing = seq_len + 1 - num_tokens
    if missing > 0:
        stream = np.concatenate([stream, np.full(missing, pad_id, dtype=np.int64)])
        starts = np.concatenate([starts, np.arange(missing) == 0])
    begins = starts[:seq_len].copy()
    begins[0] = True
    index = np.arange(seq_len, dtype=np.int64)
    labels = np.where(starts[1 : seq_len + 1], IGNORED_LABEL, stream[1 : seq_len + 1])
    labels[num_tokens:] = IGNORED_LABEL
    return PackedSequence(
        tokens=stream[:seq_len],
        labels=labels,
        positions=index - np.maximum.accumulate(np.where(begins, index, 0)),
        document_ids=np.cumsum(begins, dtype=np.int64) - 1,
    )


class Packer(BaseNode[PackedSequence | DataError]):
    """Token pieces in, full sequences out. Its state is what is left of the pieces taken so far.

    At the end of the data the remaining tokens come as one padded sequence. An error from before it is
    handed on as the last item.
    """

    def __init__(self, source: BaseNode[TokenPiece | DataError], seq_len: int, pad_id: int) -> None:
        super().__init__()
        self._source = source
        self._seq_len = seq_len
        self._pad_id = pad_id

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin empty, or with the tokens that were left when `initial_state` was taken."""
        super().reset(initial_state)
        state = initial_state or {"tokens": [], "reader": None}
        self._stream: Ids = np.asarray(state["tokens"], dtype=np.int64)
        self._starts: Mask = np.zeros(len(self._stream), dtype=np.bool_)
        self._failed = False
        self._source.reset(state["reader"])

    def get_state(self) -> dict[str, Any]:
        """Tokens left `[n]` and the reader's state.

        All of them are of the piece taken last, since a piece is taken only where the others do not fill a
        sequence. So a document can only begin at the first, where a sequence begins anyway.
        """
        return {"tokens": self._stream, "reader": self._source.state_dict()}

    def next(self) -> PackedSequence | DataError:
        """The next sequence; `StopIteration` when the data has ended and no token is left."""
        error = self._fill()
        if error is not None:
            return error
        if self._failed or not len(self._stream):
            raise StopIteration
        row = pack_sequence(self._stream, self._starts, self._seq_len, self._pad_id)
        self._stream = self._stream[self._seq_len :]
        self._starts = self._starts[self._seq_len :]
        return row

    def _fill(self) -> DataError | None:
        """Take pieces until the sequence and the label of its last token are there, or the data ends."""
        pieces: list[TokenPiece] = []
        wanted = self._seq_len + 1 - len(self._stream)
        while wanted > 0 and not self._failed:
            try:
                piece = next(self._source)
            except StopIteration:
                break
            if isinstance(piece, DataError):
                self._failed = True
                return piece
            pieces.append(piece)
            wanted -= len(piece.tokens)
        if pieces:
            self._stream = np.concatenate([self._stream, *(piece.tokens for piece in pieces)])
            self._starts = np.concatenate([self._starts, *(_starts(piece) for piece in pieces)])
        return None


def _starts(piece: TokenPiece) -> Mask:
    starts = np.zeros(len(piece.tokens), dtype=np.bool_)
    starts[:1] = piece.starts_document
    return starts
