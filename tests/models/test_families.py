"""Families: flavors against the published sizes, the reading of `config.json`, ties, and rotary embeddings."""

import json
import math
from dataclasses import replace

import pytest
import torch
from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.support.rounding import assert_close_in_sums
from torchround.models import FAMILIES, OWN_FAMILIES, ModelConfigError
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.primitives import rotate
from torchround.models.common.rope import Llama3Scaling, Rope, YarnScaling, inverse_frequencies, rotation

LLAMA3, QWEN3, GPT_OSS = (FAMILIES[name] for name in ("llama3", "qwen3", "gpt_oss"))

# Layers, hidden, heads, kv heads, head dim, FFN, vocabulary, tied, parameters; then what the family alone has.
# From the released config.json files and model cards; the totals follow from the released tensors' shapes.
PUBLISHED = {
    # RoPE factor (0: none)
    ("llama3", "3-8B"): (32, 4096, 32, 8, 128, 14336, 128256, False, 8_030_261_248, 0),
    ("llama3", "3-70B"): (80, 8192, 64, 8, 128, 28672, 128256, False, 70_553_706_496, 0),
    ("llama3", "3.1-8B"): (32, 4096, 32, 8, 128, 14336, 128256, False, 8_030_261_248, 8),
    ("llama3", "3.1-70B"): (80, 8192, 64, 8, 128, 28672, 128256, False, 70_553_706_496, 8),
    ("llama3", "3.1-405B"): (126, 16384, 128, 8, 128, 53248, 128256, False, 405_853_388_800, 8),
    ("llama3", "3.2-1B"): (16, 2048, 32, 8, 64, 8192, 128256, True, 1_235_814_400, 32),
    ("llama3", "3.2-3B"): (28, 3072, 24, 8, 128, 8192, 128256, True, 3_212_749_824, 32),
    ("llama3", "3.3-70B"): (80, 8192, 64, 8, 128, 28672, 128256, False, 70_553_706_496, 8),
    # experts: number, chosen, FFN
    ("qwen3", "0.6B"): (28, 1024, 16, 8, 128, 3072, 151936, True, 596_049_920, None),
    ("qwen3", "1.7B"): (28, 2048, 16, 8, 128, 6144, 151936, True, 1_720_574_976, None),
    ("qwen3", "4B"): (36, 2560, 32, 8, 128, 9728, 151936, True, 4_022_468_096, None),
    ("qwen3", "8B"): (36, 4096, 32, 8, 128, 12288, 151936, False, 8_190_735_360, None),
    ("qwen3", "14B"): (40, 5120, 40, 8, 128, 17408, 151936, False, 14_768_307_200, None),
    ("qwen3", "32B"): (64, 5120, 64, 8, 128, 25600, 151936, False, 32_762_123_264, None),
    ("qwen3", "30B-A3B"): (48, 2048, 32, 4, 128, 6144, 151936, False, 30_532_122_624, (128, 8, 768)),
    ("qwen3", "235B-A22B"): (94, 4096, 64, 4, 128, 12288, 151936, False, 235_093_634_560, (128, 8, 1536)),
    ("gpt_oss", "20B"): (24, 2880, 64, 8, 64, 2880, 201088, False, 20_914_757_184, (32, 4, 2880)),
    ("gpt_oss", "120B"): (36, 2880, 64, 8, 64, 2880, 201088, False, 116_829_156_672, (128, 4, 2880)),
}


