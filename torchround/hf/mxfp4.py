"""MXFP4 (OCP Microscaling Formats 1.0): FP4 numbers that share one power of two per 32.

A byte holds two E2M1 numbers, the low half first. A scale is a UE8M0 byte: `2^(byte - 127)`. GPT-OSS files hold
an expert matrix as `<name>_blocks [E, Z, G, 16]` and `<name>_scales [E, Z, G]`, output rows first; the 16-bit
tensor `<name>` is `[E, 32 G, Z]`, inputs first.
"""

import torch
from torch import Tensor

BLOCK = 32
# E2M1: sign, two exponent bits (bias 1), one mantissa bit.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
E2M1_VALUES = (*_POSITIVE, *(-value for value in _POSITIVE))
SCALE_BIAS = 127
SCALE_NAN = 255


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expand uint8 `[..., G, 16]` and `[..., G]` to fp32 `[..., 32 G]`; exact, but numbers beyond fp32 become infinite."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # by byte, [256, 2]
    numbers = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    # Through fp64, because fp32's exp2 flushes the smallest powers to zero.
    factors = torch.exp2(scales.double() - SCALE_BIAS).masked_fill_(scales == SCALE_NAN, torch.nan).float()
    return numbers.mul_(factors[..., None]).flatten(-2)
