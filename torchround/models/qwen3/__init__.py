"""Qwen3, dense and with experts."""

from torchround.models.common.family import Family
from torchround.models.qwen3.config import FLAVORS, MODEL_TYPES, Qwen3Config, config_from_hf, config_to_hf
from torchround.models.qwen3.layers import build, hf_names

QWEN3: Family[Qwen3Config] = Family(
    "qwen3", FLAVORS, config_from_hf, build, hf_names, config_to_hf, MODEL_TYPES
)
