"""Rows of packed tokens to the batch of a step, and that batch to its micro-batches."""

from collections.abc import Sequence

import numpy as np
import torch

from torchround.data.errors import DataError
from torchround.data.packing import PackedSequence
from torchround.layer import MicroBatch
from torchround.pipeline.schedule import split_evenly


def collate(rows: Sequence[PackedSequence | DataError]) -> MicroBatch | DataError:
    """G sequences as tensors `[G, T]` int64 on the CPU; an error among them takes the place of the batch."""
    packed: list[PackedSequence] = []
    for row in rows:
        if isinstance(row, DataError):
            return row
        packed.append(row)
    return MicroBatch(
        tokens=torch.from_numpy(np.stack([row.tokens for row in packed])),
        labels=torch.from_numpy(np.stack([row.labels for row in packed])),
        positions=torch.from_numpy(np.stack([row.positions for row in packed])),
        document_ids=torch.from_numpy(np.stack([row.document_ids for row in packed])),
    )


def cut(batch: MicroBatch, micro_batch_size: int) -> list[MicroBatch]:
    """The G sequences of `batch` as M = ceil(G / micro_batch_size) micro-batches, in order.

    Where G does not divide evenly the first ones hold one sequence more (PACI appendix B). They are views.
    """
    if micro_batch_size < 1:
        raise ValueError(f"micro_batch_size is {micro_batch_size}; it must be at least 1")
    sequences = batch.tokens.shape[0]
    parts = split_evenly(sequences, -(-sequences // micro_batch_size))
    return [MicroBatch(*(tensor[part.start : part.stop] for tensor in batch.tensors())) for part in parts]
