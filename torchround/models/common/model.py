"""Putting a decoder together: embedding, blocks, head; and their Hugging Face names."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import nn

from torchround.layer import LayeredModel
from torchround.models.common.config import TransformerConfig
from torchround.models.common.family import HFNames, HFTensors
from torchround.models.common.layers import Block, Embedding, Head

# Our parameter of a block to the tensor below `model.layers.<i>.`: what all families name alike.
ATTENTION_NAMES: Mapping[str, HFTensors] = MappingProxyType(
    {
        "attention_norm.weight": "input_layernorm.weight",
        "attention.query.weight": "self_attn.q_proj.weight",
        "attention.key.weight": "self_attn.k_proj.weight",
        "attention.value.weight": "self_attn.v_proj.weight",
        "attention.output.weight": "self_attn.o_proj.weight",
        "mlp_norm.weight": "post_attention_layernorm.weight",
    }
)
SWIGLU_NAMES: Mapping[str, HFTensors] = MappingProxyType(
    {
        "mlp.gate.weight": "mlp.gate_proj.weight",
        "mlp.up.weight": "mlp.up_proj.weight",
        "mlp.down.weight": "mlp.down_proj.weight",
    }
)


def assemble(
    config: TransformerConfig,
    make_block: Callable[[int], Block],
    make_head: Callable[[TransformerConfig, Embedding], Head] = Head,
) -> LayeredModel:
    """Layers `embedding`, `block.0` .., `head`. `make_block(index)` gives the family's block."""
    embedding = Embedding(config)
    blocks = [make_block(index) for index in range(config.num_layers)]
    layers: tuple[nn.Module, ...] = (embedding, *blocks, make_head(config, embedding))
    names = ("embedding", *(f"block.{index}" for index in range(config.num_layers)), "head")
    return LayeredModel(names, layers)


def decoder_names(config: TransformerConfig, block_names: Mapping[str, HFTensors]) -> HFNames:
    """Names for every stored parameter. A tied head has no entry: the embedding stores it.

    `block_names`: our parameter of a block to the tensor, or tensors, below `model.layers.<i>.`.
    """
    names: HFNames = {
        "embedding.weight": "model.embed_tokens.weight",
        "head.norm.weight": "model.norm.weight",
    }
    if not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index in range(config.num_layers):
        for ours, theirs in block_names.items():
            prefix = f"model.layers.{index}."
            names[f"block.{index}.{ours}"] = (
                prefix + theirs if isinstance(theirs, str) else tuple(prefix + name for name in theirs)
            )
    return names
