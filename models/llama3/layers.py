"""Llama 3's blocks: grouped-query attention and SwiGLU, no biases."""

from functools import partial

from torchround.models.common.config import TransformerConfig
from torchround.models.common.decoder import ATTENTION_NAMES, GATED_MLP_NAMES, BlockSettings, attention_maker
from torchround.models.common.family import Family
from torchround.models.common.feed_forward import GatedMLP
from torchround.models.common.primitives import RMSNorm
from torchround.models.llama3.config import FLAVORS, MODEL_TYPES, config_from_hf, config_to_hf


def block_settings(config: TransformerConfig) -> list[BlockSettings]:
    """Return the settings of each block; all are alike."""
    block = BlockSettings(
        attention=attention_maker(config),
        feed_forward=partial(GatedMLP, ffn_size=config.ffn_size),
        norm=partial(RMSNorm, eps=config.norm_eps),
        hf_names={**ATTENTION_NAMES, **GATED_MLP_NAMES},
    )
    return [block] * config.num_layers


LLAMA3: Family[TransformerConfig] = Family(
    "llama3", FLAVORS, config_from_hf, config_to_hf, block_settings, MODEL_TYPES, "3-8B"
)
