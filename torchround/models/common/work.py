"""Counting what frozen weights save: a product with one costs its input's gradient in the backward and no weight's."""

from torch import Tensor


def frozen_elements(*parameters: Tensor) -> int:
    """Of those that get no gradient."""
    return sum(parameter.numel() for parameter in parameters if not parameter.requires_grad)
