"""Counted launches, bytes and FLOPs: attention inside its window, and a head within its goal."""

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import count_layers, counted_model, missed_goals
from torchround.accelerators import CudaKind
from torchround.layer import MicroBatch
from torchround.models import FAMILIES


def counted_layers(model, sequences, tokens):
    integers = torch.empty(sequences, tokens, dtype=torch.int64, device="meta")
    micro_batch = MicroBatch(integers, integers, integers, integers, max_documents=3)
    return count_layers(model, micro_batch, torch.bfloat16, CudaKind((9, 0)))


@pytest.mark.parametrize("window", [None, 16])
def test_attention_counts_the_causal_pairs_inside_the_window(window):
    batch, tokens, heads, channels = 2, 512, 4, 32  # long enough for one call of the kernel in backward
    sizes = {"num_heads": heads, "head_dim": channels, "window": window or tokens}
    model = FAMILIES["gpt_oss"].build(FAMILIES["gpt_oss"].config_from_flavor("debug", **sizes))
    block = counted_layers(model, batch, tokens)[1]
    pairs = sum(min(position + 1, window or tokens) for position in range(tokens))
    assert block.forward.attention_flops == 4 * batch * pairs * heads * channels
    assert block.backward.attention_flops == 2.5 * block.forward.attention_flops


def test_the_head_stays_within_its_bytes(monkeypatch):
    """In chunks of 256 tokens it moved 242 GB. The goals are those of the first card."""
    monkeypatch.setattr(kernels, "CARDS", kernels.CARDS[:1])
    assert missed_goals({"models": [counted_model("qwen3:1.7B", 4, 2048, 8)]}) == []
