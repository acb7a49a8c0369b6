"""Contiguous packing, for pre-training, and the batches that sequences of any packing become.

Contiguous packing puts documents end to end and cuts them every T tokens.

The tokens of all documents, in reading order, form one stream. Sequence k holds its tokens `kT .. kT + T - 1`, so
each token is the input of exactly one position. The label of a position is the next token of the stream, if that is
to be learnt and belongs to the same document, and `IGNORED_LABEL` otherwise. The label of a sequence's last position
is the first input of the next sequence. So a document of n tokens yields n inputs and at most n - 1 labels wherever
it is cut, and nothing is lost or repeated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchdata.nodes import BaseNode

from torchround.data.document_types import BoolArray, DataError, TokenIds
from torchround.layer import IGNORED_LABEL, MicroBatch, longest_document, most_documents
from torchround.planning.partition import split_evenly


@dataclass(frozen=True)
class TokenPiece:
    """The tokens `[n]` of a piece of a document.

    `starts_document` is False if it continues the piece before it. `learn` `[n]` marks the tokens that are a label of
    the position before them; None marks all.
    """

    tokens: TokenIds
    starts_document: bool
    learn: BoolArray | None = None
    ends_document: bool = True


@dataclass(frozen=True)
class PackedSequence:
    """One row of a batch, all `[T]`: tokens and labels as int32, and which tokens begin a document or the sequence.

    Token ids and `IGNORED_LABEL` fit into 32 bits: with 9 bytes per token, many rows can wait to be shuffled.
    """

    tokens: npt.NDArray[np.int32]
    labels: npt.NDArray[np.int32]
    begins: BoolArray

    @property
    def positions(self) -> TokenIds:
        """Distance of each token from the beginning of its document or of the sequence."""
        index = np.arange(len(self.begins), dtype=np.int64)
        return index - np.maximum.accumulate(np.where(self.begins, index, 0))

    @property
    def document_ids(self) -> TokenIds:
        """Number of each token's document in the sequence, from 0."""
        return np.cumsum(self.begins, dtype=np.int64) - 1


def pack_sequence(run: TokenIds, seq_len: int, pad_id: int) -> PackedSequence:
    """Pack the first `seq_len` tokens of a stream as one row.

    `run` `[3, n]` has the tokens, which of them start a document, and which are learnt. A shorter stream, at the end of
    the data, is filled up with `pad_id` as one more document whose labels are ignored.
    """
    missing = seq_len + 1 - run.shape[1]  # the label of the last position is one token further
    if missing > 0:
        padding = np.zeros((3, missing), dtype=np.int64)
        padding[0], padding[1, 0] = pad_id, 1
        run = np.concatenate([run, padding], axis=1)
    tokens, starts, learn = run[0], run[1] != 0, run[2] != 0
    begins = starts[:seq_len].copy()
    begins[0] = True  # a document that continues from the sequence before is a document of its own here
    following = slice(1, seq_len + 1)
    is_label = learn[following] & ~starts[following]
    labels = np.where(is_label, tokens[following], IGNORED_LABEL)
    return PackedSequence(tokens[:seq_len].astype(np.int32), labels.astype(np.int32), begins)


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
        super().reset(initial_state)
        state = initial_state or {"tokens": [], "reader": None}
        tokens = np.asarray(state["tokens"], dtype=np.int64)
        learn = np.asarray(state.get("learn", np.ones(len(tokens))), dtype=np.int64)
        self._run = np.stack([tokens, np.zeros_like(tokens), learn])
        self._failed = False
        self._source.reset(state["reader"])

    def get_state(self) -> dict[str, Any]:
        """Save the tokens left `[n]`, which of them are learnt if not all are, and the reader's state."""
        # Document starts need no place in it: a piece is taken only when the others do not fill a sequence, so all
        # tokens left are of the last piece. A document can begin only at the first, where a sequence begins anyway.
        state = {"tokens": self._run[0], "reader": self._source.state_dict()}
        return state if self._run[2].all() else {**state, "learn": self._run[2]}

    def next(self) -> PackedSequence | DataError:
        error = self._fill()
        if error is not None:
            return error
        if self._failed or not self._run.shape[1]:
            raise StopIteration
        row = pack_sequence(self._run, self._seq_len, self._pad_id)
        self._run = self._run[:, self._seq_len :]
        return row

    def _fill(self) -> DataError | None:
        """Take pieces until the sequence and the label of its last token are complete, or the data ends."""
        runs = [self._run]
        wanted = self._seq_len + 1 - self._run.shape[1]
        while wanted > 0 and not self._failed:
            try:
                piece = next(self._source)
            except StopIteration:
                break
            if isinstance(piece, DataError):
                self._failed = True
                return piece
            starts = np.zeros_like(piece.tokens)
            starts[:1] = piece.starts_document
            runs.append(np.stack([piece.tokens, starts, learnt_mask(piece)]))
            wanted -= len(piece.tokens)
        # Joined once: joining piece by piece would copy the growing run each time.
        self._run = np.concatenate(runs, axis=1)
        return None


