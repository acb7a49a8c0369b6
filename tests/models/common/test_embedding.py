"""The embedding's gradient adds up in fp32 even where the table is bf16."""

import torch

from torchround.layer import MicroBatch
from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import Embedding
from torchround.models.common.rope import Rope


def test_a_token_met_a_thousand_times_counts_a_thousand_times():
    embedding, tokens = Embedding(TransformerConfig(1, 4, 1, 1, 4, 4, 10, Rope(10000.0), 64)), torch.full((2, 500), 3)
    embedding.weight = torch.nn.Parameter(torch.randn(10, 4).bfloat16())
    embedding.weight.grad_dtype = torch.float32
    embedding.weight.grad = torch.zeros(10, 4)
    embedding(None, MicroBatch(tokens, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens))).backward(
        torch.ones(2, 500, 4, dtype=torch.bfloat16)
    )
    expected = torch.zeros(10, 4)
    expected[3] = 1000.0  # bf16 would stop at 256: it cannot hold 257
    assert torch.equal(embedding.weight.grad, expected)
