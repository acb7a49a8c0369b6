"""Formats of frozen weights that stay packed in host memory and on the link: NF4, FP8 and MXFP4.

A packed weight is a flat buffer of bytes: the codes of all elements, then one scale for each group of consecutive elements.
Each number is `round(fp32(code) * scale)`. The formats agree bit for bit with those who defined them:

- `nf4` (Dettmers et al. 2023, QLoRA): 16 levels of a normal distribution, scaled by the group's largest magnitude in fp32.
  Codes, scales and numbers are those of bitsandbytes' `quantize_4bit` without double quantisation; the high half comes first.
- `fp8`: E4M3 codes (`torch.float8_e4m3fn`) and fp32 scales that take the group's largest magnitude to 448.
- `mxfp4` (OCP Microscaling Formats 1.0): E2M1 codes, the low half first, and powers of two as UE8M0 bytes.

Zeros stay zeros, in fp8 and mxfp4 with their sign. Denormal numbers lose accuracy where a scale cannot be smaller.
Packing runs in compiled loops (`packed_formats.cpp`), or where there is no compiler in plain operations of the same bits.
"""

import ctypes
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torchround.compiled_loops import (
    DTYPES,
    KernelError,
    RangeThreads,
    cache_folder,
    compile_libraries,
    library_name,
)

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("packed_formats.cpp")
# Numels are multiples of it, so that no group is cut and scales are aligned.
UNIT = 256
# Elements that a thread takes at once. Temporaries of plain operations on them stay in the second cache.
PIECE = 64 * 1024
# Elements that an accelerator unpacks at once without a compiler: about 40 MiB of temporaries.
DEVICE_PIECE = 4 * 2**20