def learnt_mask(piece: TokenPiece) -> BoolArray:
    return np.ones(len(piece.tokens), dtype=np.bool_) if piece.learn is None else piece.learn


# Batches.


class Batches(BaseNode[MicroBatch | DataError]):
    """Batches `[G, T]` of G sequences each; fewer in the last batch of limited data.

    An error takes the place of the batch that it falls into. Nothing is kept between batches, so the state of `source`
    is the whole state.
    """

    def __init__(self, source: BaseNode[PackedSequence | DataError], global_batch_size: int) -> None:
        super().__init__()
        self._source = source
        self._global_batch_size = global_batch_size

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._source.reset(initial_state)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._source.state_dict()
        return state

    def next(self) -> MicroBatch | DataError:
        # A bad record costs its whole batch: the position before it lets a run repeat the batch once it is repaired.
        rows: list[PackedSequence] = []
        for row in islice(self._source, self._global_batch_size):
            if isinstance(row, DataError):
                return row
            rows.append(row)
        if not rows:
            raise StopIteration
        return stack(rows)


def progress_so_far(position: dict[str, Any]) -> dict[str, Any]:
    """Find the `reader` state of a position, and its number of `long` documents.

    A packer that has to pack a group or a window again keeps them apart from the state that it starts from.
    """
    so_far: dict[str, Any] = position.get("so_far") or {"reader": position["reader"], "long": 0}
    return so_far


def stack(rows: Sequence[PackedSequence]) -> MicroBatch:
    """Stack G sequences into tensors `[G, T]` int64 on the CPU."""
    names = ("tokens", "labels", "positions", "document_ids")
    columns = (np.stack([getattr(row, name) for row in rows]).astype(np.int64, copy=False) for name in names)
    return MicroBatch(*map(torch.from_numpy, columns))


def cut(batch: MicroBatch, micro_batch_size: int) -> list[MicroBatch]:
    """Cut the G sequences of `batch` into M = ceil(G / micro_batch_size) micro-batches, in order.

    If G does not divide evenly, the first micro-batches hold one sequence more (PACI appendix B). They are views, and
    each knows the most documents in any sequence of the whole batch, and the longest of them.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    sequences = batch.tokens.shape[0]
    parts = split_evenly(sequences, -(-sequences // micro_batch_size))
    # Counted over the whole batch: shapes of compiled layers would otherwise depend on the cut.
    ids = batch.document_ids
    whole = replace(batch, max_documents=most_documents(ids), longest_document=longest_document(ids))
    return [whole.rebuild()(tensor[part.start : part.stop] for tensor in batch.tensors()) for part in parts]


def num_tokens(batch: MicroBatch, pad_id: int) -> int:
    """Count the tokens of the data in a batch, without padding.

    Padding is the last document of a sequence if all its tokens are `pad_id` and none is learnt. The id alone does
    not tell: some vocabularies pad with a token that data also contains.
    """
    is_last = batch.document_ids == batch.document_ids[:, -1:]
    other = is_last & ((batch.tokens != pad_id) | (batch.labels != IGNORED_LABEL))
    is_padding = is_last & ~other.any(dim=1, keepdim=True)
    return int((~is_padding).sum())
