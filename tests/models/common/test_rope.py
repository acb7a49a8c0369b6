"""Rotary embeddings: relative positions, and the published frequency scaling."""

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from torchround.models.common.rope import Llama3Scaling, Rope, YarnScaling, inverse_frequencies, rotate, rotation

LLAMA_31 = Rope(500000.0, Llama3Scaling(factor=8.0))


@pytest.mark.parametrize(("head_dim", "factor"), [(64, 32.0), (128, 8.0)])
def test_llama3_frequencies_equal_those_of_transformers(head_dim, factor):
    parameters = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0}
    parameters |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    reference = LlamaRotaryEmbedding(LlamaConfig(head_dim=head_dim, rope_parameters=parameters))
    found = inverse_frequencies(Rope(500000.0, Llama3Scaling(factor)), head_dim, torch.device("cpu"))
    # The same formula in fp32: at most 16 roundings of 2^-24.
    torch.testing.assert_close(found, reference.inv_freq, rtol=1e-6, atol=0)


def test_bf16_heads_are_rotated_in_fp32_and_rounded_once():
    heads = torch.randn(1, 4, 2, 16).bfloat16()
    cos, sin = rotation(LLAMA_31, 16, torch.tensor([[0, 1, 5000, 100000]]))
    assert cos.dtype == torch.float32
    assert torch.equal(rotate(heads, cos, sin), rotate(heads.float(), cos, sin).bfloat16())


@pytest.mark.parametrize(
    ("scaling", "stated", "known"),
    [
        (None, 8192, 8192),
        (Llama3Scaling(8.0, original_positions=8192), 131072, 131072),  # Llama 3.1 states more than the product
        (Llama3Scaling(32.0, original_positions=8192), 131072, 131072),  # Llama 3.2 states less
        (Llama3Scaling(4.0, original_positions=8192), 8192, 32768),  # stretched by its user
        (YarnScaling(32.0, original_positions=4096), 131072, 131072),  # GPT-OSS
        (YarnScaling(4.0, original_positions=32768), 40960, 131072),  # Qwen3 as its card says to stretch it
    ],
)
def test_the_known_positions_are_the_stated_ones_or_what_a_scaling_makes_of_the_original_ones(scaling, stated, known):
    assert Rope(1e4, scaling).known_positions(stated) == known
