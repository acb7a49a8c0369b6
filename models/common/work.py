"""Counting what frozen weights save: a product with one costs its input's gradient in the backward and no weight's."""

from torch import nn


def frozen_elements(*parameters: nn.Parameter) -> int:
    """Of those that get no gradient."""
    return sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
