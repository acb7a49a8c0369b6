"""Qwen3 flavors against the published sizes, and the reading of `config.json`."""

import pytest
from transformers import Qwen3Config, Qwen3MoeConfig

from torchround.models import FAMILIES, ModelConfigError
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import Rope

QWEN3 = FAMILIES["qwen3"]

# name: layers, hidden, heads, kv heads, head dim, FFN, vocabulary, tied, experts (number, chosen, FFN), parameters.
# From the released config.json files; the totals follow from the released tensors' shapes.
PUBLISHED = {
    "0.6B": (28, 1024, 16, 8, 128, 3072, 151936, True, None, 596_049_920),
    "1.7B": (28, 2048, 16, 8, 128, 6144, 151936, True, None, 1_720_574_976),
    "4B": (36, 2560, 32, 8, 128, 9728, 151936, True, None, 4_022_468_096),
    "8B": (36, 4096, 32, 8, 128, 12288, 151936, False, None, 8_190_735_360),
    "14B": (40, 5120, 40, 8, 128, 17408, 151936, False, None, 14_768_307_200),
    "32B": (64, 5120, 64, 8, 128, 25600, 151936, False, None, 32_762_123_264),
    "30B-A3B": (48, 2048, 32, 4, 128, 6144, 151936, False, (128, 8, 768), 30_532_122_624),
    "235B-A22B": (94, 4096, 64, 4, 128, 12288, 151936, False, (128, 8, 1536), 235_093_634_560),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flavor_has_the_published_shape_and_parameter_count(name, tools):
    config = QWEN3.config_from_flavor(name)
    *shape, tied, experts, total = PUBLISHED[name]
    found = [config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads, config.head_dim]
    assert [*found, config.ffn_size, config.vocab_size] == shape
    assert config.tied_embeddings == tied and config.norm_eps == 1e-6
    assert config.rope == Rope(1000000.0) and config.max_positions == 40960
    assert config.moe == (MoEShape(*experts, normalised=True) if experts else None)
    stored = tools.stored_parameters(QWEN3.build(config))
    assert sum(parameter.numel() for parameter in stored.values()) == total


def test_flavors_that_are_not_in_the_published_list_are_debug_ones():
    assert set(QWEN3.flavors) - set(PUBLISHED) == {"debug", "debug_moe"}


def hf_content(**changes):
    """A config.json as the released Qwen3-30B-A3B has it."""
    content = {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "output_router_logits": False,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    return {**content, **changes}


def test_the_released_config_file_gives_the_flavor():
    assert QWEN3.config_from_hf(hf_content()) == QWEN3.flavors["30B-A3B"]


def test_a_config_written_by_todays_transformers_gives_the_same():
    assert QWEN3.config_from_hf(Qwen3MoeConfig(**hf_content()).to_dict()) == QWEN3.flavors["30B-A3B"]


def test_a_dense_config_gives_the_dense_flavor():
    content = Qwen3Config(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1000000.0},
    ).to_dict()
    assert QWEN3.config_from_hf(content) == QWEN3.flavors["0.6B"]


def test_the_balance_penalty_is_on_where_the_file_asks_for_it():
    config = QWEN3.config_from_hf(hf_content(output_router_logits=True))
    assert config.moe.balance_coefficient == 0.001


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"model_type": "qwen2"}, "model_type = 'qwen2' is not supported, only 'qwen3' or 'qwen3_moe'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ({"num_experts_per_tok": 200}, "num_chosen = 200"),
        ({"num_experts": None}, "no 'num_experts'"),
    ],
)
def test_unsupported_values_are_refused_by_name_and_value(changes, message):
    with pytest.raises(ModelConfigError, match=message):
        QWEN3.config_from_hf(hf_content(**changes))
