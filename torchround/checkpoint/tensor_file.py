"""Safetensors files written from, and read into, tensors where they lie: no second copy in memory.

The safetensors library serialises to a second copy in memory; its format needs none: 8 bytes header length
(little endian), a JSON header with dtype, shape and offsets by name, then the tensors' bytes. Files written
here open with the library, and nothing in them is ever executed, unlike a pickle.
"""

import json
import math
import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from torchround.checkpoint.checksum import Checksum, Xxh3
from torchround.checkpoint.fsync import open_regular
from torchround.checkpoint.uncached_io import (
    LARGEST_BLOCK_BYTES,
    SMALLEST_BLOCK_BYTES,
    DirectFile,
    ReadPass,
    WritePass,
)

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

# Of norms, biases and sinks in one file; no second copy of anything large.
_MOST_COPIED_BYTES = 2**24
# Between two reports of how far a file is verified.
_VERIFIED_BYTES = 2**25
_LENGTH_BYTES = 8
# Some 80,000 tensors; the safetensors library reads up to 100 MB. JSON takes several times its size in memory.
_MAX_HEADER_BYTES = 2**24


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

    Within a file, tensors that are whole blocks of a disk come first, in that order, and the others last.

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


def write_tensor_file(path: Path, file: TensorFile, watch: SaveWatch) -> int | str:
    """Write `file` as the new file `path`, synced to the disk. Returns its checksum."""
    checksum = Xxh3()
    with closing(DirectFile(path)) as out, closing(WritePass(out, checksum)) as one_pass:
        copies = _copy_odd(file, watch)
        one_pass.write(memoryview(file.header), watch.may_go_on)
        for name, tensor in file.tensors.items():
            if name in copies:
                one_pass.write(copies.pop(name), watch.may_go_on)
                continue
            watch.reading(tensor)
            one_pass.write(memory_of(tensor), watch.may_go_on)
            watch.finished_reading(name)
        out.sync()
        one_pass.end()
    watch.may_go_on()
    return checksum.value()


def read_header(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Name -> (dtype, shape) in file order. Raises `ValueError` if they do not fill the file exactly."""
    with open_regular(path) as file:
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        left_bytes = os.fstat(file.fileno()).st_size - _LENGTH_BYTES
        if not 0 < header_bytes <= min(left_bytes, _MAX_HEADER_BYTES):
            raise ValueError(f"its header would take {header_bytes} of {left_bytes} bytes")
        header = json.loads(file.read(header_bytes), object_pairs_hook=no_name_twice)
    header.pop("__metadata__", None)
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    found = {}
    end = 0
    for name, entry in header.items():
        dtype, shape = dtypes[entry["dtype"]], _shape(entry["shape"])
        begin, end = end, end + math.prod(shape) * dtype.itemsize
        if entry["data_offsets"] != [begin, end]:
            raise ValueError(f"{name} is at {entry['data_offsets']} instead of {[begin, end]}")
        found[name] = (dtype, shape)
    if header_bytes + end != left_bytes:
        raise ValueError(f"its tensors take {end} of {left_bytes - header_bytes} bytes")
    return found


def read_tensor_file(path: Path, tensors: Mapping[str, Tensor], checksum: Checksum) -> None:
    """Read the file's bytes into the tensors that its header names; all of the file goes into `checksum`.

    The header has been checked against `tensors`, which may leave some out. Raises `ValueError` if the file ends
    early.
    """
    with open_regular(path) as file, closing(ReadPass(file, checksum)) as one_pass:
        length = file.read(_LENGTH_BYTES)
        header = file.read(int.from_bytes(length, "little"))
        checksum.update(length + header)
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            if name in tensors:
                one_pass.read_into(memory_of(tensors[name]))
            else:
                begin, end = entry["data_offsets"]
                one_pass.pass_by(end - begin)
        one_pass.end()


def checksum_file(
    path: Path, checksum: Checksum, advance: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Put a file of any size into `checksum`, step by step; `advance` is told of each step's bytes."""
    with open_regular(path) as file, closing(ReadPass(file, checksum)) as one_pass:
        left_bytes = os.fstat(file.fileno()).st_size
        while left_bytes:
            step_bytes = min(left_bytes, _VERIFIED_BYTES)
            one_pass.pass_by(step_bytes)
            advance(step_bytes)
            left_bytes -= step_bytes
        one_pass.end()


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, where they are."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON as a dict: of two entries with one name another reader might take the other one.

    Raises `ValueError`.
    """
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("a name is there twice")
    return entries


def _plan_file(name: str, tensors: dict[str, Tensor]) -> TensorFile:
    # Whole blocks of the disk first: what is behind a tensor that is none could no longer be written as it lies. Of
    # those that are none wide elements first: each is aligned to its element, as safetensors' own writer has it.
    def place(item: tuple[str, Tensor]) -> tuple[bool, int]:
        return _is_odd(item[1]), -item[1].element_size() if _is_odd(item[1]) else 0

    ordered = dict(sorted(tensors.items(), key=place))
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
    # The tensors begin where a block of the disk does.
    text += b" " * (-(_LENGTH_BYTES + len(text)) % LARGEST_BLOCK_BYTES)
    return TensorFile(name, ordered, len(text).to_bytes(_LENGTH_BYTES, "little") + text)


def _is_odd(tensor: Tensor) -> bool:
    return tensor.nbytes % SMALLEST_BLOCK_BYTES != 0


def _copy_odd(file: TensorFile, watch: SaveWatch) -> dict[str, memoryview]:
    """Copies of the tensors that are last in the file for their size, as far as they are small.

    They are done with at once: whoever waits to change a layer does not wait for the end of the file.
    """
    copies: dict[str, memoryview] = {}
    left_bytes = _MOST_COPIED_BYTES
    for name, tensor in file.tensors.items():
        if _is_odd(tensor) and tensor.nbytes <= left_bytes:
            watch.reading(tensor)
            copies[name] = memoryview(bytes(memory_of(tensor)))
            watch.finished_reading(name)
            left_bytes -= tensor.nbytes
    return copies


def _shape(sizes: list[object]) -> tuple[int, ...]:
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} is no shape")
    return tuple(sizes)  # type: ignore[arg-type]


def _require_plain(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPE_NAMES:
        raise ValueError(
            f"{name} cannot be stored where it lies: {tensor.dtype} on {tensor.device} with shape "
            f"{tuple(tensor.shape)} and stride {tensor.stride()}; it must be contiguous and on the CPU"
        )


# What a save tells whoever else uses the memory it reads, so that training may go on beside it.


class SaveWatch(Protocol):
    """Called by the saving thread, in this order, for every tensor and then once at the end."""

    def may_go_on(self) -> None:
        """Between pieces: raises to give the save up, which then leaves its unfinished folder as it is."""

    def reading(self, tensor: Tensor) -> None:
        """The tensor's bytes are about to be read."""

    def finished_reading(self, name: str) -> None:
        """The named tensor is not read again; it may not be on the disk yet."""

    def before_publishing(self) -> None:
        """Everything is on the disk: returns once the checkpoint may count as one. Raises to give it up."""


class Unwatched:
    """Nobody else uses the memory."""

    def may_go_on(self) -> None:
        pass

    def reading(self, tensor: Tensor) -> None:
        pass

    def finished_reading(self, name: str) -> None:
        pass

    def before_publishing(self) -> None:
        pass
