"""GPT-OSS."""

from torchround.models.gpt_oss.layers import GPT_OSS as GPT_OSS
