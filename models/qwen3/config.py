"""Qwen3's sizes, dense and with experts, and the reading and writing of its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torchround.models.common.config import TransformerConfig
from torchround.models.common.family import HFConfig, balance_content, transformer_content
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import Rope

MODEL_TYPES = ("qwen3", "qwen3_moe")


@dataclass(frozen=True)
class Qwen3Config(TransformerConfig):
    """Qwen3: with `moe` every block has its experts, without it one SwiGLU of `ffn_size`."""

    moe: MoEShape | None = None


def config_from_hf(content: Mapping[str, Any]) -> Qwen3Config:
    """Read the content of a `config.json` with `model_type` qwen3 or qwen3_moe."""
    hf = HFConfig(content)
    hf.expect("model_type", *MODEL_TYPES)
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("use_sliding_window", False)
    table = hf.rope("default")
    rope = Rope(float(table.get("rope_theta", (int, float), 10000.0)))
    moe = _experts(hf) if content["model_type"] == "qwen3_moe" else None
    return Qwen3Config(rope=rope, moe=moe, **hf.transformer_fields())


def config_to_hf(config: Qwen3Config) -> dict[str, Any]:
    """Return a `config.json` of this shape."""
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    own: dict[str, Any] = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if config.moe is not None:
        own = {
            "model_type": "qwen3_moe",
            "architectures": ["Qwen3MoeForCausalLM"],
            "num_experts": config.moe.num_experts,
            "num_experts_per_tok": config.moe.num_chosen,
            "moe_intermediate_size": config.moe.ffn_size,
            "norm_topk_prob": config.moe.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            **balance_content(config.moe),
        }
    fixed = {"attention_bias": False, "use_sliding_window": False, "rope_parameters": rope}
    return {**own, **fixed, **transformer_content(config)}


def _experts(hf: HFConfig) -> MoEShape:
    hf.expect("decoder_sparse_step", 1)  # experts in every block
    hf.expect("mlp_only_layers", [], None)
    # Released files say num_experts; today's transformers writes num_local_experts.
    key = "num_local_experts" if "num_local_experts" in hf.content else "num_experts"
    return MoEShape(
        num_experts=hf.get(key, int),
        num_chosen=hf.get("num_experts_per_tok", int),
        ffn_size=hf.get("moe_intermediate_size", int),
        normalised=hf.get("norm_topk_prob", bool, False),
        balance_coefficient=hf.balance_coefficient(),
    )


def _released(
    layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, tied: bool, moe: MoEShape | None = None
) -> Qwen3Config:
    # All released sizes have heads of 128, a vocabulary of 151936, theta 10^6 and 40960 positions.
    return Qwen3Config(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=128,
        ffn_size=ffn,
        vocab_size=151936,
        rope=Rope(1000000.0),
        max_positions=40960,
        norm_eps=1e-6,
        tied_embeddings=tied,
        moe=moe,
    )


# Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it. 1.1 M parameters.
_DEBUG = Qwen3Config(
    num_layers=6,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=320,
    vocab_size=260,
    rope=Rope(10000.0),
    max_positions=8192,
    norm_eps=1e-6,
)

FLAVORS: Mapping[str, Qwen3Config] = MappingProxyType(
    {
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
)
