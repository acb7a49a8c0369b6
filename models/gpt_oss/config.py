"""GPT-OSS's sizes, and the reading and writing of its `config.json`."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from torchround.models.common.config import ModelConfigError, TransformerConfig
from torchround.models.common.family import HFConfig, mixture_content, transformer_content
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import Rope, YarnScaling

MODEL_TYPES = ("gpt_oss",)
# Keys of its files of which no other value is supported.
FIXED = {"hidden_act": "silu", "attention_bias": True, "attention_dropout": 0.0}
EXPERT_KEYS = {
    "num_experts": ("num_local_experts",),
    "num_chosen": ("num_experts_per_tok",),
    "ffn_size": ("intermediate_size",),
}


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(TransformerConfig):
    """GPT-OSS: experts in every block. In blocks 0, 2, 4 and so on a token sees `window` tokens, itself included.

    SwiGLU's inputs are clamped at `swiglu_limit`, its gate is `x sigmoid(swiglu_alpha x)`.
    """

    moe: MoEShape
    window: int
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ModelConfigError(f"window = {self.window}, must be at least 1")

    def window_of(self, index: int) -> int | None:
        return None if index % 2 else self.window


def config_from_hf(content: Mapping[str, Any]) -> GptOssConfig:
    hf = HFConfig(content, MODEL_TYPES, **FIXED)
    fields = hf.transformer_fields()
    hf.expect("layer_types", _layer_types(fields["num_layers"]))
    return GptOssConfig(
        rope=hf.rope(150000.0, "yarn"),
        moe=hf.mixture(EXPERT_KEYS),
        window=hf.get("sliding_window", int),
        swiglu_limit=hf.number("swiglu_limit", 7.0),
        swiglu_alpha=hf.number("swiglu_alpha", 1.702),
        **fields,
    )


def config_to_hf(config: GptOssConfig) -> dict[str, Any]:
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "sliding_window": config.window,
        "layer_types": _layer_types(config.num_layers),
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        **FIXED,
        **mixture_content(config.moe, EXPERT_KEYS),
        **transformer_content(config),
    }


def _layer_types(num_layers: int) -> list[str]:
    return [("sliding_attention", "full_attention")[index % 2] for index in range(num_layers)]


_ROPE = Rope(150000.0, YarnScaling(factor=32.0, original_positions=4096, truncate=False))


def _sized(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, moe: MoEShape) -> GptOssConfig:
    return GptOssConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=64,
        ffn_size=ffn,
        vocab_size=201088,
        rope=_ROPE,
        max_positions=131072,
        moe=moe,
        window=128,
    )


# Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it. 1.3 M parameters.
_DEBUG = replace(
    _sized(6, 128, 4, 2, 56, MoEShape(8, 2, 56, balance_coefficient=0.001)),
    head_dim=32,
    vocab_size=260,
    window=16,
)

FLAVORS: Mapping[str, GptOssConfig] = MappingProxyType(
    {
        "debug": _DEBUG,
        "20B": _sized(24, 2880, 64, 8, 2880, MoEShape(32, 4, 2880)),
        "120B": _sized(36, 2880, 64, 8, 2880, MoEShape(128, 4, 2880)),
    }
)
