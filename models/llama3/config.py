"""Llama 3's sizes, and the reading and writing of its `config.json`."""

from collections.abc import Mapping
from dataclasses import asdict, replace
from types import MappingProxyType
from typing import Any

from torchround.models.common.config import TransformerConfig
from torchround.models.common.family import HFConfig, transformer_content
from torchround.models.common.rope import Llama3Scaling, Rope

MODEL_TYPES = ("llama",)


def config_from_hf(content: Mapping[str, Any]) -> TransformerConfig:
    """Read the content of a `config.json` with `model_type` llama."""
    hf = HFConfig(content)
    hf.expect("model_type", *MODEL_TYPES)
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", False)
    hf.expect("mlp_bias", False)
    return TransformerConfig(rope=_rope(hf), **hf.transformer_fields())


def config_to_hf(config: TransformerConfig) -> dict[str, Any]:
    """Return a `config.json` of this shape."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope.theta}
    if isinstance(config.rope.scaling, Llama3Scaling):
        scaling = asdict(config.rope.scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_positions")
        rope |= {"rope_type": "llama3", **scaling}
    own = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "rope_parameters": rope}
    return {**own, "attention_bias": False, "mlp_bias": False, **transformer_content(config)}


def _rope(hf: HFConfig) -> Rope:
    table = hf.rope("default", "llama3")
    theta = float(table.get("rope_theta", (int, float), 10000.0))
    if table.content["rope_type"] == "default":
        return Rope(theta)
    scaling = Llama3Scaling(
        factor=float(table.get("factor", (int, float))),
        low_freq_factor=float(table.get("low_freq_factor", (int, float))),
        high_freq_factor=float(table.get("high_freq_factor", (int, float))),
        original_positions=table.get("original_max_position_embeddings", int),
    )
    return Rope(theta, scaling)


def _released(
    layers: int, hidden: int, heads: int, head_dim: int, ffn: int, stretch: float = 0.0
) -> TransformerConfig:
    # All released sizes have 8 kv heads, a vocabulary of 128256 and theta 500000; since 3.1 a RoPE factor (stretch).
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=8,
        head_dim=head_dim,
        ffn_size=ffn,
        vocab_size=128256,
        rope=Rope(500000.0, Llama3Scaling(stretch) if stretch else None),
        max_positions=131072 if stretch else 8192,
    )


def _debug(layers: int, hidden: int, heads: int, ffn: int) -> TransformerConfig:
    # Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it.
    return TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads // 2,
        head_dim=hidden // heads,
        ffn_size=ffn,
        vocab_size=260,
        rope=Rope(10000.0),
        max_positions=8192,
    )


FLAVORS: Mapping[str, TransformerConfig] = MappingProxyType(
    {
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
)
