"""Llama 3 as an ordered list of layers, and the Hugging Face names of its parameters."""

from torchround.layer import LayeredModel
from torchround.models.common.attention import Attention
from torchround.models.common.decoder import ATTENTION_NAMES, SWIGLU_NAMES, Block, assemble, decoder_names
from torchround.models.common.family import HFNames
from torchround.models.common.feed_forward import SwiGLU
from torchround.models.llama3.config import Llama3Config


def build(config: Llama3Config) -> LayeredModel:
    """Embedding, blocks, head, on `meta`: no memory."""
    return assemble(
        config,
        lambda index: Block(config, Attention(config), SwiGLU(config.hidden_size, config.ffn_size)),
    )


def hf_names(config: Llama3Config) -> HFNames:
    """Where Hugging Face files hold each stored parameter."""
    return decoder_names(config, {**ATTENTION_NAMES, **SWIGLU_NAMES})