# The levels of NF4: quantiles of the normal distribution, as its authors rounded them.
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941),
    *(0.7229568362236023, 1.0),
)
NF4_LEAST = 1e-38  # bitsandbytes' smallest divisor, for groups of zeros and of denormal numbers
E4M3_LARGEST = 448.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# By format: the numbers of each byte of codes, and of each scale that is a byte.
Tables = dict[str, tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class PackedFormat:
    """A way to pack numbers: `code_bits` for each, and one scale for each `group` of numbers.

    The numbers of a group are `inner` places apart: 1, or the columns of matrices whose columns are cut into groups.
    A stack of matrices is packed `by_matrix` if its products unpack one matrix at a time, and not the layer before it runs.
    """

    name: str
    group: int
    code_bits: int
    scale_dtype: torch.dtype
    inner: int = 1
    by_matrix: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return self.name if self.inner == 1 else f"{self.name}-{self.inner}"

    @property
    def unit(self) -> int:
        """The fewest numbers that have codes and scales of their own."""
        return self.group * self.inner

    def nbytes(self, numel: int) -> int:
        assert numel % UNIT == 0, f"{numel} elements are no multiple of {UNIT}"
        return numel * self.code_bits // 8 + numel // self.group * self.scale_dtype.itemsize

    def fits(self, shape: Sequence[int]) -> bool:
        """Tell whether a tensor can be packed: a matrix, or a stack of matrices, that is cut into whole groups."""
        if len(shape) < 2 or math.prod(shape) % UNIT or self.inner not in (1, shape[-1]):
            return False
        return shape[-1 if self.inner == 1 else -2] % self.group == 0

    def place(self, packed: Tensor, numel: int) -> "PackedPlace":
        """Find the codes and the scales of `numel` numbers in uint8 `packed` [nbytes(numel)]."""
        at = numel * self.code_bits // 8
        return PackedPlace(self, packed[:at], packed[at : self.nbytes(numel)].view(self.scale_dtype))

    def pack(self, numbers: Tensor, packed: Tensor) -> None:
        """Write the codes and scales of flat `numbers` [n] to uint8 `packed` [nbytes(n)].

        Raises `ValueError` for a number that is not finite; `packed` is then partly written.
        """
        self.place(packed, numbers.numel()).write(0, numbers)

    def unpack(self, packed: Tensor, numbers: Tensor) -> None:
        """Write the numbers of uint8 `packed` to flat `numbers` [n]. Compiled, it is one kernel without temporaries."""
        self.place(packed, numbers.numel()).read(numbers)


@dataclass(frozen=True)
class PackedPlace:
    """The memory of some packed numbers: uint8 `codes`, and the `scales` of their groups."""

    format: PackedFormat
    codes: Tensor
    scales: Tensor

    @staticmethod
    def new(packed: PackedFormat, numel: int) -> "PackedPlace":
        codes = torch.empty(numel * packed.code_bits // 8, dtype=torch.uint8)
        return PackedPlace(packed, codes, torch.empty(numel // packed.group, dtype=packed.scale_dtype))

    @property
    def numel(self) -> int:
        return self.codes.numel() * 8 // self.format.code_bits

    def part(self, first: int, numel: int) -> "PackedPlace":
        """View `numel` numbers from number `first` on, both multiples of the format's unit."""
        bits, group = self.format.code_bits, self.format.group
        codes = self.codes[first * bits // 8 : (first + numel) * bits // 8]
        return PackedPlace(self.format, codes, self.scales[first // group : (first + numel) // group])

    def split(self, parts: int) -> "list[PackedPlace]":
        numel = self.numel // parts
        return [self.part(part * numel, numel) for part in range(parts)]

    def copy_(self, numbers: Tensor) -> None:
        self.write(0, numbers.reshape(-1))

    def write(self, first: int, numbers: Tensor) -> None:
        """Pack flat `numbers` from number `first` on. Raises `ValueError` if one is not finite."""
        place = self.part(first, numbers.numel())
        is_plain = numbers.device.type != "cpu" or self.format.inner > 1 or numbers.dtype not in DTYPES
        library = None if is_plain else _library()
        if library is None:
            is_finite = all(one._pack_plainly(piece) for one, piece in place._pieces(numbers))
        else:
            is_finite = place._pack_compiled(library, numbers)
        if not is_finite:
            raise ValueError("it holds numbers that are not finite, which have no packed form")

    def read(
        self,
        numbers: Tensor,
        compiled: Callable[..., None] | None = None,
        tables: Tables | None = None,
    ) -> None:
        """Unpack into flat `numbers` [numel], by `unpack_numbers` or by what a compiler made of it.

        `tables` keeps the tables of one device from call to call, as long as its owner lives.
        """
        packed, tables = self.format, {} if tables is None else tables
        if packed.name not in tables:
            factors = _table("ue8m0", numbers.device) if packed.scale_dtype == torch.uint8 else None
            tables[packed.name] = _table(packed.name, numbers.device), factors
        table, factors = tables[packed.name]
        for place, piece in [(self, numbers)] if compiled else self._pieces(numbers):
            unpack = compiled or unpack_numbers
            unpack(place.codes, place.scales, table, factors, piece, packed.group, packed.inner)

    def _pieces(self, numbers: Tensor) -> "Iterator[tuple[PackedPlace, Tensor]]":
        """Cut the place and its numbers, so that temporaries stay small."""
        at_once = PIECE if numbers.device.type == "cpu" else DEVICE_PIECE
        step = max(at_once // self.format.unit, 1) * self.format.unit
        for start in range(0, numbers.numel(), step):
            piece = numbers[start : start + step]
            yield self.part(start, piece.numel()), piece

    def _pack_plainly(self, numbers: Tensor) -> bool:
        """Pack a piece. Return False if a number is not finite."""
        packed = self.format
        groups = (
            numbers.view(-1, packed.group, packed.inner).transpose(1, 2).reshape(-1, packed.group).float()
        )
        largest = groups.abs().amax(1)
        if not largest.isfinite().all():
            return False
        found, scales = ENCODERS[packed.name](groups, largest)
        self.scales.copy_(scales)
        found = found.view(-1, packed.inner, packed.group).transpose(1, 2).reshape(-1)
        if packed.code_bits == 8:
            self.codes.copy_(found)
        else:
            even, odd = found.view(-1, 2).unbind(1)
            high, low = (even, odd) if packed.name == "nf4" else (odd, even)
            torch.bitwise_or(high << 4, low, out=self.codes)
        return True

    def _pack_compiled(self, library: ctypes.CDLL, numbers: Tensor) -> bool:
        """Pack with as many threads as PyTorch has. Return False if a number is not finite."""
        assert numbers.is_contiguous(), "compiled loops take whole buffers"
        function = library[f"pack_{self.format.name}_{DTYPES[numbers.dtype]}"]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (numbers, self.codes, self.scales)]
        stop, chunk = ctypes.c_int64(numbers.numel()), ctypes.c_int64(PIECE)
        finite: list[int] = []
        threads = RangeThreads(torch.get_num_threads())
        try:
            threads.run(
                *(numbers.numel(), PIECE),
                lambda following: finite.append(function(*pointers, ctypes.byref(following), stop, chunk)),
            )
        finally:
            threads.close()
        return all(finite)


def unpack_numbers(
    codes: Tensor,
    scales: Tensor,
    table: Tensor,
    factors: Tensor | None,
    numbers: Tensor,
    group: int,
    inner: int,
) -> None:
    """Write the numbers of codes and scales. Compiled, it is one kernel without temporaries.

    What a byte stands for is looked up. Compilers cut longer arithmetic into kernels with fp32 buffers between them.
    """
    factor = scales if factors is None else factors[scales.int()]
    values = table[codes.int()].view(-1, group, inner)
    numbers.view(values.shape).copy_(values * factor.view(-1, 1, inner))


def unpacking_bytes(numel: int, kind: str) -> int:
    """Count the temporaries of `read` without a compiler: codes as int32, and fp32 values before and after scaling."""
    return 12 * min(numel, PIECE if kind == "cpu" else DEVICE_PIECE)


def _encode_nf4(groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    scaled = groups * largest.clamp(min=NF4_LEAST).reciprocal_()[:, None]
    codes = torch.zeros(groups.shape, dtype=torch.uint8, device=groups.device)
    for bound in nf4_bounds():
        codes += scaled > bound
    return codes, largest


def _encode_fp8(groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    scales = largest / E4M3_LARGEST
    scales[scales == 0] = 1.0
    # A denormal scale is rounded by much. Casts of more than 464 are not a number in older versions of PyTorch.
    scaled = (groups / scales[:, None]).clamp_(-E4M3_LARGEST, E4M3_LARGEST)
    return scaled.to(torch.float8_e4m3fn).view(torch.uint8), scales


def _encode_mxfp4(groups: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    # floor(log2(largest)) - 2, and the bias of 127: the largest code is 1.5 x 2^2. Zeros have the smallest scale.
    shared = ((largest.view(torch.int32) >> 23) - 2).clamp_(min=0)
    scaled = (groups * ((254 - shared) << 23).view(torch.float32)[:, None]).abs_()
    codes = groups.signbit().to(torch.uint8) << 3
    # Ties go to the even code.
    for bound, is_above in ((0.25, 1), (0.75, 0), (1.25, 1), (1.75, 0), (2.5, 1), (3.5, 0), (5.0, 1)):
        codes += scaled > bound if is_above else scaled >= bound
    return codes, shared.to(torch.uint8)


@cache
def nf4_bounds() -> list[float]:
    """Compute the midpoints of the levels as bitsandbytes does, in fp32."""
    levels = torch.tensor(NF4_LEVELS, dtype=torch.float32)
    return ((levels[:-1] + levels[1:]) / 2).tolist()


def _table(name: str, device: torch.device) -> Tensor:
    """Make the fp32 numbers of each byte: [256, numbers in a byte] of a format's codes, or [256] of UE8M0 scales."""
    byte = torch.arange(256, dtype=torch.uint8, device=device)
    if name in ("fp8", "ue8m0"):
        return byte.view(torch.float8_e4m3fn if name == "fp8" else torch.float8_e8m0fnu).float()
    low, high = (byte & 15).int(), (byte >> 4).int()
    values, halves = (NF4_LEVELS, (high, low)) if name == "nf4" else (E2M1_VALUES, (low, high))
    # Filled there: a copy from the host would wait for the device.
    levels = [torch.full((), value, dtype=torch.float32, device=device) for value in values]
    return torch.stack(levels)[torch.stack(halves, 1)]


@cache
def _library() -> ctypes.CDLL | None:
    """Load the compiled loops, which are compiled once for a user; None, after one warning, where they cannot be had."""
    header = f"constexpr float NF4_BOUNDS[] = {{{', '.join(f'{bound.hex()}f' for bound in nf4_bounds())}}};"
    try:
        path = cache_folder() / library_name("packed-formats", SOURCE, header)
        if not path.exists():
            compile_libraries(SOURCE, {path: header}, lambda: None)
        library = ctypes.CDLL(str(path))
        _check_bits(library)
        return library
    except (KernelError, OSError, AttributeError) as error:
        logger.warning("%s; weights are packed by plain operations, which is several times slower", error)
        return None


def _check_bits(library: ctypes.CDLL) -> None:
    """Raise `KernelError` unless the loops give the plain operations' bits, on numbers of all sizes down to denormals."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-45, 38, (64, 1), generator=generator)
    numbers = (torch.randn(64, UNIT, generator=generator) * 10.0**exponents).view(-1)
    for dtype in DTYPES:
        for form in FORMATS.values():
            given = numbers.to(dtype).nan_to_num_(0.0, 1.0, -1.0)
            plain, compiled = (PackedPlace.new(form, len(given)) for _ in range(2))
            plain._pack_plainly(given)
            compiled._pack_compiled(library, given)
            if not (torch.equal(plain.codes, compiled.codes) and torch.equal(plain.scales, compiled.scales)):
                raise KernelError("compiled packing does not give the plain operations' bits here")


ENCODERS: dict[str, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {
    "nf4": _encode_nf4,
    "fp8": _encode_fp8,
    "mxfp4": _encode_mxfp4,
}
FORMATS: dict[str, PackedFormat] = {
    "nf4": PackedFormat("nf4", group=64, code_bits=4, scale_dtype=torch.float32),
    "fp8": PackedFormat("fp8", group=128, code_bits=8, scale_dtype=torch.float32),
    "mxfp4": PackedFormat("mxfp4", group=32, code_bits=4, scale_dtype=torch.uint8),
}
