"""Putting a decoder together: embedding, blocks, head; and their Hugging Face names."""

from collections.abc import Callable, Mapping

from torch import nn

from models.common.config import TransformerConfig
from models.common.layers import Block, Embedding, Head
from torchround.layer import LayeredModel


def assemble(config: TransformerConfig, make_block: Callable[[int], Block]) -> LayeredModel:
    """Layers `embedding`, `block.0` .., `head`. `make_block(index)` gives the family's block."""
    embedding = Embedding(config)
    blocks = [make_block(index) for index in range(config.num_layers)]
    layers: tuple[nn.Module, ...] = (embedding, *blocks, Head(config, embedding))
    names = ("embedding", *(f"block.{index}" for index in range(config.num_layers)), "head")
    return LayeredModel(names, layers)


def decoder_names(config: TransformerConfig, block_names: Mapping[str, str]) -> dict[str, str]:
    """`"<layer>.<parameter>"` to Hugging Face tensor. A tied head has no entry: the embedding stores it."""
    names = {"embedding.weight": "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight"}
    if not config.tied_embeddings:
        names["head.weight"] = "lm_head.weight"
    for index in range(config.num_layers):
        for ours, theirs in block_names.items():
            names[f"block.{index}.{ours}"] = f"model.layers.{index}.{theirs}"
    return names
