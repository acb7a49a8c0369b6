"""Rows of packed tokens to the batch of a step, and that batch to its micro-batches."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torchdata.nodes import BaseNode

from torchround.data.errors import DataError
from torchround.data.packing.contiguous import PackedSequence
from torchround.layer import IGNORED_LABEL, MicroBatch, most_documents
from torchround.pipeline.partition import split_evenly


class Batches(BaseNode[MicroBatch | DataError]):
    """G sequences at a time as one batch `[G, T]`; fewer at the end of the data.

    An error is handed on in place of the batch that it falls into. Between batches there is nothing to
    remember, so the state is the one of the node before.
    """

    def __init__(self, source: BaseNode[PackedSequence | DataError], global_batch_size: int) -> None:
        super().__init__()
        self._source = source
        self._global_batch_size = global_batch_size

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin where `initial_state` was taken."""
        super().reset(initial_state)
        self._source.reset(initial_state)

    def get_state(self) -> dict[str, Any]:
        """The packer's state."""
        state: dict[str, Any] = self._source.state_dict()
        return state

    def next(self) -> MicroBatch | DataError:
        """The next batch; `StopIteration` when no sequence is left."""
        rows: list[PackedSequence] = []
        for row in islice(self._source, self._global_batch_size):
            if isinstance(row, DataError):
                return row
            rows.append(row)
        if not rows:
            raise StopIteration
        return stack(rows)


def stack(rows: Sequence[PackedSequence]) -> MicroBatch:
    """G sequences as tensors `[G, T]` int64 on the CPU."""
    return MicroBatch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in rows])),
        labels=torch.from_numpy(np.stack([row.labels for row in rows])),
        positions=torch.from_numpy(np.stack([row.positions for row in rows])),
        document_ids=torch.from_numpy(np.stack([row.document_ids for row in rows])),
    )


def cut(batch: MicroBatch, micro_batch_size: int) -> list[MicroBatch]:
    """The G sequences of `batch` as M = ceil(G / micro_batch_size) micro-batches, in order.

    Where G does not divide evenly the first ones hold one sequence more (PACI appendix B). They are views, and
    know how many documents a sequence of the whole batch has at most.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    sequences = batch.tokens.shape[0]
    parts = split_evenly(sequences, -(-sequences // micro_batch_size))
    whole = replace(batch, max_documents=most_documents(batch.document_ids))
    return [
        whole.with_tensors(tensor[part.start : part.stop] for tensor in batch.tensors()) for part in parts
    ]


def num_tokens(batch: MicroBatch, pad_id: int) -> int:
    """Tokens of the data in a batch. Padding is none: a last document of a sequence that is nothing else.

    Some vocabularies have no token that only pads, so what is of the padding's id may be data elsewhere.
    """
    is_last = batch.document_ids == batch.document_ids[:, -1:]
    other = is_last & ((batch.tokens != pad_id) | (batch.labels != IGNORED_LABEL))
    is_padding = is_last & ~other.any(dim=1, keepdim=True)
    return int((~is_padding).sum())
