"""The model families, by the name that `[model] family` gives."""

from collections.abc import Mapping
from typing import Any

from torchround.models.borrowed import TRANSFORMERS, BorrowedFamily
from torchround.models.common.config import ModelConfigError as ModelConfigError
from torchround.models.common.config import TransformerConfig as TransformerConfig
from torchround.models.common.family import Family as Family
from torchround.models.common.family import FolderNames as FolderNames
from torchround.models.common.lora import MAGNITUDE as MAGNITUDE
from torchround.models.common.lora import Adapter as Adapter
from torchround.models.common.lora import LoraShape as LoraShape
from torchround.models.common.lora import adapter_names as adapter_names
from torchround.models.common.lora import adapters_of as adapters_of
from torchround.models.common.lora import add_adapters as add_adapters
from torchround.models.common.lora import pack_base as pack_base
from torchround.models.common.lora import peft_config as peft_config
from torchround.models.gpt_oss import GPT_OSS
from torchround.models.llama3 import LLAMA3
from torchround.models.qwen3 import QWEN3

# The families that torchround defines itself. Each has flavors.
OWN_FAMILIES: Mapping[str, Family[Any]] = {family.name: family for family in (LLAMA3, QWEN3, GPT_OSS)}
ModelFamily = Family[Any] | BorrowedFamily
FAMILIES: Mapping[str, ModelFamily] = {**OWN_FAMILIES, TRANSFORMERS.name: TRANSFORMERS}
