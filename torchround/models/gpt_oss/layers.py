"""GPT-OSS as an ordered list of layers, and the Hugging Face names of its parameters."""

from torchround.layer import LayeredModel
from torchround.models.common.attention import Attention
from torchround.models.common.family import HFNames
from torchround.models.common.layers import Block
from torchround.models.common.model import ATTENTION_NAMES, assemble, decoder_names
from torchround.models.common.moe import MoE
from torchround.models.common.moe_layers import MoEBlock, MoEHead
from torchround.models.gpt_oss.config import GptOssConfig
from torchround.models.gpt_oss.experts import GptOssExperts

OWN_NAMES = {
    "attention.query.bias": "self_attn.q_proj.bias",
    "attention.key.bias": "self_attn.k_proj.bias",
    "attention.value.bias": "self_attn.v_proj.bias",
    "attention.output.bias": "self_attn.o_proj.bias",
    "attention.sinks": "self_attn.sinks",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
    "mlp.experts.gate_up": "mlp.experts.gate_up_proj",
    "mlp.experts.gate_up_bias": "mlp.experts.gate_up_proj_bias",
    "mlp.experts.down": "mlp.experts.down_proj",
    "mlp.experts.down_bias": "mlp.experts.down_proj_bias",
}


def build(config: GptOssConfig) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    return assemble(
        config,
        lambda index: _block(config, index),
        lambda shape, embedding: MoEHead(shape, embedding, config.moe),
    )


def _block(config: GptOssConfig, index: int) -> Block:
    moe, width = config.moe, config.hidden_size
    attention = Attention(config, bias=True, sinks=True, window=config.window_of(index))
    experts = GptOssExperts(width, moe.num_experts, moe.ffn_size, config.swiglu_limit, config.swiglu_alpha)
    return MoEBlock(config, attention, MoE(width, moe, experts, router_bias=True))


def hf_names(config: GptOssConfig) -> HFNames:
    """Where 16-bit Hugging Face files hold each stored parameter (MXFP4 files: once dequantised)."""
    return decoder_names(config, {**ATTENTION_NAMES, **OWN_NAMES})
