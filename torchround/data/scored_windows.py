"""Micro-batches that score text: each document alone, in windows that do not overlap.

Window k of a document of n tokens reads tokens kT to (k + 1)T - 1 and predicts kT + 1 to (k + 1)T. So every token but the
first is predicted exactly once, from the tokens before it in its window. A sequence holds one window and is padded at its
end, where no causal layer sees the padding.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from torchround.config import DataTable, SourceTable
from torchround.data.document_types import TokenIds
from torchround.data.loader import check_first_records, mix_settings, open_sources
from torchround.data.packing import learnt_mask
from torchround.data.reading_order import Reader
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import tokenise
from torchround.layer import IGNORED_LABEL, MicroBatch


@dataclass(frozen=True)
class ScoredWindow:
    """A window's input tokens `[n]` and labels `[n]`, `IGNORED_LABEL` where none is scored. `ends`: its document's last."""

    tokens: TokenIds
    labels: TokenIds
    ends: bool


def scored_windows(
    sources: Sequence[SourceTable], tokenizer: Tokenizer, seq_len: int, vocab_size: int | None = None
) -> Iterator[ScoredWindow]:
    """Yield the windows of `seq_len` tokens of all documents, in the order of the files. Raises `DataError`.

    Documents are read, framed and masked as training reads them. A document of fewer than two tokens gives a window
    without tokens, so that documents can be counted.
    """
    # One pass in order; a record that cannot be used is an error, because a perplexity without it would be another one.
    data = DataTable(sources=tuple(sources), shuffle=False, epochs=1)
    opened = open_sources(data, tokenizer, vocab_size)
    check_first_records(data, opened, tokenizer)
    reader = Reader(opened, mix_settings(data, seed=0))
    reader.reset()
    tokens, learnt = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.bool_)
    for piece in reader:
        found = tokenise(tokenizer, piece)
        tokens = np.concatenate([tokens, found.tokens])
        learnt = np.concatenate([learnt, learnt_mask(found)])
        # One token more than a window must be there, because it is the label of the window's last token.
        while len(tokens) > seq_len + 1 or (piece.last and len(tokens) > 0):
            ends = len(tokens) <= seq_len + 1
            labels = np.where(learnt[1 : seq_len + 1], tokens[1 : seq_len + 1], IGNORED_LABEL)
            yield ScoredWindow(tokens[: len(labels)], labels, ends)
            kept = len(tokens) if ends else seq_len
            tokens, learnt = tokens[kept:], learnt[kept:]


def scored_batch(windows: Sequence[ScoredWindow], pad_id: int) -> MicroBatch:
    """Stack windows into a micro-batch `[B, T]`, with T the tokens of the longest. At least one window has tokens."""
    longest = max(len(window.tokens) for window in windows)
    tokens = torch.full((len(windows), longest), pad_id, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORED_LABEL)
    for row, window in enumerate(windows):
        tokens[row, : len(window.tokens)] = torch.from_numpy(window.tokens)
        labels[row, : len(window.labels)] = torch.from_numpy(window.labels)
    positions = torch.arange(longest).expand(len(windows), longest).contiguous()
    # Padding counts as the end of the document before it. A sequence of one document needs no mask.
    return MicroBatch(tokens, labels, positions, torch.zeros_like(tokens), max_documents=1)
