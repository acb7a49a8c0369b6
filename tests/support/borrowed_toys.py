"""Small models of families that only `transformers` defines, and their folders."""

import torch

from tests.support.toy_decoders import toy_decoder

SIZES = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
SIZES |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
EXPERTS = {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 12}

# By name: the `model_type`, and the settings that are not in `SIZES`.
TOYS = {
    "qwen2": ("qwen2", {}),  # biases of queries, keys and values
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {"layer_types": ["sliding_attention", "full_attention"]}),  # tied
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),  # queries, keys and values in one projection
    "gpt_neox": ("gpt_neox", {}),  # the head has another name in files
    "qwen3_moe": ("qwen3_moe", EXPERTS),
    "mixtral": ("mixtral", EXPERTS),
    "qwen3_next": (
        "qwen3_next",
        {**EXPERTS, "shared_expert_intermediate_size": 8, "layer_types": ["linear_attention", "full_attention"]}
        | {"linear_key_head_dim": 6, "linear_value_head_dim": 6, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 4},
    ),
    "olmo_hybrid": ("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"]}),
    "deepseek_v3": (
        "deepseek_v3",
        {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": None}
        | {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 4},
    ),
}


def toy_config(kind, **settings):
    from transformers import AutoConfig

    model_type, own = TOYS[kind]
    return AutoConfig.for_model(model_type, **{**SIZES, **own, **settings})


def toy_model(kind, **settings):
    return toy_decoder(toy_config(kind, **settings), seed=1)


def meta_model(kind, **settings):
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(toy_config(kind, **settings))


def write_toy(kind, folder, dtype=torch.float32, **settings):
    model = toy_model(kind, **settings).to(dtype)
    model.save_pretrained(folder)
    return model
