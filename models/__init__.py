"""The model families, by the name that `[model] family` gives."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torchround.models.borrowed import TRANSFORMERS
from torchround.models.common.config import ModelConfigError, TransformerConfig
from torchround.models.common.family import Family, FolderNames, KnownShape, ModelFamily
from torchround.models.common.lora import LoraShape, adapter_names, adapter_pairs, add_adapters, peft_config
from torchround.models.gpt_oss import GPT_OSS
from torchround.models.llama3 import LLAMA3
from torchround.models.qwen3 import QWEN3

# The families that torchround defines itself. Each has flavors.
OWN_FAMILIES: Mapping[str, Family[Any]] = MappingProxyType(
    {family.name: family for family in (LLAMA3, QWEN3, GPT_OSS)}
)
FAMILIES: Mapping[str, ModelFamily] = MappingProxyType({**OWN_FAMILIES, TRANSFORMERS.name: TRANSFORMERS})

__all__ = [
    "FAMILIES",
    "OWN_FAMILIES",
    "Family",
    "FolderNames",
    "KnownShape",
    "LoraShape",
    "ModelConfigError",
    "ModelFamily",
    "TransformerConfig",
    "adapter_names",
    "adapter_pairs",
    "add_adapters",
    "peft_config",
]
