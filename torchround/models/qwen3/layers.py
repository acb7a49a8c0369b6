"""Qwen3 as an ordered list of layers: Llama's block with normed queries and keys, dense or with experts."""

from torchround.layer import LayeredModel
from torchround.models.common.attention import Attention
from torchround.models.common.decoder import (
    ATTENTION_NAMES,
    SWIGLU_NAMES,
    Block,
    MoEBlock,
    MoEHead,
    assemble,
    decoder_names,
)
from torchround.models.common.family import HFNames, HFTensors
from torchround.models.common.feed_forward import SwiGLU, SwiGLUExperts
from torchround.models.common.moe import MoE, MoEShape
from torchround.models.qwen3.config import Qwen3Config

QK_NORM_NAMES = {
    "attention.query_norm.weight": "self_attn.q_norm.weight",
    "attention.key_norm.weight": "self_attn.k_norm.weight",
}


def build(config: Qwen3Config) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    moe = config.moe
    if moe is None:
        return assemble(config, lambda index: _dense_block(config))
    return assemble(
        config,
        lambda index: _moe_block(config, moe),
        lambda shape, embedding: MoEHead(shape, embedding, moe),
    )


def _dense_block(config: Qwen3Config) -> Block:
    return Block(config, Attention(config, qk_norm=True), SwiGLU(config.hidden_size, config.ffn_size))


def _moe_block(config: Qwen3Config, moe: MoEShape) -> Block:
    experts = SwiGLUExperts(config.hidden_size, moe.num_experts, moe.ffn_size)
    return MoEBlock(config, Attention(config, qk_norm=True), MoE(config.hidden_size, moe, experts))


def hf_names(config: Qwen3Config) -> HFNames:
    """Where Hugging Face files hold each stored parameter."""
    mlp = SWIGLU_NAMES if config.moe is None else _expert_names(config.moe.num_experts)
    return decoder_names(config, {**ATTENTION_NAMES, **QK_NORM_NAMES, **mlp})


def _expert_names(num_experts: int) -> dict[str, HFTensors]:
    stacked: dict[str, HFTensors] = {
        f"mlp.experts.{name}": tuple(
            f"mlp.experts.{expert}.{name}_proj.weight" for expert in range(num_experts)
        )
        for name in ("gate", "up", "down")
    }
    return {"mlp.router.weight": "mlp.gate.weight", **stacked}
