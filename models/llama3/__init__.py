"""Llama 3, 3.1, 3.2 and 3.3."""

from torchround.models.llama3.layers import LLAMA3 as LLAMA3
