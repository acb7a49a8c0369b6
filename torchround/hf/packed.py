"""Weights in packed formats, read as the numbers that they are for: MXFP4 and FP8.

A packed weight is codes of a few bits and scales, each shared by many codes. It becomes one stored tensor of bfloat16, which
is decoded piece by piece as it is read: `number = round(fp32(code) * scale)`, as `transformers` and compressed-tensors do.

- MXFP4 (OCP Microscaling Formats 1.0): FP4 codes that share one power of two per 32. A byte holds two E2M1 codes (sign, two
  exponent bits, one mantissa bit), the low half first. A scale is a UE8M0 byte: 2^(byte - 127), or not a number. GPT-OSS
  files hold an expert matrix as `<name>_blocks [E, Z, G, 16]` and `<name>_scales [E, Z, G]`, output rows first; the 16-bit
  tensor `<name>` is `[E, 32 G, Z]`, inputs first.
- FP8: codes `<name>` with a scale per tensor, per row or per block: `<name>_scale_inv` (DeepSeek and most others) or
  `<name>_scale` (compressed-tensors), in fp32, 16 bits or UE8M0. At the edges of a matrix blocks are smaller.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import DTYPE_NAMES
from torchround.hf.tensor_folder import (
    PIECE_BYTES,
    SINGLE_FILE,
    HFError,
    StoredTensor,
    TensorFiles,
    quantisation,
    read_folder,
    read_object,
)
from torchround.packed_formats import E2M1_VALUES, FORMATS, PackedFormat, PackedPlace

BLOCK = 32
FP8_CODES = ("F8_E4M3", "F8_E5M2")
SCALE_ENDINGS = ("_scale_inv", "_scale")
# Scales of a layer's input, for computing in FP8.
INPUT_ENDINGS = ("activation_scale", "input_scale")
SCALE_TYPES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclass(frozen=True)
class PackedTensor(StoredTensor, ABC):
    """A weight of type BF16 that files hold as codes and scales, the first two of `packed`. `begin` counts its own bytes."""

    packed: tuple[StoredTensor, ...]

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.packed

    @abstractmethod
    def packs_as(self, packed: PackedFormat) -> bool:
        """Tell whether `packed` has the same codes and scales, so that they need no rounding."""

    @abstractmethod
    def read_packed(self, files: TensorFiles, place: PackedPlace) -> None:
        """Fill `place`, of a format that it `packs_as`, with codes and scales. Raises `HFError`."""

    def _scales(self, files: TensorFiles, first: int, count: int) -> Tensor:
        """Read `count` scales from number `first` on. Raises `HFError` for one that is not a finite number."""
        scales = self.packed[1]
        size = scales.nbytes // math.prod(scales.shape)
        found = scales.read(files, first * size, count * size).view(_type_of(scales)).clone()
        if not found.float().isfinite().all():
            raise HFError(f"{scales.path}: {scales.name} holds a scale that is not a finite number")
        return found


@dataclass(frozen=True)
class PackedRows(PackedTensor):
    """A weight in FP8, `[.., rows, columns]`. Each block of `block` rows and columns shares one scale."""

    block: tuple[int, int]

    def packs_as(self, packed: PackedFormat) -> bool:
        columns, width = self.shape[-1], self.block[1]
        is_cut = columns % packed.group == 0 and (width % packed.group == 0 or width >= columns)
        return packed == FORMATS["fp8"] and self.packed[0].dtype_name == "F8_E4M3" and is_cut

    def read_packed(self, files: TensorFiles, place: PackedPlace) -> None:
        columns, width, group = self.shape[-1], self.block[1], place.format.group
        step = max(PIECE_BYTES // columns, 1)
        for first in range(0, place.numel // columns, step):
            last = min(first + step, place.numel // columns)
            codes, factors = self._rows(files, first, last)
            part = place.part(first * columns, (last - first) * columns)
            part.codes.copy_(codes.view(torch.uint8).view(-1))
            part.scales.copy_(factors[:, torch.arange(0, columns, group) // width].view(-1))

    def read(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        columns = self.shape[-1]
        begin, end = (self.begin + start) // 2, (self.begin + start + nbytes) // 2
        first, last = begin // columns, -(-end // columns)
        codes, factors = self._rows(files, first, last)
        each = factors.repeat_interleave(self.block[1], 1)[:, :columns]
        numbers = codes.float().mul_(each).bfloat16()
        return numbers.view(-1)[begin - first * columns : end - first * columns].view(torch.uint8)

    def _rows(self, files: TensorFiles, first: int, last: int) -> tuple[Tensor, Tensor]:
        """Read rows, counted through all matrices of a stack: their codes, and their fp32 scales, one for each block."""
        (rows, columns), codes = self.shape[-2:], self.packed[0]
        number = torch.arange(first, last)
        number = number // rows * -(-rows // self.block[0]) + number % rows // self.block[0]
        across, lowest = -(-columns // self.block[1]), int(number[0])
        scales = self._scales(files, lowest * across, (int(number[-1]) + 1 - lowest) * across)
        factors = scales.float().view(-1, across)[number - lowest]
        found = codes.read(files, first * columns, (last - first) * columns).view(codes.known_dtype)
        return found.view(-1, columns), factors


@dataclass(frozen=True)
class PackedExperts(PackedTensor):
    """Expert matrices in MXFP4, decoded one by one from `[Z, G, 16]` and `[Z, G]` to `[32 G, Z]`."""

    @property
    def unit_bytes(self) -> int:
        return self.nbytes // self.shape[0]

    def read(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        begin, unit = self.begin + start, 2 * math.prod(self.shape[1:])
        experts = range(begin // unit, -(-(begin + nbytes) // unit))
        found = torch.cat([self._expert(files, expert).view(-1) for expert in experts])
        return found.view(torch.uint8)[begin - experts[0] * unit :][:nbytes]

    def packs_as(self, packed: PackedFormat) -> bool:
        return packed == replace(FORMATS["mxfp4"], inner=self.shape[2])

    def read_packed(self, files: TensorFiles, place: PackedPlace) -> None:
        for expert, part in enumerate(place.split(self.shape[0])):
            blocks, shared = self._stored(files, expert)
            codes = torch.stack((blocks & 15, blocks >> 4), -1).view(self.shape[2], self.shape[1])
            low, high = codes.T.reshape(-1, 2).unbind(1)
            part.codes.copy_(low | high << 4)
            part.scales.copy_(shared.T.reshape(-1))

    def _expert(self, files: TensorFiles, expert: int) -> Tensor:
        return dequantise(*self._stored(files, expert)).T.bfloat16().contiguous()

    def _stored(self, files: TensorFiles, expert: int) -> tuple[Tensor, Tensor]:
        """Read the uint8 blocks `[Z, G, 16]` and scales `[Z, G]` of an expert."""
        codes, scales = self.packed
        shape = scales.shape[1:]
        shared = self._scales(files, expert * math.prod(shape), math.prod(shape)).view(shape)
        size = codes.nbytes // codes.shape[0]
        return codes.read(files, expert * size, size).view(codes.shape[1:]), shared.view(torch.uint8)


@dataclass(frozen=True)
class RoundedTensor(StoredTensor):
    """A weight of type `dtype_name` as its form in `packed` stands for it: packed and unpacked again as it is read."""

    source: StoredTensor
    packed: PackedFormat

    @staticmethod
    def of(source: StoredTensor, packed: PackedFormat, dtype: torch.dtype) -> "RoundedTensor":
        size = math.prod(source.shape) * dtype.itemsize
        name = DTYPE_NAMES[dtype]
        return RoundedTensor(source.name, source.path, name, source.shape, 0, size, source, packed)

    @property
    def parts(self) -> tuple[StoredTensor, ...]:
        return self.source.parts

    @property
    def unit_bytes(self) -> int:
        return math.lcm(self.packed.unit * self.known_dtype.itemsize, self.source.unit_bytes)

    def read(self, files: TensorFiles, start: int, nbytes: int) -> Tensor:
        unit, size, stored = self.packed.unit, self.known_dtype.itemsize, self.source.known_dtype
        begin, end = (self.begin + start) // size, (self.begin + start + nbytes) // size
        first, last = begin // unit * unit, -(-end // unit) * unit
        wide = stored.itemsize
        numbers = self.source.read(files, first * wide, (last - first) * wide).view(stored)
        rounded = torch.empty(last - first, dtype=self.known_dtype)
        place = PackedPlace.new(self.packed, last - first)
        place.write(0, numbers)
        place.read(rounded)
        return rounded[begin - first : end - first].view(torch.uint8)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expand uint8 `[..., G, 16]` and `[..., G]` to fp32 `[..., 32 G]`; exact, but numbers beyond fp32 become infinite."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # by byte, [256, 2]
    numbers = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    return numbers.mul_(scales.view(torch.float8_e8m0fnu).float()[..., None]).flatten(-2)


def _type_of(scales: StoredTensor) -> torch.dtype:
    # UE8M0 is a type of its own in new files, and a byte in older ones.
    return torch.float8_e8m0fnu if scales.dtype_name == "U8" else scales.known_dtype


def format_of(tensors: Sequence[StoredTensor]) -> PackedFormat | None:
    """Find the format in which a store can hold the codes and scales of a parameter's tensors; None for other numbers."""
    shapes = {tensor.shape for tensor in tensors}
    candidates = (FORMATS["fp8"], *(replace(FORMATS["mxfp4"], inner=shape[-1]) for shape in shapes if shape))
    for packed in candidates:
        if all(isinstance(tensor, PackedTensor) and tensor.packs_as(packed) for tensor in tensors):
            return packed
    return None


