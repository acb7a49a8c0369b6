"""GPT-OSS."""

from torchround.models.common.family import Family
from torchround.models.gpt_oss.config import FLAVORS, MODEL_TYPES, GptOssConfig, config_from_hf, config_to_hf
from torchround.models.gpt_oss.layers import build, hf_names

GPT_OSS: Family[GptOssConfig] = Family(
    "gpt_oss", FLAVORS, config_from_hf, build, hf_names, config_to_hf, MODEL_TYPES
)
