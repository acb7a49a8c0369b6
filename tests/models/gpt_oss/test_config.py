"""GPT-OSS flavors against the published sizes, and the reading of `config.json`."""

import math

import pytest
import torch
from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from torchround.models import FAMILIES, ModelConfigError
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import inverse_frequencies

GPT_OSS = FAMILIES["gpt_oss"]

# name: layers, hidden, heads, kv heads, head dim, FFN, vocabulary, experts, chosen, parameters.
# From the released config.json files; the totals follow from the released tensors' shapes.
PUBLISHED = {
    "20B": (24, 2880, 64, 8, 64, 2880, 201088, 32, 4, 20_914_757_184),
    "120B": (36, 2880, 64, 8, 64, 2880, 201088, 128, 4, 116_829_156_672),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flavor_has_the_published_shape_and_parameter_count(name, tools):
    config = GPT_OSS.config_from_flavor(name)
    *shape, experts, chosen, total = PUBLISHED[name]
    found = [config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim]
    assert [*found, config.ffn_size, config.vocab_size] == shape
    assert config.moe == MoEShape(experts, chosen, 2880)
    assert not config.tied_embeddings and config.norm_eps == 1e-5
    stored = tools.stored_parameters(GPT_OSS.build(config))
    assert sum(parameter.numel() for parameter in stored.values()) == total


def test_flavors_that_are_not_in_the_published_list_are_debug_ones():
    assert set(GPT_OSS.flavors) - set(PUBLISHED) == {"debug"}


def test_every_other_block_slides_from_the_first_on():
    config = GPT_OSS.flavors["20B"]
    assert [config.window_of(index) for index in range(4)] == [128, None, 128, None]


def hf_content(**changes):
    """A config.json as the released GPT-OSS-20B has it."""
    content = {
        "model_type": "gpt_oss",
        "attention_bias": True,
        "attention_dropout": 0.0,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "output_router_logits": False,
        "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "router_aux_loss_coef": 0.9,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
    }
    return {**content, **changes}


def test_the_released_config_file_gives_the_flavor():
    assert GPT_OSS.config_from_hf(hf_content()) == GPT_OSS.flavors["20B"]


def test_a_config_written_by_todays_transformers_gives_the_same():
    content = hf_content()
    del content["quantization_config"]
    assert GPT_OSS.config_from_hf(GptOssConfig(**content).to_dict()) == GPT_OSS.flavors["20B"]


def test_yarn_frequencies_and_magnitude_equal_those_of_transformers():
    content = hf_content()
    del content["quantization_config"]
    reference = GptOssRotaryEmbedding(GptOssConfig(**content))
    rope = GPT_OSS.flavors["20B"].rope
    found = inverse_frequencies(rope, 64, torch.device("cpu"))
    # The same formula in fp32: at most 16 roundings of 2^-24.
    torch.testing.assert_close(found, reference.inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(reference.attention_scaling) == pytest.approx(0.1 * math.log(32) + 1)


def test_another_order_of_windows_is_kept():
    config = GPT_OSS.config_from_hf(hf_content(layer_types=["full_attention"] * 23 + ["sliding_attention"]))
    assert [config.window_of(index) for index in (0, 1, 23)] == [None, None, 128]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "llama"}, "model_type = 'llama' is not supported, only 'gpt_oss'"),
        ({"attention_bias": False}, "attention_bias = False"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types = .*chunked_attention"),
        ({"layer_types": ["full_attention"]}, "sliding names 1 blocks, num_layers = 24"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear' .* only 'yarn'"),
        ({"rope_scaling": hf_content()["rope_scaling"] | {"mscale": 0.7}}, "mscale = 0.7"),
        ({"sliding_window": 0}, "window = 0"),
        ({"num_local_experts": None}, "no 'num_local_experts'"),
    ],
)
def test_unsupported_values_are_refused_by_name_and_value(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        GPT_OSS.config_from_hf(hf_content(**changes))
