"""Qwen3, dense and with experts: Llama's blocks with normed queries and keys; its sizes, and the form of its `config.json`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torchround.layer import HFTensors
from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import ATTENTION_NAMES, GATED_MLP_NAMES, BlockSettings, attention_maker
from torchround.models.common.experts import GatedExperts
from torchround.models.common.family import Family, HFConfig, mixture_content, transformer_content
from torchround.models.common.feed_forward import GatedMLP, MoE, MoEShape
from torchround.models.common.primitives import RMSNorm
from torchround.models.common.rope import Rope

QK_NORM_NAMES = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}


@dataclass(frozen=True)
class Qwen3Config(TransformerConfig):
    """Qwen3: with `moe` every block has its experts, without it one SwiGLU of `ffn_size`."""

    moe: MoEShape | None = None


def block_settings(config: Qwen3Config) -> list[BlockSettings]:
    feed_forward: Callable[[int], GatedMLP | MoE]
    if config.moe is None:
        feed_forward, names = partial(GatedMLP, ffn_size=config.ffn_size), dict(GATED_MLP_NAMES)
    else:
        feed_forward = partial(MoE, shape=config.moe, make_experts=GatedExperts)
        names = expert_names(config.moe.num_experts)
    block = BlockSettings(
        attention=attention_maker(config, qk_norm_eps=config.norm_eps),
        feed_forward=feed_forward,
        norm=partial(RMSNorm, eps=config.norm_eps),
        hf_names={**ATTENTION_NAMES, **QK_NORM_NAMES, **names},
    )
    return [block] * config.num_layers


def expert_names(num_experts: int) -> dict[str, HFTensors]:
    """Name router and experts of a block. Released files hold the experts one by one, so a stack has E tensors."""
    stacked: dict[str, HFTensors] = {
        f"mlp.experts.{name}": tuple(
            f"mlp.experts.{expert}.{name}_proj.weight" for expert in range(num_experts)
        )
        for name in ("gate", "up", "down")
    }
    return {"mlp.router.weight": "mlp.gate.weight", **stacked}


MODEL_TYPES = ("qwen3", "qwen3_moe")
# Keys of its files of which no other value is supported.
FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False, "attention_dropout": 0.0}
FIXED_OF_EXPERTS = {"decoder_sparse_step": 1, "mlp_only_layers": []}  # experts in every block
# Released files say num_experts; today's transformers writes num_local_experts.
EXPERT_KEYS = {
    "num_experts": ("num_experts", "num_local_experts"),
    "num_chosen": ("num_experts_per_tok",),
    "ffn_size": ("moe_intermediate_size",),
}


def config_from_hf(content: Mapping[str, Any]) -> Qwen3Config:
    hf = HFConfig(content, MODEL_TYPES, **FIXED)
    moe = None
    if content.get("model_type") == "qwen3_moe":
        hf = HFConfig(content, MODEL_TYPES, **FIXED, **FIXED_OF_EXPERTS)
        moe = hf.mixture(EXPERT_KEYS, normalised=hf.get("norm_topk_prob", bool, False))
    return Qwen3Config(rope=hf.rope(10000.0, "default"), moe=moe, **hf.transformer_fields())


def config_to_hf(config: Qwen3Config) -> dict[str, Any]:
    own: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if config.moe is not None:
        own = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "norm_topk_prob": config.moe.normalised,
            **FIXED_OF_EXPERTS,
            **mixture_content(config.moe, EXPERT_KEYS),
        }
    return {**own, **FIXED, **transformer_content(config)}


def _released(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool, moe: MoEShape | None = None
) -> Qwen3Config:
    # All released sizes have heads of 128, a vocabulary of 151936, theta 10^6 and 40960 positions.
    rope = Rope(1000000.0)
    return Qwen3Config(layers, hidden, heads, kv_heads, 128, ffn, 151936, rope, 40960, 1e-6, tied, moe)


# Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it. 1.1 M parameters.
_DEBUG = replace(
    _released(6, 128, 4, 2, 320, tied=False),
    head_dim=32,
    vocab_size=260,
    rope=Rope(10000.0),
    max_positions=8192,
)

FLAVORS: Mapping[str, Qwen3Config] = {
    "debug": _DEBUG,
    # 1.4 M parameters, 0.6 M of them used by each token
    "debug_moe": replace(_DEBUG, moe=MoEShape(8, 2, 56, balance_coefficient=0.001)),
    "0.6B": _released(28, 1024, 16, 8, 3072, tied=True),
    "1.7B": _released(28, 2048, 16, 8, 6144, tied=True),
    "4B": _released(36, 2560, 32, 8, 9728, tied=True),
    "8B": _released(36, 4096, 32, 8, 12288, tied=False),
    "14B": _released(40, 5120, 40, 8, 17408, tied=False),
    "32B": _released(64, 5120, 64, 8, 25600, tied=False),
    "30B-A3B": _released(48, 2048, 32, 4, 6144, tied=False, moe=MoEShape(128, 8, 768)),
    "235B-A22B": _released(94, 4096, 64, 4, 12288, tied=False, moe=MoEShape(128, 8, 1536)),
}

QWEN3: Family[Qwen3Config] = Family(
    "qwen3", FLAVORS, config_from_hf, config_to_hf, block_settings, MODEL_TYPES, "8B"
)
