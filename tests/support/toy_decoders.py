"""Toy sizes of the decoders of `transformers`: a few thousand parameters each, with weights that show every term.

The default config of a type is shrunk key by key. Types whose sizes depend on each other have a line of their own.
`transformers` draws matrices that are so small that attention is nearly uniform and biases are 0: a wrong mask or a
lost bias would hardly change a logit. So `random_weights` draws larger ones.
"""

import warnings

import torch
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

VOCAB = 64
# A toy config that is larger than this has kept a default size somewhere.
MOST_PARAMETERS = 3_000_000

# Keys that a config has in common with this table get its value. Windows are shorter than a sequence.
VALUES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    32: "hidden_size lru_width word_embed_proj_dim",
    48: (
        "intermediate_size intermediate_size_mlp dense_intermediate_size ffn_dim encoder_ffn_dim "
        "decoder_ffn_dim dff dim_ff ffn_hidden_size"
    ),
    4: (
        "num_hidden_layers num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts "
        "index_topk linear_num_value_heads linear_num_heads mamba_dt_rank time_step_rank "
        "encoder_attention_heads decoder_attention_heads"
    ),
    2: (
        "num_key_value_heads eos_token_id max_window_layers num_experts_per_tok num_experts_per_token "
        "moe_topk moe_k zero_expert_num index_n_heads linear_num_key_heads num_kv_shared_layers "
        "encoder_layers decoder_layers"
    ),
    8: (
        "head_dim qk_rope_head_dim qk_nope_head_dim v_head_dim index_head_dim linear_key_head_dim "
        "linear_value_head_dim linear_head_dim mamba_d_state mamba_n_heads mamba_d_head mamba_num_heads "
        "mamba_head_dim mamba_chunk_size chunk_size state_size ssm_state_size block_size "
        "hidden_size_per_layer_input"
    ),
    128: "max_position_embeddings",
    0.2: "initializer_range",
    0: "pad_token_id num_nextn_predict_layers",
    1: ("bos_token_id n_group topk_group num_expert_group first_k_dense_replace num_dense_layers mamba_n_groups"),
    9: "sliding_window sliding_window_size local_attention attention_window_size",
    16: "attention_chunk_size q_lora_rank kv_lora_rank qk_head_dim dim_model_base",
    24: (
        "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size "
        "shared_experts_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size"
    ),
}
SMALL = {key: value for value, keys in VALUES.items() for key in keys.split()}

