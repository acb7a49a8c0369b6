"""State formats: how the optimizer's values are kept in host memory, as fp32 or as 8-bit codes with block scales.

`EXACT` keeps each value as the arithmetic left it. `COMPACT` keeps blocks of `BLOCK` values as 8-bit codes and one
bf16 scale, companded so that small values of a block keep their relative precision: a softsign for signed values, a
square root for values that are never negative (FlashOptim, arXiv 2602.23349). Codes are rounded to the nearest, ties
to even, without random numbers, so a run repeats bit for bit.

Only operations that IEEE 754 rounds exactly are used, in a fixed order. The compiled pass gives the same bits.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Values that share a scale. Parts of a segment begin at its first element, so blocks never cross segments."""

SMALLEST_SCALE = 2.0**-100
"""A smaller scale counts as 0: its reciprocal would come near fp32's largest number."""

LARGEST_CODE = 255
SIGNED_SPAN = 254.0
"""Twice the largest signed code: the softsign of 1 is a half."""


@dataclass(frozen=True)
class StateValue:
    """A number of each element, fp32 in arithmetic. `name` is the checkpoint's prefix; never negative: not `is_signed`."""

    name: str
    is_signed: bool = True


@dataclass(frozen=True)
class StatePart:
    """A flat buffer that a format keeps for a value, one element for each `block` elements of the segment."""

    name: str
    dtype: torch.dtype
    block: int = 1

    def numel(self, elements: int) -> int:
        return -(-elements // self.block)


class StateFormat(ABC):
    """A way to keep values. `optimizer.state` names it."""

    name: ClassVar[str]

    @abstractmethod
    def parts(self, value: StateValue) -> tuple[StatePart, ...]: ...

    @abstractmethod
    def encode(self, value: StateValue, numbers: Tensor) -> tuple[Tensor, ...]:
        """Encode fp32 numbers (1-D), one tensor for each part; the first number begins a block."""

    @abstractmethod
    def decode(self, value: StateValue, kept: tuple[Tensor, ...]) -> Tensor:
        """Decode the fp32 numbers (1-D) that the kept tensors stand for. May be a view of them."""

    def ranges(
        self, value: StateValue, parts: Mapping[str, Tensor], start: int, stop: int
    ) -> tuple[Tensor, ...]:
        """View a value's parts for elements `[start, stop)`; `start` begins a block."""
        return tuple(parts[part.name][start // part.block : part.numel(stop)] for part in self.parts(value))

    def read(self, value: StateValue, parts: Mapping[str, Tensor], start: int, stop: int) -> Tensor:
        """Decode a value's fp32 numbers of elements `[start, stop)`; `start` begins a block. May be a view."""
        return self.decode(value, self.ranges(value, parts, start, stop))

    def write(self, value: StateValue, parts: Mapping[str, Tensor], start: int, numbers: Tensor) -> None:
        """Keep fp32 numbers of the elements from `start` on; `start` begins a block."""
        kept = self.ranges(value, parts, start, start + numbers.numel())
        for target, source in zip(kept, self.encode(value, numbers), strict=True):
            target.copy_(source)

    def element_bytes(self, value: StateValue) -> float:
        return sum(part.dtype.itemsize / part.block for part in self.parts(value))


class ExactFormat(StateFormat):
    """Values as fp32, without loss: 4 bytes each."""

    name = "exact"

    def parts(self, value: StateValue) -> tuple[StatePart, ...]:
        return (StatePart(value.name, torch.float32),)

    def encode(self, value: StateValue, numbers: Tensor) -> tuple[Tensor, ...]:
        return (numbers,)

    def decode(self, value: StateValue, kept: tuple[Tensor, ...]) -> Tensor:
        return kept[0]


class CompactFormat(StateFormat):
    """Values as 8-bit codes, with a bf16 scale for each block of 128: 1.016 bytes each.

    The scale is the block's largest magnitude, rounded up to bf16, so that no code overflows.
    """

    name = "compact"

    def parts(self, value: StateValue) -> tuple[StatePart, ...]:
        codes = StatePart(value.name, torch.int8 if value.is_signed else torch.uint8)
        return codes, StatePart(f"{value.name}_scale", torch.bfloat16, BLOCK)

    def encode(self, value: StateValue, numbers: Tensor) -> tuple[Tensor, ...]:
        """Compute the codes and the scales of fp32 numbers.

        Signed: code = rint(254 * (m / (s + |m|))). Otherwise r = sqrt(v) with the scale of r, and
        code = rint(r * (255 / s)), at least 1 if r > 0: a second moment of 0 would blow the next step up.
        """
        missing = -numbers.numel() % BLOCK
        blocks = (pad(numbers, (0, missing)) if missing else numbers).view(-1, BLOCK)
        roots = blocks if value.is_signed else exact_root(blocks)
        scales = _scales(roots)
        wide = scales.float().unsqueeze(1)
        # A block without a scale has the codes 0.
        has_scale = wide > 0
        if value.is_signed:
            span = roots.abs().add_(torch.where(has_scale, wide, 1.0))
            codes = roots.div(span).mul_(SIGNED_SPAN).round_().to(torch.int8)
        else:
            # A full tensor: PyTorch computes a number divided by a tensor as a reciprocal, with a second rounding.
            factor = torch.full_like(wide, LARGEST_CODE).div_(wide)
            whole = roots.mul(torch.where(has_scale, factor, 0.0)).round_()
            codes = torch.maximum(whole.clamp_(max=LARGEST_CODE), (roots > 0).float()).to(torch.uint8)
        return codes.view(-1)[: numbers.numel()], scales

    def decode(self, value: StateValue, kept: tuple[Tensor, ...]) -> Tensor:
        """Decode the fp32 numbers of codes and scales, as a fresh tensor.

        Signed: m = code / (254 - |code|) * s. Otherwise r = code * (s / 255), v = r * r.
        """
        codes, scales = kept
        numel = codes.numel()
        wide = codes.float()
        each = (scales.float() if value.is_signed else scales.float() / LARGEST_CODE).repeat_interleave(BLOCK)
        if value.is_signed:
            return wide.div(SIGNED_SPAN - wide.abs()).mul_(each[:numel])
        root = wide.mul_(each[:numel])
        return root.mul_(root)


def _scales(blocks: Tensor) -> Tensor:
    """Compute each block's largest magnitude, rounded up to bf16; 0 if it is below `SMALLEST_SCALE`."""
    bits = blocks.abs().amax(dim=1).view(torch.int32)
    # Not above the largest finite bf16 number: an infinite scale would make every code of the block 0.
    upper = ((bits + 0xFFFF) >> 16).clamp_(max=0x7F7F)
    scales = upper.to(torch.int16).view(torch.bfloat16)
    return torch.where(scales < SMALLEST_SCALE, 0.0, scales)


def exact_root(values: Tensor) -> Tensor:
    """Compute the correctly rounded square root of fp32 values in host memory.

    NumPy uses the processor's own instruction. Eager `torch.sqrt` goes through MKL, whose last bit is off for 20 %
    of the values; through float64 the whole pass ran at 0.6 times the speed.
    """
    return torch.from_numpy(np.sqrt(values.numpy()))


EXACT, COMPACT = ExactFormat(), CompactFormat()

FORMATS: Mapping[str, StateFormat] = {state.name: state for state in (EXACT, COMPACT)}
"""The formats by their names in `optimizer.state`."""
