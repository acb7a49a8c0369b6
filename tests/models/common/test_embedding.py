"""The embedding's gradient adds up in fp32 even where the table is bf16."""

import torch

from tests.support.rounding import assert_close_in_sums
from torchround.layer import MicroBatch
from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import Embedding
from torchround.models.common.rope import Rope


def make_embedding(dtype):
    embedding = Embedding(TransformerConfig(1, 4, 1, 1, 4, 4, 10, Rope(10000.0), 64))
    embedding.weight = torch.nn.Parameter(torch.randn(10, 4).to(dtype))
    return embedding


def batch_of(tokens):
    return MicroBatch(tokens, tokens, torch.zeros_like(tokens), torch.zeros_like(tokens))


def test_a_token_met_a_thousand_times_counts_a_thousand_times():
    embedding, tokens = make_embedding(torch.bfloat16), torch.full((2, 500), 3)
    embedding.weight.grad_dtype = torch.float32
    embedding.weight.grad = torch.zeros(10, 4)
    embedding(None, batch_of(tokens)).backward(torch.ones(2, 500, 4, dtype=torch.bfloat16))
    expected = torch.zeros(10, 4)
    expected[3] = 1000.0  # bf16 would stop at 256: it cannot hold 257
    assert torch.equal(embedding.weight.grad, expected)


def test_gradient_equals_that_of_torchs_embedding():
    embedding, tokens = make_embedding(torch.float32), torch.randint(0, 10, (3, 7))
    upstream = torch.randn(3, 7, 4)
    embedding(None, batch_of(tokens)).backward(upstream)
    table = embedding.weight.detach().clone().requires_grad_()
    torch.nn.functional.embedding(tokens, table).backward(upstream)
    assert_close_in_sums(embedding.weight.grad, table.grad, tokens.numel())