# Keys that turn dropout on; the toy models have none.
DROPOUT = (
    *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob", "residual_dropout", "activation_dropout"),
    *("embedding_dropout", "resid_dropout", "embed_dropout", "decoder_layerdrop", "encoder_layerdrop"),
    *("layerdrop", "router_jitter_noise", "input_jitter_noise", "emb_pdrop", "dropout_p"),
)

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
CONVOLUTIONS = {"layer_types": ["conv", "full_attention"] * 2}
PICTURES = {"image_size": 32, "patch_size": 8}
TOWER = {"depth": 2, "num_heads": 4, "out_hidden_size": 32, "num_position_embeddings": 16}
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
# Sizes that depend on each other, and lists that give four layers all kinds of layer that the type has.
OWN = {
    "bailing_hybrid": LINEAR | {"num_key_value_heads": 4},
    "bamba": {"attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": WINDOWS | {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dots3_note_text": {"num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8}
    | {"swa_v_head_dim": 8, "shared_experts_intermediate_size": 24, "head_dim": 16},
    "dots1": {"n_shared_experts": 1, "n_routed_experts": 4, "num_experts_per_tok": 2},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3": {"mm_tokens_per_image": 16},
    "gemma4": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
        | {"num_attention_heads": 4, "num_key_value_heads": 4, "position_embedding_size": 16}
    },
    "gemma3_text": WINDOWS,
    # Its smallest sizes share keys and values between blocks, which is refused; the others do not.
    "gemma4_text": WINDOWS | {"global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0},
    "gemma4_unified_text": WINDOWS | {"global_head_dim": 8},
    "gemma3n_text": WINDOWS | {"laurel_rank": 4, "activation_sparsity_pattern": [0.5, 0.0] * 2},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "gptj": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": LINEAR | {"num_key_value_heads": 4},
    "kolibri1": WINDOWS,
    "laguna": WINDOWS,
    "lfm2": CONVOLUTIONS,
    "lfm2_moe": CONVOLUTIONS,
    "llama4_vision_model": PICTURES | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "mellum": WINDOWS,
    "ministral": WINDOWS,
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4},
    "pixtral": PICTURES,
    "qwen2": {"use_sliding_window": True},
    "qwen2_moe": {"use_sliding_window": True},
    "qwen3": {"use_sliding_window": True},
    "qwen3_5_moe_text": LINEAR,
    "qwen3_5_text": LINEAR,
    "qwen3_next": LINEAR,
    "qwen3_5_moe_vision": TOWER,
    "qwen3_5_vision": TOWER,
    "reformer": {"is_decoder": True},
    "siglip_vision_model": PICTURES,
    "xlnet": {"d_head": 8},
    "zamba": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 4},
}
# Attention to latent vectors: keys and values of every head are made from one vector.
for _latent in (
    *("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
    *("glm_moe_dsa", "longcat_flash", "minicpm3", "youtu"),
):
    OWN[_latent] = {"num_key_value_heads": 4}
# Directions in a picture fill the pairs of a head.
for _pictured in ("cosmos3_edge_text", "glm4v_text", "glm_ocr_text", "qwen2_5_vl_text", "qwen2_vl_text"):
    OWN[_pictured] = {"rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}}
for _tower in ("glm4v_vision", "glm4v_moe_vision", "glm_ocr_vision", "qwen2_vl_vision"):
    OWN[_tower] = TOWER | {"embed_dim": 32, "intermediate_size": 48}
OWN["glm4v_moe_text"] = {"rope_parameters": {**ROPE, "mrope_section": [1, 1, 0]}}


def toy_config(model_type, **overrides):
    kind = CONFIG_MAPPING[model_type]
    usual = kind()
    known = usual.to_dict().keys() | usual.attribute_map.keys()
    small = {key: value for key, value in SMALL.items() if key in known}
    small |= {key: 0.0 for key in DROPOUT if key in known}
    for name in getattr(kind, "sub_configs", {}):  # a decoder beside encoders of pictures or sound
        if getattr(part := getattr(usual, name, None), "model_type", ""):
            small[name] = toy_config(part.model_type).to_dict()
    return kind(**{**small, **OWN.get(model_type, {}), **overrides})


# A chain of states through large matrices amplifies rounding: with the usual size `transformers` itself trains these
# types in float32 and in float64 to losses that differ by 1e-3 after ten steps, with half of it by less than 1e-6.
CALMER = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def toy_decoder(config, seed=0):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # missing kernels, of which PyTorch's own code takes the place
        has_text = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and config.get_text_config() is config
        auto = AutoModelForCausalLM if has_text else AutoModelForMultimodalLM
        model = auto.from_config(config).eval()
    random_weights(model, 0.1 if config.get_text_config().model_type in CALMER else 0.2, seed)
    return model


def random_weights(model, size=0.2, seed=0):
    """Draw matrices of this size, and move vectors away from the 0 and 1 at which they start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(size * noise)
            else:
                parameter.add_(0.3 * noise)


# Their towers keep a default size, or need another package.
WITHOUT_TOY = {"cohere2_vision", "deepseek_vl_hybrid", "fast_vlm", "fun_asr_nano", "inkling_mm_model", "janus"}
WITHOUT_TOY |= {"gemma3n", "nemo_speechlm", "nemotron_h_omni", "perception_lm", "qwen3_asr", "vibevoice_asr"}


def causal_types():
    names = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
    return tuple(sorted(names - WITHOUT_TOY))