@pytest.mark.parametrize(("family", "flavor"), PUBLISHED, ids="-".join)
def test_flavor_has_the_published_shape_and_parameter_count(family, flavor, tools):
    config = FAMILIES[family].config_from_flavor(flavor)
    *shape, total, own = PUBLISHED[family, flavor]
    names = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_size", "vocab_size")
    assert [getattr(config, name) for name in (*names, "tied_embeddings")] == shape
    assert config.norm_eps == (1e-6 if family == "qwen3" else 1e-5)
    if family == "llama3":
        assert config.rope == Rope(500000.0, Llama3Scaling(own, 1.0, 4.0, 8192) if own else None)
        assert config.max_positions == (131072 if own else 8192)
    else:
        assert config.moe == (MoEShape(*own) if own else None)
    if family == "qwen3":
        assert config.rope == Rope(1000000.0) and config.max_positions == 40960
    stored = tools.stored_parameters(FAMILIES[family].build(config))
    assert sum(parameter.numel() for parameter in stored.values()) == total
    assert all(parameter.is_meta for parameter in stored.values())


# The released files of Llama 3.2 1B (RoPE in the older two keys), Qwen3-30B-A3B and GPT-OSS-20B.
RELEASED = {
    "llama3": json.loads("""{"model_type": "llama", "hidden_act": "silu", "hidden_size": 2048, "num_hidden_layers": 16,
        "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
        "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3"}, "attention_bias": false,
        "attention_dropout": 0.0, "mlp_bias": false, "tie_word_embeddings": true}"""),
    "qwen3": json.loads("""{"model_type": "qwen3_moe", "attention_bias": false, "attention_dropout": 0.0,
        "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936}"""),
    "gpt_oss": json.loads("""{"model_type": "gpt_oss", "attention_bias": true, "attention_dropout": 0.0,
        "experts_per_token": 4, "head_dim": 64, "hidden_act": "silu", "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": false, "quantization_config": {"quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "vocab_size": 201088}""")
    | {"layer_types": ["sliding_attention", "full_attention"] * 12},
}
UNQUANTISED = {key: value for key, value in RELEASED["gpt_oss"].items() if key != "quantization_config"}
SMALL = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16}
SMALL |= {"num_key_value_heads": 8, "max_position_embeddings": 40960, "tie_word_embeddings": True}
SMALL |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0}}


@pytest.mark.parametrize(
    ("family", "flavor", "content"),
    [
        ("llama3", "3.2-1B", RELEASED["llama3"]),
        ("llama3", "3.2-1B", LlamaConfig(**RELEASED["llama3"]).to_dict()),  # as today's transformers writes it
        ("qwen3", "30B-A3B", RELEASED["qwen3"]),
        ("qwen3", "30B-A3B", Qwen3MoeConfig(**RELEASED["qwen3"]).to_dict()),
        ("qwen3", "0.6B", Qwen3Config(**SMALL).to_dict()),
        ("gpt_oss", "20B", RELEASED["gpt_oss"]),
        ("gpt_oss", "20B", GptOssConfig(**UNQUANTISED).to_dict()),
    ],
)
def test_a_config_file_gives_the_flavor(family, flavor, content):
    assert FAMILIES[family].config_from_hf(content) == FAMILIES[family].flavors[flavor]


def test_absent_optional_keys_have_the_format_s_defaults():
    content = RELEASED["llama3"] | {"num_key_value_heads": None, "head_dim": None, "rope_scaling": None}
    del content["tie_word_embeddings"]
    config = LLAMA3.config_from_hf(content)
    assert (config.num_kv_heads, config.head_dim, config.tied_embeddings) == (32, 64, False)
    assert config.rope == Rope(500000.0)


