"""Llama 3, 3.1, 3.2 and 3.3."""

from torchround.models.common.family import Family
from torchround.models.llama3.config import FLAVORS, MODEL_TYPES, Llama3Config, config_from_hf, config_to_hf
from torchround.models.llama3.layers import build, hf_names

LLAMA3: Family[Llama3Config] = Family(
    "llama3", FLAVORS, config_from_hf, build, hf_names, config_to_hf, MODEL_TYPES
)
