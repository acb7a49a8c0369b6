"""Documents end to end, cut every T tokens: the contiguous packing of pre-training.

The tokens of all documents, in reading order, are one stream. Sequence k holds tokens `kT .. kT + T - 1` of
it, so each token is the input of exactly one position. The label of a position is the next token of the
stream where that belongs to the same document and is to be learnt, else `IGNORED_LABEL`; for the last position of
a sequence that next token is the first input of the following one. So a document of n tokens yields n inputs and
at most n - 1 labels wherever it is cut, and nothing is lost or repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from torchround.data.document_types import BoolArray, TokenIds
from torchround.data.errors import DataError
from torchround.layer import IGNORED_LABEL

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class TokenPiece:
    """A run of tokens `[n]`; `starts_document` where it is not the continuation of the piece before.

    `learn` `[n]`: tokens that are a label of the position before them; `None`: all. It is of document `number` of
    source number `source`, in that source's pass `epoch`.
    """

    tokens: TokenIds
    starts_document: bool
    learn: BoolArray | None = None
    ends_document: bool = True
    epoch: int = 0
    source: int = 0
    number: int = 0


@dataclass(frozen=True)
class PackedSequence:
    """One row of a batch, all `[T]`; the meanings are those of `MicroBatch`.

    Positions restart at 0 with each document and with each sequence, also where a document goes on.
    """

    tokens: TokenIds
    labels: TokenIds
    positions: TokenIds
    document_ids: TokenIds


@dataclass(frozen=True)
class TokenRun:
    """Tokens `[n]` of the stream, where documents start in it, and which tokens are learnt."""

    tokens: TokenIds
    starts: BoolArray
    learn: BoolArray

    def join(self, others: "list[TokenRun]") -> "TokenRun":
        """This one with the others after it."""
        runs = [self, *others]
        return TokenRun(
            np.concatenate([run.tokens for run in runs]),
            np.concatenate([run.starts for run in runs]),
            np.concatenate([run.learn for run in runs]),
        )

    def after(self, count: int) -> "TokenRun":
        """Without the first `count` tokens."""
        return TokenRun(self.tokens[count:], self.starts[count:], self.learn[count:])


def pack_sequence(run: TokenRun, seq_len: int, pad_id: int) -> PackedSequence:
    """The first `seq_len` tokens of the stream `[n]` as one row.

    A stream with fewer tokens (the end of the data) is filled up with `pad_id` as a document of its own,
    whose labels are ignored.
    """
    missing = seq_len + 1 - len(run.tokens)
    if missing > 0:
        padding = np.full(missing, pad_id, dtype=np.int64)
        run = run.join([TokenRun(padding, np.arange(missing) == 0, np.zeros(missing, dtype=np.bool_))])
    begins = run.starts[:seq_len].copy()
    begins[0] = True
    following = slice(1, seq_len + 1)
    is_label = run.learn[following] & ~run.starts[following]
    return PackedSequence(
        tokens=run.tokens[:seq_len],
        labels=np.where(is_label, run.tokens[following], IGNORED_LABEL),
        positions=positions_from(begins),
        document_ids=np.cumsum(begins, dtype=np.int64) - 1,
    )


def positions_from(begins: BoolArray) -> TokenIds:
    """Distance `[T]` of each token from the last one before it, or itself, that begins a document."""
    index = np.arange(len(begins), dtype=np.int64)
    return index - np.maximum.accumulate(np.where(begins, index, 0))


class ContiguousPacker(BaseNode[PackedSequence | DataError]):
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
        tokens = np.asarray(state["tokens"], dtype=np.int64)
        learn = np.asarray(state.get("learn", np.ones(len(tokens))), dtype=np.bool_)
        self._run = TokenRun(tokens, np.zeros(len(tokens), dtype=np.bool_), learn)
        self._failed = False
        self._source.reset(state["reader"])

    def get_state(self) -> dict[str, Any]:
        """Tokens left `[n]`, which are learnt where not all are, and the reader's state.

        All of them are of the piece taken last, since a piece is taken only where the others do not fill a
        sequence. So a document can only begin at the first, where a sequence begins anyway.
        """
        state = {"tokens": self._run.tokens, "reader": self._source.state_dict()}
        return state if self._run.learn.all() else {**state, "learn": self._run.learn.astype(np.int64)}

    def next(self) -> PackedSequence | DataError:
        """The next sequence; `StopIteration` when the data has ended and no token is left."""
        error = self._fill()
        if error is not None:
            return error
        if self._failed or not len(self._run.tokens):
            raise StopIteration
        row = pack_sequence(self._run, self._seq_len, self._pad_id)
        self._run = self._run.after(self._seq_len)
        return row

    def _fill(self) -> DataError | None:
        """Take pieces until the sequence and the label of its last token are there, or the data ends."""
        runs: list[TokenRun] = []
        wanted = self._seq_len + 1 - len(self._run.tokens)
        while wanted > 0 and not self._failed:
            try:
                piece = next(self._source)
            except StopIteration:
                break
            if isinstance(piece, DataError):
                self._failed = True
                return piece
            runs.append(_run(piece))
            wanted -= len(piece.tokens)
        if runs:
            self._run = self._run.join(runs)
        return None


def _run(piece: TokenPiece) -> TokenRun:
    starts = np.zeros(len(piece.tokens), dtype=np.bool_)
    starts[:1] = piece.starts_document
    return TokenRun(piece.tokens, starts, learnt_mask(piece))


def learnt_mask(piece: TokenPiece) -> BoolArray:
    """Tokens `[n]` of a piece that are labels."""
    return np.ones(len(piece.tokens), dtype=np.bool_) if piece.learn is None else piece.learn


def joined(arrays: Sequence[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    """One array after the other; a single one is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
