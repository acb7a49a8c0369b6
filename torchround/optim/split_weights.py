"""Split weights: an fp32 weight as the 16-bit weight that devices compute with, and a 16-bit residual.

The device weight is the upper half of the fp32 bit pattern, rounded to the nearest with ties up in magnitude. The rest
of the pattern is then in [-0x8000, 0x7fff] and fits in an int16, so that both together are the fp32 weight, bit for
bit. Ties to even would need 17 bits. Only an exact tie may be rounded otherwise than by PyTorch's cast: one fp32 weight
in 65,536 is a tie, one in 8 of a released float16 folder before its first update, and none of a bfloat16 one.
Source: the split master weights of FlashOptim (arXiv 2602.23349), with an integer residual that loses nothing.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

HALF = 0x8000

# Elements of whole parameters that are joined or split at once, so that the temporaries stay small.
CHUNK_ELEMENTS = 2**20


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Split fp32 weights into device weights (bf16) and residuals (int16), as fresh tensors of the same shape.

    A weight above the largest bf16 value has an infinite device weight; its residual still gives it back.
    """
    bits = weight.view(torch.int32)
    # Integers wrap around, so a rounded-up pattern never loses its residual.
    upper = (bits + HALF) >> 16
    residual = (bits - (upper << 16)).to(torch.int16)
    return upper.to(torch.int16).view(torch.bfloat16), residual


def join(device_weight: Tensor, residual: Tensor) -> Tensor:
    """Join the fp32 weights that `split` made these bf16 and int16 tensors from, as a fresh tensor."""
    upper = device_weight.view(torch.int16).to(torch.int32)
    return (upper << 16).add_(residual).view(torch.float32)


def split_parameter(weight: Tensor, device_weight: Tensor, residual: Tensor) -> None:
    """Write device weights and residuals of a parameter of any size, as `split` makes them."""
    for chunk, upper, lower in _chunks(weight, device_weight, residual):
        new_upper, new_lower = split(chunk)
        upper.copy_(new_upper)
        lower.copy_(new_lower)


def join_parameter(device_weight: Tensor, residual: Tensor) -> Tensor:
    """Join a parameter of any size, as `join` does."""
    weight = torch.empty(device_weight.shape)
    for chunk, upper, lower in _chunks(weight, device_weight, residual):
        chunk.copy_(join(upper, lower))
    return weight


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    return zip(*(tensor.view(-1).split(CHUNK_ELEMENTS) for tensor in tensors), strict=True)
