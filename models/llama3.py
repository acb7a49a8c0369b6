"""Llama 3, 3.1, 3.2 and 3.3: grouped-query attention and SwiGLU, no biases; their sizes, and the form of their `config.json`."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import ATTENTION_NAMES, GATED_MLP_NAMES, BlockSettings, attention_maker
from torchround.models.common.family import Family, HFConfig, transformer_content
from torchround.models.common.feed_forward import GatedMLP
from torchround.models.common.primitives import RMSNorm
from torchround.models.common.rope import Llama3Scaling, Rope


def block_settings(config: TransformerConfig) -> list[BlockSettings]:
    block = BlockSettings(
        attention=attention_maker(config),
        feed_forward=partial(GatedMLP, ffn_size=config.ffn_size),
        norm=partial(RMSNorm, eps=config.norm_eps),
        hf_names={**ATTENTION_NAMES, **GATED_MLP_NAMES},
    )
    return [block] * config.num_layers


MODEL_TYPES = ("llama",)
# Keys of its files of which no other value is supported.
FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0}


def config_from_hf(content: Mapping[str, Any]) -> TransformerConfig:
    hf = HFConfig(content, MODEL_TYPES, **FIXED)
    return TransformerConfig(rope=hf.rope(10000.0, "default", "llama3"), **hf.transformer_fields())


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    return {**own, **FIXED, **transformer_content(config)}


def _released(
    layers: int, hidden: int, heads: int, head_dim: int, ffn: int, stretch: float = 0.0, kv_heads: int = 8
) -> TransformerConfig:
    # All released sizes have 8 kv heads, a vocabulary of 128256 and theta 500000; since 3.1 a RoPE factor (stretch).
    rope = Rope(500000.0, Llama3Scaling(stretch) if stretch else None)
    positions = 131072 if stretch else 8192
    return TransformerConfig(layers, hidden, heads, kv_heads, head_dim, ffn, 128256, rope, positions)


def _debug(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    # Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it.
    shape = _released(layers, hidden, heads, hidden // heads, ffn, kv_heads=heads // 2)
    return replace(shape, vocab_size=260, rope=Rope(10000.0))


FLAVORS: Mapping[str, TransformerConfig] = {
    "debug": _debug(6, 128, 4, 320),  # 1.1 M parameters
    "debug_25m": _debug(8, 512, 8, 1408),
    "3-8B": _released(32, 4096, 32, 128, 14336),
    "3-70B": _released(80, 8192, 64, 128, 28672),
    "3.1-8B": _released(32, 4096, 32, 128, 14336, stretch=8),
    "3.1-70B": _released(80, 8192, 64, 128, 28672, stretch=8),
    "3.1-405B": _released(126, 16384, 128, 128, 53248, stretch=8),
    "3.2-1B": replace(_released(16, 2048, 32, 64, 8192, stretch=32), tied_embeddings=True),
    "3.2-3B": replace(_released(28, 3072, 24, 128, 8192, stretch=32), tied_embeddings=True),
    "3.3-70B": _released(80, 8192, 64, 128, 28672, stretch=8),
}

LLAMA3: Family[TransformerConfig] = Family(
    "llama3", FLAVORS, config_from_hf, config_to_hf, block_settings, MODEL_TYPES, "3-8B"
)
