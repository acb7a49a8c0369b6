"""GPT-OSS's sizes, and the reading and writing of its `config.json`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from torchround.models.common.config import ModelConfigError, TransformerConfig
from torchround.models.common.family import HFConfig, balance_content, transformer_content
from torchround.models.common.feed_forward import MoEShape
from torchround.models.common.rope import Rope, YarnScaling

SLIDING, FULL = "sliding_attention", "full_attention"

MODEL_TYPES = ("gpt_oss",)


@dataclass(frozen=True, kw_only=True)
class GptOssConfig(TransformerConfig):
    """GPT-OSS: experts in every block, and sliding windows: a token sees `window` tokens, itself included.

    `sliding` says for each block whether it has the window; by default blocks 0, 2, 4 and so on have it.
    SwiGLU's inputs are clamped at `swiglu_limit`, its gate is `x sigmoid(swiglu_alpha x)`.
    """

    moe: MoEShape
    window: int
    sliding: tuple[bool, ...] | None = None
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ModelConfigError(f"window = {self.window}, must be at least 1")
        if self.sliding is not None and len(self.sliding) != self.num_layers:
            raise ModelConfigError(
                f"sliding names {len(self.sliding)} blocks, num_layers = {self.num_layers}"
            )

    def window_of(self, index: int) -> int | None:
        """Return how many tokens block `index` sees, or None for all."""
        slides = index % 2 == 0 if self.sliding is None else self.sliding[index]
        return self.window if slides else None


def config_from_hf(content: Mapping[str, Any]) -> GptOssConfig:
    """Read the content of a `config.json` with `model_type` gpt_oss."""
    hf = HFConfig(content)
    hf.expect("model_type", *MODEL_TYPES)
    hf.expect("hidden_act", "silu")
    hf.expect("attention_bias", True)
    moe = MoEShape(
        num_experts=hf.get("num_local_experts", int),
        num_chosen=hf.get("num_experts_per_tok", int),
        ffn_size=hf.get("intermediate_size", int),
        balance_coefficient=hf.balance_coefficient(),
    )
    return GptOssConfig(
        rope=_rope(hf),
        moe=moe,
        window=hf.get("sliding_window", int),
        sliding=_sliding(hf),
        swiglu_limit=float(hf.get("swiglu_limit", (int, float), 7.0)),
        swiglu_alpha=float(hf.get("swiglu_alpha", (int, float), 1.702)),
        **hf.transformer_fields(),
    )


def config_to_hf(config: GptOssConfig) -> dict[str, Any]:
    """Return a `config.json` of this shape."""
    windows = [config.window_of(index) for index in range(config.num_layers)]
    rope: dict[str, Any] = {"rope_type": "yarn", "rope_theta": config.rope.theta}
    if isinstance(config.rope.scaling, YarnScaling):
        scaling = asdict(config.rope.scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_positions")
        rope |= {key: value for key, value in scaling.items() if value is not None}
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.num_chosen,
        "sliding_window": config.window,
        "layer_types": [FULL if window is None else SLIDING for window in windows],
        "swiglu_limit": config.swiglu_limit,
        "swiglu_alpha": config.swiglu_alpha,
        "attention_bias": True,
        "rope_parameters": rope,
        **balance_content(config.moe),
        **transformer_content(config),
    }


def _sliding(hf: HFConfig) -> tuple[bool, ...] | None:
    kinds = hf.get("layer_types", list, [])
    if set(kinds) - {SLIDING, FULL}:
        raise ModelConfigError(
            f"config.json: layer_types = {kinds}, only {SLIDING!r} and {FULL!r} are supported"
        )
    slides = tuple(kind == SLIDING for kind in kinds)
    return None if slides == tuple(index % 2 == 0 for index in range(len(slides))) else slides


def _rope(hf: HFConfig) -> Rope:
    table = hf.rope("yarn")
    table.expect("mscale", None)
    table.expect("mscale_all_dim", None)
    factor = table.get("attention_factor", (int, float), None)
    scaling = YarnScaling(
        factor=float(table.get("factor", (int, float))),
        beta_fast=float(table.get("beta_fast", (int, float), 32.0)),
        beta_slow=float(table.get("beta_slow", (int, float), 1.0)),
        original_positions=table.get("original_max_position_embeddings", int),
        truncate=table.get("truncate", bool, True),
        attention_factor=None if factor is None else float(factor),
    )
    return Rope(float(table.get("rope_theta", (int, float), 150000.0)), scaling)


_ROPE = Rope(150000.0, YarnScaling(factor=32.0, original_positions=4096, truncate=False))


def _released(layers: int, num_experts: int) -> GptOssConfig:
    # Both released sizes are 2880 wide, with 64 heads of 64, 8 kv heads and a vocabulary of 201088.
    moe = MoEShape(num_experts, 4, 2880)
    return GptOssConfig(
        num_layers=layers,
        hidden_size=2880,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        ffn_size=2880,
        vocab_size=201088,
        rope=_ROPE,
        max_positions=131072,
        moe=moe,
        window=128,
    )


# Vocabulary of 260: 256 bytes and 4 special tokens; the tokenizer's own size replaces it. 1.3 M parameters.
_DEBUG = GptOssConfig(
    num_layers=6,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    ffn_size=56,
    vocab_size=260,
    rope=_ROPE,
    max_positions=131072,
    moe=MoEShape(8, 2, 56, balance_coefficient=0.001),
    window=16,
)

FLAVORS: Mapping[str, GptOssConfig] = MappingProxyType(
    {"debug": _DEBUG, "20B": _released(24, 32), "120B": _released(36, 128)}
)
