"""The small Llama of the studies, with a token for each byte, and its batches of installed text."""

from typing import Protocol

import torch
from torch import Tensor

from torchround.layer import MicroBatch
from torchround.models.common.config import TransformerConfig
from torchround.models.common.rope import Rope


class ByteModelSize(Protocol):
    """Sizes of the model and of its batches; the head has weights of its own."""

    @property
    def blocks(self) -> int: ...
    @property
    def width(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def ffn_size(self) -> int: ...
    @property
    def sequences(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def held_out_sequences(self) -> int: ...


def model_config(size: ByteModelSize) -> TransformerConfig:
    """Return the shape of the model: one token for each byte."""
    return TransformerConfig(
        num_layers=size.blocks,
        hidden_size=size.width,
        num_heads=size.heads,
        num_kv_heads=size.heads,
        head_dim=size.width // size.heads,
        ffn_size=size.ffn_size,
        vocab_size=256,
        rope=Rope(10000.0),
        max_positions=8192,
    )


def held_out_batches(text: Tensor, size: ByteModelSize) -> list[MicroBatch]:
    """Cut the held-out text at even distances into micro-batches of the size of training."""
    last = len(text) - size.tokens - 1
    starts = torch.linspace(0, last, size.held_out_sequences, dtype=torch.float64).long()
    return [draw_batch(text, part, size) for part in starts.split(size.sequences)]


def draw_batch(text: Tensor, starts: Tensor, size: ByteModelSize) -> MicroBatch:
    """Make a micro-batch of the sequences that begin at `starts` (`[B]`) in `text` (`[bytes]` uint8)."""
    drawn = torch.stack([text[start : start + size.tokens + 1] for start in starts.tolist()]).long()
    positions = torch.arange(size.tokens).expand(len(starts), -1).contiguous()
    return MicroBatch(
        drawn[:, :-1].contiguous(),
        drawn[:, 1:].contiguous(),
        positions,
        torch.zeros_like(positions),
        max_documents=1,
    )
