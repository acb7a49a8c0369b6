"""Llama 3 as an ordered list of layers, and the Hugging Face names of its parameters."""

from models.common.attention import Attention
from models.common.layers import Block
from models.common.mlp import SwiGLU
from models.common.model import assemble, decoder_names
from models.llama3.config import Llama3Config
from torchround.layer import LayeredModel

# Our parameter of a block to the tensor in `model.layers.<i>.`
BLOCK_NAMES = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.query.weight": "self_attn.q_proj.weight",
    "attention.key.weight": "self_attn.k_proj.weight",
    "attention.value.weight": "self_attn.v_proj.weight",
    "attention.output.weight": "self_attn.o_proj.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "mlp.gate.weight": "mlp.gate_proj.weight",
    "mlp.up.weight": "mlp.up_proj.weight",
    "mlp.down.weight": "mlp.down_proj.weight",
}


def build(config: Llama3Config) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    return assemble(
        config,
        lambda index: Block(config, Attention(config), SwiGLU(config.hidden_size, config.ffn_size)),
    )


def hf_names(config: Llama3Config) -> dict[str, str]:
    """`"<layer>.<parameter>"` to Hugging Face tensor, for every stored parameter."""
    return decoder_names(config, BLOCK_NAMES)
