"""Qwen3's blocks: Llama's with normed queries and keys, dense or with experts."""

from collections.abc import Callable
from functools import partial

from torchround.layer import HFTensors
from torchround.models.common.decoder import ATTENTION_NAMES, GATED_MLP_NAMES, BlockSettings, attention_maker
from torchround.models.common.experts import GatedExperts
from torchround.models.common.family import Family
from torchround.models.common.feed_forward import GatedMLP, MoE
from torchround.models.common.primitives import RMSNorm
from torchround.models.qwen3.config import FLAVORS, MODEL_TYPES, Qwen3Config, config_from_hf, config_to_hf

QK_NORM_NAMES = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}


def block_settings(config: Qwen3Config) -> list[BlockSettings]:
    """Return the settings of each block; all are alike."""
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


QWEN3: Family[Qwen3Config] = Family(
    "qwen3", FLAVORS, config_from_hf, config_to_hf, block_settings, MODEL_TYPES, "8B"
)
