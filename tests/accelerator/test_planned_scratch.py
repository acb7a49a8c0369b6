"""A block's forward and backward on an accelerator need no more memory than the block counts for such a device."""

import copy

import pytest
import torch

from tests.support.small_decoders import decoder
from torchround.layer import MicroBatch
from torchround.models.common import chunks
from torchround.models.common.feed_forward import MoEShape

WIDTH, TOKENS = 128, 256
SHAPE = {"num_layers": 2, "hidden_size": WIDTH, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
# What the counts leave out: tensors of a few numbers per token.
MARGIN = 1.02


def model_of(family, ffn_size):
    has_experts = family in ("experts", "gpt_oss")
    size = {"moe": MoEShape(4, 2, ffn_size)} if has_experts else {"ffn_size": ffn_size}
    return decoder("qwen3" if family == "experts" else family, "debug", **SHAPE, **size)


@pytest.mark.parametrize("family", ["llama3", "qwen3", "experts", "gpt_oss"])
@pytest.mark.parametrize(
    ("ffn_size", "documents", "chunk", "slice_tokens"),
    [(128, 64, 256, 256), (512, 1, 256, 256), (512, 1, 48, 256), (512, 1, 48, 16), (64, 1, 128, 16)],
)
def test_a_block_needs_no_more_than_it_counts(
    simulator, kind, family, ffn_size, documents, chunk, slice_tokens, monkeypatch
):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(chunks, "SLICE_ELEMENTS", slice_tokens * WIDTH)
    model = model_of(family, ffn_size)
    block = copy.deepcopy(model.layers[1]).to_empty(device=kind).to(torch.bfloat16)
    for parameter in block.parameters():
        torch.nn.init.constant_(parameter, 0.02)
        parameter.grad_dtype = torch.float32
        parameter.grad = torch.zeros_like(parameter, dtype=torch.float32)
    integers = torch.zeros(1, TOKENS, dtype=torch.int64)
    positions = torch.arange(TOKENS)[None]
    ids = positions // (TOKENS // documents)
    batch = MicroBatch(*(part.to(kind) for part in (integers, integers, positions, ids)), max_documents=documents)
    hidden = torch.randn(1, TOKENS, WIDTH).to(kind, torch.bfloat16).requires_grad_()
    for _ in range(2):  # the first pass also makes what is kept for later ones
        torch.accelerator.synchronize()
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        output = block(hidden, batch)
        output.backward(torch.ones_like(output))
        torch.accelerator.synchronize()
        peak = torch.accelerator.max_memory_allocated() - before
        del output
        hidden.grad = None
    work = block.work(1, TOKENS, 2, kind)
    counted = work.activation_bytes + work.workspace_bytes
    assert peak <= MARGIN * counted, f"{peak / counted:.3f} of what is counted"
    assert work.workspace_bytes >= block.work(1, TOKENS, 2, "cuda").workspace_bytes
