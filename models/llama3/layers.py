"""Llama 3 as an ordered list of layers, and the Hugging Face names of its parameters."""

from models.common.attention import Attention
from models.common.family import HFNames
from models.common.layers import Block
from models.common.mlp import SwiGLU
from models.common.model import ATTENTION_NAMES, SWIGLU_NAMES, assemble, decoder_names
from models.llama3.config import Llama3Config
from torchround.layer import LayeredModel


def build(config: Llama3Config) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    return assemble(
        config,
        lambda index: Block(config, Attention(config), SwiGLU(config.hidden_size, config.ffn_size)),
    )


def hf_names(config: Llama3Config) -> HFNames:
    """Where Hugging Face files hold each stored parameter."""
    return decoder_names(config, {**ATTENTION_NAMES, **SWIGLU_NAMES})
