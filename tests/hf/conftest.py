"""Folders as `transformers` writes them, for a small model of each family."""

from types import SimpleNamespace

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models.conftest import tools
from torchround.models import FAMILIES

__all__ = ["tools"]  # the fixture of the model tests

SHAPE = {
    "vocab_size": 61,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "hidden_size": 96,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "norm_topk_prob": True}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "truncate": False,
}
GPT_OSS = {
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 9,
    "rope_parameters": YARN,
    "layer_types": ["sliding_attention", "full_attention"],
}
RELEASES = {
    "llama3": ("llama3", LlamaForCausalLM, LlamaConfig, {}),
    "llama3 tied": ("llama3", LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3 moe": ("qwen3", Qwen3MoeForCausalLM, Qwen3MoeConfig, EXPERTS),
    "gpt_oss": ("gpt_oss", GptOssForCausalLM, GptOssConfig, GPT_OSS),
    "borrowed qwen2": ("transformers", Qwen2ForCausalLM, Qwen2Config, {}),
    "borrowed gemma2": ("transformers", Gemma2ForCausalLM, Gemma2Config, {"sliding_window": 9}),
    "borrowed phi3": ("transformers", Phi3ForCausalLM, Phi3Config, {"pad_token_id": None}),
}


def release(kind, folder, dtype=torch.bfloat16, **saving):
    """Write a random model of `kind` to `folder`; `saving` goes to `save_pretrained`."""
    family, model_class, config_class, settings = RELEASES[kind]
    torch.manual_seed(1)
    theirs = model_class(config_class(**SHAPE | settings, initializer_range=0.2)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if parameter.ndim == 1 or name.endswith("_bias"):  # norms and biases, experts' biases less
                parameter.add_((0.3 if parameter.ndim == 1 else 0.05) * torch.randn_like(parameter))
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
    return SimpleNamespace(release=release, kinds=list(RELEASES))
