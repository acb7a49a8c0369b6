"""Qwen3, dense and with experts."""

from torchround.models.qwen3.layers import QWEN3 as QWEN3
