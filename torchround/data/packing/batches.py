"""Turns packed sequences into the batch of a step, and that batch into its micro-batches.

It also notices batches that have a document twice, because an epoch is too small to fill them.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from torchround.data.errors import DataError
from torchround.data.packing.contiguous import PackedSequence
from torchround.layer import IGNORED_LABEL, MicroBatch, longest_document, most_documents
from torchround.planning.partition import split_evenly
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)


class Batches(BaseNode[MicroBatch | DataError]):
    """Batches `[G, T]` of G sequences each; fewer in the last batch of limited data.

    An error takes the place of the batch that it falls into. Nothing is kept between batches, so the state of `source`
    is the whole state. `copies` looks at each batch.
    """

    def __init__(
        self, source: BaseNode[PackedSequence | DataError], global_batch_size: int, copies: "CopyWatch"
    ) -> None:
        super().__init__()
        self._source = source
        self._global_batch_size = global_batch_size
        self._copies = copies

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the start, or at the saved state."""
        super().reset(initial_state)
        self._source.reset(initial_state)

    def get_state(self) -> dict[str, Any]:
        """Return the state of the source."""
        state: dict[str, Any] = self._source.state_dict()
        return state

    def next(self) -> MicroBatch | DataError:
        """Return the next batch. Raises `StopIteration` when no sequence is left."""
        # A bad record costs its whole batch: the position before it lets a run repeat the batch once it is repaired.
        rows: list[PackedSequence] = []
        for row in islice(self._source, self._global_batch_size):
            if isinstance(row, DataError):
                return row
            rows.append(row)
        if not rows:
            raise StopIteration
        self._copies.look(rows)
        return stack(rows)


class CopyWatch:
    """Looks for documents of different epochs that are the same, until it has found some and warned once.

    `names` has the name of each source. With several streams, each batch is one stream's part of a whole one.
    """

    def __init__(self, names: Sequence[str], num_streams: int = 1) -> None:
        self._names = names
        self._num_streams = num_streams
        self._has_warned = False

    def look(self, rows: Sequence[PackedSequence]) -> None:
        """Warn if a document comes from two epochs in the sequences of one batch."""
        # Most batches have documents of one epoch of each source: nothing is compared then.
        if self._has_warned or not self._mixes_epochs(rows):
            return
        epochs: dict[tuple[int, bytes], set[int]] = {}
        for source, epoch, tokens in self._documents(rows):
            epochs.setdefault((source, tokens), set()).add(epoch)
        repeated = [source for (source, _), found in epochs.items() if len(found) > 1]
        if repeated:
            self._has_warned = True
            batch, fewer = f"a batch of {len(rows)} sequences", "a smaller training.global_batch_size"
            if self._num_streams > 1:
                batch = f"a data stream's part of a batch, {len(rows)} sequences,"
                fewer += ", fewer data.streams"
            text = (
                f"{batch} has {len(repeated)} documents more than once, from different "
                f"epochs of source {self._names[repeated[0]]!r}: an epoch of it has too few documents for a batch; "
                f"{fewer} or more data keeps the copies apart (shown once)"
            )
            logger.warning("%s", terminal_safe(text))

    def _mixes_epochs(self, rows: Sequence[PackedSequence]) -> bool:
        origins = {origin for row in rows for origin in row.origins if origin[1] >= 0}
        return len(origins) > len({source for source, _ in origins})

    def _documents(self, rows: Sequence[PackedSequence]) -> Iterator[tuple[int, int, bytes]]:
        """Yield source, epoch and tokens of each document whose epoch is known."""
        for row in rows:
            starts = [*np.flatnonzero(row.positions == 0).tolist(), len(row.tokens)]
            for number, (source, epoch) in enumerate(row.origins):
                if epoch >= 0:
                    yield source, epoch, row.tokens[starts[number] : starts[number + 1]].tobytes()


def packing_state(position: dict[str, Any]) -> dict[str, Any]:
    """Return the packer's part of a position, which holds more if sequences are shuffled."""
    state: dict[str, Any] = position.get("packing", position)
    return state


def with_packing_state(position: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of `position` with another packer's part."""
    return {**position, "packing": state} if "packing" in position else state


def progress_so_far(position: dict[str, Any]) -> dict[str, Any]:
    """Return the `reader` state of a position, and its number of `long` documents.

    A packer that has to pack a group or a window again keeps them apart from the state that it starts from.
    """
    so_far: dict[str, Any] = position.get("so_far") or {"reader": position["reader"], "long": 0}
    return so_far


def stack(rows: Sequence[PackedSequence]) -> MicroBatch:
    """Stack G sequences into tensors `[G, T]` int64 on the CPU."""
    return MicroBatch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        document_ids=torch.from_numpy(np.stack([row.document_ids for row in rows])),
    )


def padding_sequences(count: int, seq_len: int, pad_id: int) -> MicroBatch:
    """Return sequences `[count, seq_len]` of padding alone, each of one document without a label."""
    tokens = torch.full((count, seq_len), pad_id, dtype=torch.int64)
    return MicroBatch(
        tokens=tokens,
        labels=torch.full_like(tokens, IGNORED_LABEL),
        positions=torch.arange(seq_len).repeat(count, 1),
        document_ids=torch.zeros_like(tokens),
    )


def cut(batch: MicroBatch, micro_batch_size: int) -> list[MicroBatch]:
    """Cut the G sequences of `batch` into M = ceil(G / micro_batch_size) micro-batches, in order.

    If G does not divide evenly, the first micro-batches hold one sequence more (PACI appendix B). They are views, and
    each knows the most documents in any sequence of the whole batch, and the longest of them.
    """
    parts = micro_batch_rows(batch.tokens.shape[0], micro_batch_size)
    # Counted over the whole batch: shapes of compiled layers would otherwise depend on the cut.
    ids = batch.document_ids
    whole = replace(batch, max_documents=most_documents(ids), longest_document=longest_document(ids))
    return [
        whole.with_tensors(tensor[part.start : part.stop] for tensor in batch.tensors()) for part in parts
    ]


def micro_batch_rows(sequences: int, micro_batch_size: int) -> list[range]:
    """Return which of a batch's sequences each micro-batch holds. Raises `ValueError` for a size below 1."""
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    return split_evenly(sequences, -(-sequences // micro_batch_size))


def num_tokens(batch: MicroBatch, pad_id: int) -> int:
    """Count the tokens of the data in a batch, without padding.

    Padding is the last document of a sequence if all its tokens are `pad_id` and none is learnt. The id alone does
    not tell: some vocabularies pad with a token that data also contains.
    """
    is_last = batch.document_ids == batch.document_ids[:, -1:]
    other = is_last & ((batch.tokens != pad_id) | (batch.labels != IGNORED_LABEL))
    is_padding = is_last & ~other.any(dim=1, keepdim=True)
    return int((~is_padding).sum())
