"""Folders as `transformers` writes them, for a small model of each family."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from tests.models.conftest import borrowed_models, tools
from tests.support.toy_decoders import toy_decoder
from torchround.models import FAMILIES

__all__ = ["borrowed_models", "tools"]  # fixtures of the model tests

SHAPE = {"vocab_size": 61, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
GPT_OSS = {"num_local_experts": 5, "num_experts_per_tok": 2, "rope_parameters": YARN | {"truncate": False}}
GPT_OSS |= {"sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
DEEPSEEK = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "q_lora_rank": None}
DEEPSEEK |= {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "kv_lora_rank": 8, "qk_rope_head_dim": 4}
DEEPSEEK |= {"num_key_value_heads": 6, "head_dim": 4}
# By kind: our family, the `model_type` of transformers, and settings.
RELEASES = {
    "llama3": ("llama3", "llama", {}),
    "llama3 tied": ("llama3", "llama", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen3 moe": ("qwen3", "qwen3_moe", EXPERTS),
    "gpt_oss": ("gpt_oss", "gpt_oss", GPT_OSS),
    "borrowed qwen2": ("transformers", "qwen2", {}),
    "borrowed gemma2": ("transformers", "gemma2", {"sliding_window": 9}),
    "borrowed qwen3_moe": ("transformers", "qwen3_moe", EXPERTS),
    "borrowed mixtral": ("transformers", "mixtral", {"num_local_experts": 3, "num_experts_per_tok": 2}),
    "borrowed deepseek_v3": ("transformers", "deepseek_v3", DEEPSEEK),
    "borrowed gpt_oss": ("transformers", "gpt_oss", GPT_OSS),
    "borrowed phi3": ("transformers", "phi3", {"pad_token_id": None}),
}


def release(kind, folder, dtype=torch.bfloat16, **saving):
    family, model_type, settings = RELEASES[kind]
    theirs = toy_decoder(AutoConfig.for_model(model_type, **SHAPE | settings), seed=1)
    theirs.to(dtype).save_pretrained(folder, **saving)
    config = FAMILIES[family].config_from_hf(theirs.config.to_dict())
    return SimpleNamespace(folder=folder, family=FAMILIES[family], config=config, theirs=theirs)


@pytest.fixture(scope="session")
def releases(tmp_path_factory):
    """Map each kind to a released model's folder. It is written once, and tests must not change it."""
    made = {}

    def get(kind):
        if kind not in made:
            made[kind] = release(kind, tmp_path_factory.mktemp("release"), max_shard_size="20KB")
        return made[kind]

    return get


@pytest.fixture
def hf():
    return SimpleNamespace(release=release)