def test_yarn_frequencies_and_magnitude_equal_those_of_transformers():
    reference, rope = GptOssRotaryEmbedding(GptOssConfig(**UNQUANTISED)), GPT_OSS.flavors["20B"].rope
    found = inverse_frequencies(rope, 64, torch.device("cpu"))
    # The same formula in fp32: at most 16 roundings of 2^-24.
    torch.testing.assert_close(found, reference.inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(reference.attention_scaling) == pytest.approx(0.1 * math.log(32) + 1)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama3", {"model_type": "mistral"}, "'mistral'"),
        ("llama3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("llama3", {"attention_bias": True}, "attention_bias = True"),
        ("llama3", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama3", {"attention_dropout": 0.1}, "attention_dropout = 0.1"),
        ("llama3", {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope_type = 'yarn'"),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 4}}, "rope_type = 'linear'"),
        ("llama3", {"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        ("llama3", {"hidden_size": None}, "'hidden_size'"),
        ("llama3", {"hidden_size": "2048"}, "hidden_size = '2048'"),
        ("llama3", {"vocab_size": True}, "vocab_size = True"),
        ("llama3", {"num_key_value_heads": 5}, "num_kv_heads = 5"),
        ("qwen3", {"model_type": "qwen2"}, "'qwen2'"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = True"),
        ("qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("qwen3", {"decoder_sparse_step": 2}, "decoder_sparse_step = 2"),
        ("qwen3", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\]"),
        ("qwen3", {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ("qwen3", {"num_experts_per_tok": 200}, "num_chosen = 200"),
        ("qwen3", {"num_experts": None}, "'num_experts'"),
        ("gpt_oss", {"model_type": "llama"}, "'llama'"),
        ("gpt_oss", {"attention_bias": False}, "attention_bias = False"),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 24}, "chunked_attention"),
        ("gpt_oss", {"layer_types": ["full_attention"] * 24}, "layer_types = .* is not supported"),
        ("gpt_oss", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type = 'linear'"),
        ("gpt_oss", {"rope_scaling": RELEASED["gpt_oss"]["rope_scaling"] | {"mscale": 0.7}}, "mscale = 0.7"),
        ("gpt_oss", {"sliding_window": 0}, "window = 0"),
        ("gpt_oss", {"num_local_experts": None}, "'num_local_experts'"),
    ],
)
def test_unsupported_values_are_refused_by_name_and_value(family, changes, message):
    with pytest.raises(ModelConfigError, match=message):
        FAMILIES[family].config_from_hf(RELEASED[family] | changes)


@pytest.fixture(params=OWN_FAMILIES)
def family(request):
    return FAMILIES[request.param]


def test_a_tied_parameter_gets_both_gradients_and_no_second_initialisation(family, tools):
    config = family.config_from_flavor("debug", vocab_size=40, num_layers=1, tied_embeddings=True)
    batch = tools.micro_batch([[30]], 40)
    tied = tools.materialise(family.build(config))
    before = tied.layers[0].weight.detach().clone()
    tied.layers[-1].init_weights(torch.Generator().manual_seed(9))
    assert tied.layers[-1].weight is tied.layers[0].weight and torch.equal(tied.layers[0].weight, before)
    apart = tools.materialise(family.build(replace(config, tied_embeddings=False)))
    with torch.no_grad():
        for name, parameter in tools.stored_parameters(apart).items():
            source = "embedding.weight" if name == "head.weight" else name
            parameter.copy_(tools.stored_parameters(tied)[source])
    for model in (tied, apart):
        tools.loss_sum(model, batch).backward()
    both = apart.layers[0].weight.grad + apart.layers[-1].weight.grad
    # The same terms, grouped differently: two gradients, each a sum over 30 tokens.
    assert_close_in_sums(tied.layers[0].weight.grad, both, 60)


def test_every_flavor_written_as_config_json_is_read_back_as_it_was(family):
    for config in family.flavors.values():
        content = json.loads(json.dumps(family.config_to_hf(config)))
        assert family.config_from_hf(content) == config


@pytest.mark.parametrize(
    ("flavor", "field", "value", "message"),
    [
        ("huge", "num_layers", 1, "flavor 'huge'.*debug"),
        ("debug", "num_layers", 0, "num_layers = 0"),
        ("debug", "num_kv_heads", 3, "num_kv_heads = 3"),
        ("debug", "head_dim", 7, "head_dim = 7"),
    ],
)
def test_unknown_flavors_and_fields_and_impossible_shapes_are_refused_with_their_values(
    family, flavor, field, value, message
):
    with pytest.raises(ModelConfigError, match=message):
        family.config_from_flavor(flavor, **{field: value})


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