def read_numbers(folder: Path, single_file: str = SINGLE_FILE) -> dict[str, StoredTensor]:
    """Find the tensors of a folder as `read_folder` does, packed ones under the name of their numbers. Raises `HFError`."""
    config = folder / "config.json"
    table = quantisation(read_object(config)) if config.is_file() else {}
    tensors = read_folder(folder, single_file)
    found = {packed.name: packed for packed in _packed(folder, tensors, table)}
    used = {part.name for packed in found.values() for part in packed.packed}
    return {**{name: tensor for name, tensor in tensors.items() if name not in used}, **found}


def _packed(
    folder: Path, tensors: Mapping[str, StoredTensor], table: Mapping[str, Any]
) -> Iterator[PackedTensor]:
    for name, codes in tensors.items():
        stem = name.removesuffix("_blocks")
        if stem != name and f"{stem}_scales" in tensors:
            yield _experts(stem, codes, tensors[f"{stem}_scales"])
        elif codes.dtype_name in FP8_CODES:
            scales = next((tensors[name + end] for end in SCALE_ENDINGS if name + end in tensors), None)
            if scales is not None:
                layer = name.removesuffix("weight")
                inputs = [layer + end for end in INPUT_ENDINGS] + [f"{name}_{end}" for end in INPUT_ENDINGS]
                others = [tensors[other] for other in inputs if other in tensors]
                yield _rows(codes, scales, others, block_size(table))
            elif table:
                raise HFError(f"{folder}: {name} is in FP8, but has no scale ({name}{SCALE_ENDINGS[0]})")


