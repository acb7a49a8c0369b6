"""Formats of frozen weights that stay packed in host memory and on the link: NF4, FP8 and MXFP4.

A packed weight is a flat buffer of bytes: the codes of all elements, then one scale for each group of consecutive elements.
Each number is `round(fp32(code) * scale)`. The formats agree bit for bit with those who defined them:

- `nf4` (Dettmers et al. 2023, QLoRA): 16 levels of a normal distribution, scaled by the group's largest magnitude in fp32.
  Codes, scales and numbers are those of bitsandbytes' `quantize_4bit` without double quantisation; the high half comes first.
- `fp8`: E4M3 codes (`torch.float8_e4m3fn`) and fp32 scales that take the group's largest magnitude to 448.
- `mxfp4` (OCP Microscaling Formats 1.0): E2M1 codes, the low half first, and powers of two as UE8M0 bytes.

Zeros are exact, in fp8 and mxfp4 with their sign. Groups of denormal numbers lose accuracy where a scale cannot be smaller.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

# Numels are multiples of it, so that scales begin at a multiple of eight bytes and no group is cut.
UNIT = 256
# Elements that plain operations take at once: their temporaries stay in a core's cache.
PIECE = 64 * 1024

# The levels of NF4: quantiles of the normal distribution, as QLoRA's authors rounded them.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
# The smallest divisor of bitsandbytes, for groups of zeros and of denormal numbers.
NF4_LEAST = 1e-38
E4M3_LARGEST = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True)
class PackedFormat(ABC):
    """A way to pack numbers: `code_bits` for each, and one scale for each `group` of consecutive numbers."""

    name: str
    group: int
    code_bits: int
    scale_dtype: torch.dtype

    def nbytes(self, numel: int) -> int:
        assert numel % UNIT == 0, f"{numel} elements are no multiple of {UNIT}"
        return self._scales_at(numel) + numel // self.group * self.scale_dtype.itemsize

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor can be packed: a matrix, or a stack of matrices, whose rows are whole groups."""
        return len(shape) >= 2 and shape[-1] % self.group == 0 and math.prod(shape) % UNIT == 0

    def pack(self, numbers: Tensor, packed: Tensor) -> None:
        """Write the codes and scales of flat `numbers` [n] to uint8 `packed` [nbytes(n)].

        Raises `ValueError` for a number that is not finite; `packed` is then partly written.
        """
        codes, scales = self._parts(packed, numbers.numel())
        for start in range(0, numbers.numel(), PIECE):
            groups = numbers[start : start + PIECE].view(-1, self.group).float()
            largest = groups.abs().amax(1)
            if not largest.isfinite().all():
                raise ValueError("it holds numbers that are not finite, which have no packed form")
            found, scale = self._encode(groups, largest)
            self._join(found.view(-1), codes[start * self.code_bits // 8 :])
            scales[start // self.group :][: len(scale)] = scale

    def unpack(self, packed: Tensor, numbers: Tensor) -> None:
        """Write the numbers of uint8 `packed` to flat `numbers` [n]. Compiled, it is one kernel without temporaries."""
        codes, scales = self._parts(packed, numbers.numel())
        # The elements of a byte, and the scales, are looked up: on a GPU the tables stay in the first cache.
        table = _table(self.name, numbers.device)
        factors = _table("ue8m0", numbers.device) if self.scale_dtype == torch.uint8 else None

        def unpack(codes: Tensor, scales: Tensor, numbers: Tensor) -> None:
            scales = scales if factors is None else factors[scales.int()]
            values = table[codes.int()].view(-1, self.group)
            numbers.view(-1, self.group).copy_(values * scales[:, None])

        if torch.compiler.is_compiling():
            return unpack(codes, scales, numbers)
        bytes_, groups = PIECE * self.code_bits // 8, PIECE // self.group
        for piece in zip(codes.split(bytes_), scales.split(groups), numbers.split(PIECE), strict=True):
            unpack(*piece)

    def _scales_at(self, numel: int) -> int:
        return numel * self.code_bits // 8

    def _parts(self, packed: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        at = self._scales_at(numel)
        return packed[:at], packed[at : self.nbytes(numel)].view(self.scale_dtype)

    def _join(self, codes: Tensor, to: Tensor) -> None:
        to[: len(codes)] = codes

    @abstractmethod
    def _encode(self, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        """Make codes [G, group] and scales [G] of fp32 `groups`, whose largest magnitudes are given."""


class NF4(PackedFormat):
    def _join(self, codes: Tensor, to: Tensor) -> None:
        torch.bitwise_or(codes[::2] << 4, codes[1::2], out=to[: len(codes) // 2])

    def _encode(self, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        scaled = groups * largest.clamp(min=NF4_LEAST).reciprocal_()[:, None]
        codes = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
        for bound in _nf4_bounds():
            codes += scaled > bound
        return codes, largest


class FP8(PackedFormat):
    def _encode(self, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        scales = largest / E4M3_LARGEST
        scales[scales == 0] = 1.0
        # A scale that is denormal is rounded by much, and a code beyond 464 would not be a number.
        scaled = (groups / scales[:, None]).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
        return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


class MXFP4(PackedFormat):
    def _join(self, codes: Tensor, to: Tensor) -> None:
        torch.bitwise_or(codes[1::2] << 4, codes[::2], out=to[: len(codes) // 2])

    def _encode(self, groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
        # floor(log2(largest)) - 2, plus the bias of 127: the largest code is 1.5 x 2^2. Zeros get the smallest scale.
        shared = ((largest.view(torch.int32) >> 23) - 2).clamp_(min=0)
        scaled = groups * ((254 - shared) << 23).view(torch.float32)[:, None]
        codes = (groups.view(torch.int32) < 0) * torch.tensor(8, dtype=torch.uint8)
        scaled.abs_()
        # Ties go to the even code.
        for bound, is_open in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1)):
            codes += scaled > bound if is_open else scaled >= bound
        return codes, shared.to(torch.uint8)


@torch.compiler.assume_constant_result
def _table(name: str, device: torch.device) -> Tensor:
    # A function of its own: a compiler ignores `cache`, and would copy the table to the device in each call.
    return _made_table(name, device)


@cache
def _made_table(name: str, device: torch.device) -> Tensor:
    """Make the fp32 numbers of each byte: [256, numbers in a byte] of a format's codes, or [256] of UE8M0 scales."""
    byte = torch.arange(256, dtype=torch.uint8)
    low, high = (byte & 15).int(), (byte >> 4).int()
    if name == "nf4":
        table = torch.tensor(NF4_LEVELS)[torch.stack((high, low), 1)]
    elif name == "mxfp4":
        table = torch.tensor(E2M1_VALUES)[torch.stack((low, high), 1)]
    else:
        table = byte.view(torch.float8_e4m3fn if name == "fp8" else torch.float8_e8m0fnu).float()
    return table.to(device)


@cache
def _nf4_bounds() -> list[float]:
    """Compute the midpoints of the levels as bitsandbytes does, in fp32."""
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
    return ((levels[:-1] + levels[1:]) / 2).tolist()


FORMATS: dict[str, PackedFormat] = {
    "nf4": NF4("nf4", group=64, code_bits=4, scale_dtype=torch.float32),
    "fp8": FP8("fp8", group=128, code_bits=8, scale_dtype=torch.float32),
    "mxfp4": MXFP4("mxfp4", group=32, code_bits=4, scale_dtype=torch.uint8),
}
