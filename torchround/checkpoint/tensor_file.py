"""Safetensors files written from, and read into, tensors where they lie: no second copy in memory.

The safetensors library serialises to a second copy in memory; its format needs none: 8 bytes header length
(little endian), a JSON header with dtype, shape and offsets by name, then the tensors' bytes. Files written
here open with the library, and nothing in them is ever executed, unlike a pickle.
"""

import json
import math
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

# A file takes no further tensor once it holds this much: small enough to copy and check file by file.
FILE_BYTES = 2**30

# Read or written and checksummed at once, while the bytes are in the cache.
_PIECE_BYTES = 2**22
_LENGTH_BYTES = 8
# The safetensors library's own limit.
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file to be written, in file order, and its header."""

    name: str
    tensors: dict[str, Tensor]
    header: bytes

    @property
    def size_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())


def plan_files(tensors: Mapping[str, Tensor], file_bytes: int = FILE_BYTES) -> list[TensorFile]:
    """Spread `tensors` over files in the order given, a new file after each `file_bytes`.

    Raises `ValueError` naming a tensor that cannot be written where it lies (not on the CPU, not contiguous,
    a dtype safetensors has no name for).
    """
    groups: list[dict[str, Tensor]] = []
    filled_bytes = file_bytes
    for name, tensor in tensors.items():
        _require_plain(name, tensor)
        if filled_bytes >= file_bytes:
            groups.append({})
            filled_bytes = 0
        groups[-1][name] = tensor
        filled_bytes += tensor.nbytes
    return [_plan_file(f"tensors-{index:05d}.safetensors", group) for index, group in enumerate(groups)]


def write_tensor_file(path: Path, file: TensorFile) -> int:
    """Write `file` as the new file `path`, synced to the disk. Returns its CRC-32."""
    with open(path, "xb", buffering=0) as out:
        crc32 = _write(out, memoryview(file.header), 0)
        for tensor in file.tensors.values():
            crc32 = _write(out, memory_of(tensor), crc32)
        os.fsync(out.fileno())
    return crc32


def read_header(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) in file order. Raises `ValueError` if they do not fill the file exactly."""
    with open(path, "rb") as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        left_bytes = path.stat().st_size - _LENGTH_BYTES
        if not 0 < header_bytes <= min(left_bytes, _MAX_HEADER_BYTES):
            raise ValueError(f"its header would take {header_bytes} of {left_bytes} bytes")
        header = json.loads(file.read(header_bytes))
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = {}
    end = 0
    for name, entry in header.items():
        dtype, shape = dtypes[entry["dtype"]], tuple(int(size) for size in entry["shape"])
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"{name} is at {entry['data_offsets']} instead of {[begin, end]}")
        found[name] = (dtype, shape)
    if header_bytes + end != left_bytes:
        raise ValueError(f"its tensors take {end} of {left_bytes - header_bytes} bytes")
    return found


def read_tensor_file(path: Path, tensors: Mapping[str, Tensor]) -> int:
    """Read the file's bytes into the tensors that its header names. Returns the CRC-32 of the whole file.

    The header has been checked against `tensors`. Raises `ValueError` if the file ends early.
    """
    with open(path, "rb", buffering=0) as file:
        length = file.read(_LENGTH_BYTES)
        header = file.read(int.from_bytes(length, "little"))
        crc32 = zlib.crc32(header, zlib.crc32(length))
        names = json.loads(header)
        names.pop("__metadata__", None)
        for name in names:
            crc32 = _read(file, memory_of(tensors[name]), crc32)
    return crc32


def crc_of_file(path: Path) -> int:
    """CRC-32 of a file of any size, read in pieces."""
    crc32 = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            crc32 = zlib.crc32(piece, crc32)
    return crc32


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they are."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _plan_file(name: str, tensors: dict[str, Tensor]) -> TensorFile:
    # Wide elements first: each tensor is then aligned to its element, as safetensors' own writer has it.
    ordered = dict(sorted(tensors.items(), key=lambda item: -item[1].element_size()))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for key, tensor in ordered.items():
        begin, end = end, end + tensor.nbytes
        entries[key] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return TensorFile(name, ordered, len(text).to_bytes(_LENGTH_BYTES, "little") + text)


def _require_plain(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{name} cannot be stored where it lies: {tensor.dtype} on {tensor.device} with shape "
            f"{tuple(tensor.shape)} and stride {tensor.stride()}; it must be contiguous and on the CPU"
        )


def _pieces(memory: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(memory), _PIECE_BYTES):
        yield memory[start : start + _PIECE_BYTES]


def _write(out: BinaryIO, memory: memoryview, crc32: int) -> int:
    for piece in _pieces(memory):
        crc32 = zlib.crc32(piece, crc32)
        while piece:
            piece = piece[out.write(piece) :]
    return crc32


def _read(file: BinaryIO, memory: memoryview, crc32: int) -> int:
    for piece in _pieces(memory):
        rest = piece
        while rest:
            num_read = file.readinto(rest)  # type: ignore[attr-defined]
            if not num_read:
                raise ValueError(f"it ends {len(rest)} bytes before a tensor does")
            rest = rest[num_read:]
        crc32 = zlib.crc32(piece, crc32)
    return crc32