def _experts(name: str, codes: StoredTensor, scales: StoredTensor) -> PackedExperts:
    fits = len(codes.shape) == 4 and codes.shape == (*scales.shape, BLOCK // 2)
    if not fits or codes.dtype_name != "U8" or scales.dtype_name != "U8":
        raise _misfit(codes, scales, f"one U8 scale for each {BLOCK // 2} bytes")
    experts, outputs, groups = scales.shape
    shape = (experts, groups * BLOCK, outputs)
    return PackedExperts(name, codes.path, "BF16", shape, 0, 2 * math.prod(shape), (codes, scales))


def _rows(
    codes: StoredTensor, scales: StoredTensor, others: list[StoredTensor], given: tuple[int, int] | None
) -> PackedRows:
    """Find the block that the scales are for by their shape: the whole matrix, a row, or the one that the config gives."""
    if len(codes.shape) < 2:
        raise _misfit(codes, scales, "a matrix, or a stack of matrices")
    *stack, rows, columns = codes.shape
    block = None
    if math.prod(scales.shape) == math.prod(stack):
        block = rows, columns
    elif scales.shape == (*stack, rows, 1):
        block = 1, columns
    elif given is not None and scales.shape == (*stack, -(-rows // given[0]), -(-columns // given[1])):
        block = given
    if block is None or scales.dtype_name not in SCALE_TYPES:
        text = "" if given is None else f", or for each block of {given[0]} x {given[1]}"
        raise _misfit(
            codes, scales, f"one scale for the matrix or for each row{text}, in {', '.join(SCALE_TYPES)}"
        )
    size = 2 * math.prod(codes.shape)
    packed = (codes, scales, *others)
    return PackedRows(codes.name, codes.path, "BF16", codes.shape, 0, size, packed, block)


def _misfit(codes: StoredTensor, scales: StoredTensor, legal: str) -> HFError:
    found = " and ".join(f"{one.name} {one.dtype_name} {list(one.shape)}" for one in (codes, scales))
    return HFError(f"{scales.path}: the scales do not fit their codes: {found}; legal: {legal}")


def block_size(table: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns that share a scale by a `quantization_config`; None if it gives none."""
    groups = table.get("config_groups")
    settings = [group.get("weights") for group in groups.values()] if isinstance(groups, dict) else []
    sizes = [one.get("block_structure") for one in settings if isinstance(one, dict)]
    for size in (table.get("weight_block_size"), *sizes):
        if isinstance(size, list) and len(size) == 2 and all(type(one) is int and one > 0 for one in size):
            return size[0], size[1]
    return None
