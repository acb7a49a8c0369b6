"""Initial weights depend on a layer's generator and shapes only, and the embedding's gradient adds up in fp32."""

import pytest
import torch

from torchround.layer import MicroBatch
from torchround.models import FAMILIES, OWN_FAMILIES
from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import Embedding
from torchround.models.common.primitives import BLOCK_ELEMENTS, init_embedding_, init_linear_
from torchround.models.common.rope import Rope


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("fill", [init_linear_, init_embedding_])
def test_16_bit_storage_gets_the_fp32_weights_rounded(fill):
    wide, narrow = torch.empty(40, 30), torch.empty(40, 30, dtype=torch.bfloat16)
    fill(wide, seeded())
    fill(narrow, seeded())
    assert torch.equal(narrow, wide.bfloat16())


def test_linear_weights_are_a_truncated_normal_of_the_scaled_width():
    weight = torch.empty(500, 400)
    init_linear_(weight, seeded(), scale=0.5)
    # A normal cut at 3 standard deviations keeps 0.9866 of its width; 200,000 draws know it to 0.2 %.
    assert weight.std().item() == pytest.approx(0.02 * 0.5 * 0.9866, rel=0.01)
    assert weight.abs().max() <= 3 * 0.02 * 0.5


def test_embedding_weights_are_normal_with_tails():
    weight = torch.empty(500, 400)
    init_embedding_(weight, seeded())
    assert weight.std().item() == pytest.approx(0.02, rel=0.01)
    assert weight.abs().max() > 4 * 0.02


def test_every_block_is_filled_with_numbers_of_its_own():
    weight = torch.full((BLOCK_ELEMENTS + 64,), torch.nan)
    init_linear_(weight, seeded())
    assert weight.isfinite().all()
    assert not torch.equal(weight[:64], weight[BLOCK_ELEMENTS:])


def test_storage_that_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match="contiguous"):
        init_linear_(torch.empty(4, 8).T, seeded())


@pytest.mark.parametrize("family", OWN_FAMILIES)
def test_layers_initialise_the_same_in_any_order_and_leave_the_global_generator_alone(family, tools):
    config = FAMILIES[family].config_from_flavor("debug")
    state = torch.random.get_rng_state()
    forwards = tools.materialise(FAMILIES[family].build(config))
    backwards = tools.materialise(FAMILIES[family].build(config), reverse=True)
    assert torch.equal(torch.random.get_rng_state(), state)
    pairs = zip(tools.stored_parameters(forwards).items(), tools.stored_parameters(backwards).items(), strict=True)
    for (name, one), (other_name, other) in pairs:
        assert name == other_name and torch.equal(one, other), name
        assert one.isfinite().all(), f"{name} was not initialised"


@pytest.mark.parametrize("family", OWN_FAMILIES)
def test_projections_into_the_residual_stream_are_scaled_down_by_depth(family, tools):
    config = FAMILIES[family].config_from_flavor("debug")
    stored = tools.stored_parameters(tools.materialise(FAMILIES[family].build(config)))
    scale = (2 * config.num_layers) ** -0.5
    into, out_of = stored["block.1.attention.query.weight"], stored["block.1.attention.output.weight"]
    assert (out_of.std() / into.std()).item() == pytest.approx(scale, rel=0.05)


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
