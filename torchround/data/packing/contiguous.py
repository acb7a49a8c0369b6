"""Contiguous packing, for pre-training: documents end to end, cut every T tokens.

The tokens of all documents, in reading order, form one stream. Sequence k holds its tokens `kT .. kT + T - 1`, so
each token is the input of exactly one position. The label of a position is the next token of the stream, if that is
to be learnt and belongs to the same document, and `IGNORED_LABEL` otherwise. The label of a sequence's last position
is the first input of the next sequence. So a document of n tokens yields n inputs and at most n - 1 labels wherever
it is cut, and nothing is lost or repeated.
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
    """The tokens `[n]` of a piece of document `number` of source number `source`, in that source's pass `epoch`.

    `starts_document` is False if it continues the piece before it. `learn` `[n]` marks the tokens that are a label of
    the position before them; None marks all.
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

    Positions restart at 0 with each document and with each sequence, also if a sequence continues a document. If
    documents stay whole, `origins` has the source and the epoch of each, without padding.
    """

    tokens: TokenIds
    labels: TokenIds
    positions: TokenIds
    document_ids: TokenIds
    origins: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class TokenRun:
    """Tokens `[n]` of the stream, where documents start in it, and which tokens are learnt."""

    tokens: TokenIds
    starts: BoolArray
    learn: BoolArray

    def join(self, others: "list[TokenRun]") -> "TokenRun":
        """Return this run with the others after it."""
        runs = [self, *others]
        return TokenRun(
            np.concatenate([run.tokens for run in runs]),
            np.concatenate([run.starts for run in runs]),
            np.concatenate([run.learn for run in runs]),
        )

    def after(self, count: int) -> "TokenRun":
        """Return the run without its first `count` tokens."""
        return TokenRun(self.tokens[count:], self.starts[count:], self.learn[count:])


def pack_sequence(run: TokenRun, seq_len: int, pad_id: int) -> PackedSequence:
    """Return the first `seq_len` tokens of the stream `[n]` as one row.

    A shorter stream, at the end of the data, is filled up with `pad_id` as one more document whose labels are ignored.
    """
    missing = seq_len + 1 - len(run.tokens)  # the label of the last position is one token further
    if missing > 0:
        padding = np.full(missing, pad_id, dtype=np.int64)
        run = run.join([TokenRun(padding, np.arange(missing) == 0, np.zeros(missing, dtype=np.bool_))])
    begins = run.starts[:seq_len].copy()
    begins[0] = True  # a document that continues from the sequence before is a document of its own here
    following = slice(1, seq_len + 1)
    is_label = run.learn[following] & ~run.starts[following]
    return PackedSequence(
        tokens=run.tokens[:seq_len],
        labels=np.where(is_label, run.tokens[following], IGNORED_LABEL),
        positions=positions_from(begins),
        document_ids=np.cumsum(begins, dtype=np.int64) - 1,
    )


def positions_from(begins: BoolArray) -> TokenIds:
    """Return the distance `[T]` of each token from the beginning of its document."""
    index = np.arange(len(begins), dtype=np.int64)
    return index - np.maximum.accumulate(np.where(begins, index, 0))


class ContiguousPacker(BaseNode[PackedSequence | DataError]):
    """Full sequences, packed from token pieces. Its state is the tokens left over from the pieces taken so far.

    At the end of the data the remaining tokens come as one padded sequence. An error of the source is the last item.
    """

    def __init__(self, source: BaseNode[TokenPiece | DataError], seq_len: int, pad_id: int) -> None:
        super().__init__()
        self._source = source
        self._seq_len = seq_len
        self._pad_id = pad_id

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin empty, or with the tokens left over in the saved state."""
        super().reset(initial_state)
        state = initial_state or {"tokens": [], "reader": None}
        tokens = np.asarray(state["tokens"], dtype=np.int64)
        learn = np.asarray(state.get("learn", np.ones(len(tokens))), dtype=np.bool_)
        self._run = TokenRun(tokens, np.zeros(len(tokens), dtype=np.bool_), learn)
        self._failed = False
        self._source.reset(state["reader"])

    def get_state(self) -> dict[str, Any]:
        """Return the tokens left `[n]`, which of them are learnt if not all are, and the reader's state."""
        # Document starts need no place in it: a piece is taken only when the others do not fill a sequence, so all
        # tokens left are of the last piece. A document can begin only at the first, where a sequence begins anyway.
        state = {"tokens": self._run.tokens, "reader": self._source.state_dict()}
        return state if self._run.learn.all() else {**state, "learn": self._run.learn.astype(np.int64)}

    def next(self) -> PackedSequence | DataError:
        """Return the next sequence. Raises `StopIteration` when the data has ended and no token is left."""
        error = self._fill()
        if error is not None:
            return error
        if self._failed or not len(self._run.tokens):
            raise StopIteration
        row = pack_sequence(self._run, self._seq_len, self._pad_id)
        self._run = self._run.after(self._seq_len)
        return row

    def _fill(self) -> DataError | None:
        """Take pieces until the sequence and the label of its last token are complete, or the data ends."""
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
        # Joined once: joining piece by piece would copy the growing run each time.
        if runs:
            self._run = self._run.join(runs)
        return None


def _run(piece: TokenPiece) -> TokenRun:
    starts = np.zeros(len(piece.tokens), dtype=np.bool_)
    starts[:1] = piece.starts_document
    return TokenRun(piece.tokens, starts, learnt_mask(piece))


def learnt_mask(piece: TokenPiece) -> BoolArray:
    """Return which tokens `[n]` of a piece are labels."""
    return np.ones(len(piece.tokens), dtype=np.bool_) if piece.learn is None else piece.learn


def joined(arrays: Sequence[npt.NDArray[Scalar]]) -> npt.NDArray[Scalar]:
    """Concatenate arrays. A single one is not copied."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
