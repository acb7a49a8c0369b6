"""Llama 3 flavors against the published sizes, and the reading of `config.json`."""

import pytest
from transformers import LlamaConfig

from torchround.models import FAMILIES, ModelConfigError
from torchround.models.common.rope import Llama3Scaling, Rope

LLAMA3 = FAMILIES["llama3"]

# name: layers, hidden, heads, kv heads, head dim, FFN, vocabulary, tied, RoPE factor (0: none), parameters.
# From the released config.json files and model cards; the totals follow from the released tensors' shapes.
PUBLISHED = {
    "3-8B": (32, 4096, 32, 8, 128, 14336, 128256, False, 0, 8_030_261_248),
    "3-70B": (80, 8192, 64, 8, 128, 28672, 128256, False, 0, 70_553_706_496),
    "3.1-8B": (32, 4096, 32, 8, 128, 14336, 128256, False, 8, 8_030_261_248),
    "3.1-70B": (80, 8192, 64, 8, 128, 28672, 128256, False, 8, 70_553_706_496),
    "3.1-405B": (126, 16384, 128, 8, 128, 53248, 128256, False, 8, 405_853_388_800),
    "3.2-1B": (16, 2048, 32, 8, 64, 8192, 128256, True, 32, 1_235_814_400),
    "3.2-3B": (28, 3072, 24, 8, 128, 8192, 128256, True, 32, 3_212_749_824),
    "3.3-70B": (80, 8192, 64, 8, 128, 28672, 128256, False, 8, 70_553_706_496),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flavor_has_the_published_shape_and_parameter_count(name, tools):
    config = LLAMA3.config_from_flavor(name)
    *shape, tied, factor, total = PUBLISHED[name]
    found = [config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim]
    assert [*found, config.ffn_size, config.vocab_size] == shape
    assert config.tied_embeddings == tied and config.norm_eps == 1e-5
    scaling = Llama3Scaling(factor, 1.0, 4.0, 8192) if factor else None
    assert config.rope == Rope(500000.0, scaling)
    assert config.max_positions == (131072 if factor else 8192)
    stored = tools.stored_parameters(LLAMA3.build(config))
    assert sum(parameter.numel() for parameter in stored.values()) == total


def test_flavors_that_are_not_in_the_published_list_are_debug_ones():
    assert set(LLAMA3.flavors) - set(PUBLISHED) == {"debug", "debug_25m"}


def hf_content(**changes):
    """A config.json as the released Llama 3.2 1B has it (RoPE in the older two keys)."""
    content = {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "intermediate_size": 8192,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "tie_word_embeddings": True,
    }
    return {**content, **changes}


def test_the_released_config_file_gives_the_flavor():
    assert LLAMA3.config_from_hf(hf_content()) == LLAMA3.flavors["3.2-1B"]


def test_a_config_written_by_todays_transformers_gives_the_same():
    content = LlamaConfig(**hf_content()).to_dict()
    assert "rope_parameters" in content
    assert LLAMA3.config_from_hf(content) == LLAMA3.flavors["3.2-1B"]


def test_absent_optional_keys_have_the_format_s_defaults():
    content = hf_content(num_key_value_heads=None, head_dim=None, rope_scaling=None)
    del content["tie_word_embeddings"]
    config = LLAMA3.config_from_hf(content)
    assert (config.num_kv_heads, config.head_dim, config.tied_embeddings) == (32, 64, False)
    assert config.rope == Rope(500000.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "mistral"}, "model_type = 'mistral' is not supported, only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported, only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type = 'yarn' .* 'default' or 'llama3'"),
        ({"rope_scaling": {"type": "linear", "factor": 4}}, "rope_type = 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "no 'factor'"),
        ({"hidden_size": None}, "no 'hidden_size'"),
        ({"hidden_size": "2048"}, "hidden_size = '2048' has the wrong type"),
        ({"vocab_size": True}, "vocab_size = True has the wrong type"),
        ({"num_key_value_heads": 5}, "num_heads = 32 is not a multiple of num_kv_heads = 5"),
    ],
)
def test_unsupported_values_are_refused_by_name_and_value(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        LLAMA3.config_from_hf(hf_content(**changes))
