"""Writes safetensors files from tensors in place, and reads files into tensors in place: no second copy in memory.

The safetensors library serialises to a second copy in memory. The format needs none: 8 bytes header length (little
endian), a JSON header with dtype, shape and offsets by name, then the tensors' bytes. The library reads the files
written here. Unlike a pickle, nothing in them is ever executed.

A checkpoint is about as large as the host memory that training leaves free. If the kernel cached it, its pages would
push out everything else, and taking each new page costs several times what the disk does (docs/benchmarks.md). Cached
pages are therefore given back piece by piece, in writing and in reading.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from torchround.untrusted.regular_file import open_regular
from torchround.untrusted.tensor_header import LENGTH_BYTES, read_tensor_header

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}

# A file takes no further tensor once it holds this much. Files stay small enough to copy and check one by one.
FILE_BYTES = 2**30

# One request to the disk: large compared with the cost of the request.
PIECE_BYTES = 2**23
# Enough for about 80,000 tensors. The safetensors library reads up to 100 MB, but parsed JSON takes several times its
# size in memory.
_MAX_HEADER_BYTES = 2**24


@dataclass(frozen=True)
class TensorFile:
    """The tensors of one file to be written, in file order, and its header."""

    name: str
    tensors: dict[str, Tensor]
    header: bytes

    @property
    def size_bytes(self) -> int:
        return len(self.header) + sum(tensor.nbytes for tensor in self.tensors.values())


class SaveWatch(Protocol):
    """Reports of a save to the code that changes the same memory, so that training can continue during the save.

    The saving thread calls these methods for every tensor, in this order, and then `before_publishing` once.
    """

    def raise_if_abandoned(self) -> None:
        """Raise to abandon the save, which then leaves its unfinished folder. Called between pieces."""

    def reading(self, tensor: Tensor) -> None:
        """Take note that the tensor's bytes are about to be read. May wait."""

    def finished_reading(self, name: str) -> None:
        """Take note that the named tensor is not read again. It may not be on the disk yet."""

    def finish_reading(self) -> None:
        """Take note that no tensor is read again: the save has failed, or its tensors are on the disk."""

    def before_publishing(self) -> None:
        """Return once the checkpoint, which is on the disk, may count as one. Raises to abandon it."""


class Unwatched:
    """The watch of a save whose memory does not change meanwhile."""

    def _ignore(self, *given: object) -> None:
        pass

    raise_if_abandoned = reading = finished_reading = finish_reading = before_publishing = _ignore


class UncachedPass:
    """One pass over the open file `descriptor`, front to back, in pieces that go into the checksum.

    The checksum is XXH3 with 128 bits: it finds damage by accident, not by an attacker.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._hash = xxhash.xxh3_128()
        self._passed_bytes = self._dropped_bytes = 0

    def pieces(self, memory: memoryview) -> Iterator[memoryview]:
        """Yield `memory` in pieces. The caller has transferred a piece by the time it asks for the next one."""
        for start in range(0, len(memory), PIECE_BYTES):
            piece = memory[start : start + PIECE_BYTES]
            yield piece
            self._hash.update(piece)
            self._passed_bytes += len(piece)
            if self._passed_bytes - self._dropped_bytes >= PIECE_BYTES:
                self._drop_until(self._passed_bytes)
                self._dropped_bytes = self._passed_bytes

    def end(self) -> str:
        """Drop the last pages, once all is transferred and synced. Returns the checksum as 32 hexadecimal digits."""
        self._drop_until(0)
        return self._hash.hexdigest()

    def _drop_until(self, end: int) -> None:
        """Advise the kernel to drop the file's pages from the start to `end`; 0 is the end of the file.

        Pages that are not on the disk yet are only sent there, and dropped by the next call. That starts the disk at
        once, which would otherwise idle until the kernel has enough dirty pages. A kernel that refuses the advice
        keeps the pages.
        """
        if hasattr(os, "posix_fadvise"):  # Linux, FreeBSD
            with suppress(OSError):
                os.posix_fadvise(self._descriptor, 0, end, os.POSIX_FADV_DONTNEED)


def plan_files(
    tensors: Mapping[str, Tensor], file_bytes: int = FILE_BYTES, first_number: int = 0
) -> list[TensorFile]:
    """Spread `tensors` over files in the order given, a new file after each `file_bytes`.

    The files are numbered from `first_number` on. Raises `ValueError` naming a tensor that cannot be written in place.
    """
    groups: list[dict[str, Tensor]] = []
    filled_bytes = file_bytes
    for name, tensor in tensors.items():
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype not in DTYPE_NAMES:
            raise ValueError(
                f"{name} cannot be stored in place: {tensor.dtype} on {tensor.device} with shape "
                f"{tuple(tensor.shape)} and stride {tensor.stride()}; it must be contiguous and on the CPU"
            )
        if filled_bytes >= file_bytes:
            groups.append({})
            filled_bytes = 0
        groups[-1][name] = tensor
        filled_bytes += tensor.nbytes
    numbered = enumerate(groups, start=first_number)
    return [_plan_file(f"tensors-{number:05d}.safetensors", group) for number, group in numbered]


def write_tensor_file(
    path: Path, file: TensorFile, watch: SaveWatch, advance: Callable[[int], object] = lambda nbytes: None
) -> str:
    """Write `file` as the new file `path`, synced to the disk. Returns its checksum. `advance` receives bytes written."""
    # Unbuffered: a buffer would only copy. Each write may transfer a part.
    with open(path, "xb", buffering=0) as out:
        one_pass = UncachedPass(out.fileno())

        def write(memory: memoryview) -> None:
            for piece in one_pass.pieces(memory):
                watch.raise_if_abandoned()
                rest = piece
                while rest:
                    rest = rest[out.write(rest) :]
                advance(len(piece))

        write(memoryview(file.header))
        for name, tensor in file.tensors.items():
            watch.reading(tensor)
            write(memory_of(tensor))
            watch.finished_reading(name)
        # The pages can only be dropped once they are on the disk.
        os.fsync(out.fileno())
        checksum = one_pass.end()
    watch.raise_if_abandoned()
    return checksum


def read_header(path: Path) -> Layout:
    """Read name -> (dtype, shape), in file order. Raises `ValueError` if the tensors do not fill the file exactly."""
    with open_regular(path) as file:
        try:
            start, entries = read_tensor_header(file, _MAX_HEADER_BYTES, ITEM_BYTES)
        except EOFError as error:
            # Callers treat a file that ends early as damaged, like any other bad header.
            raise ValueError(str(error)) from error
        left_bytes = os.fstat(file.fileno()).st_size - start
    found: Layout = {}
    end = 0
    for name, entry in entries.items():
        if entry.dtype_name not in DTYPES:
            raise ValueError(f"{name} is of the unknown type {entry.dtype_name}")
        # Tensors are read one after the other, so each must begin where the one before it ends.
        if entry.begin != end:
            raise ValueError(f"{name} begins at byte {entry.begin} instead of {end}")
        end = entry.end
        found[name] = (DTYPES[entry.dtype_name], entry.shape)
    if end != left_bytes:
        raise ValueError(f"its tensors take {end} of {left_bytes} bytes")
    return found


def read_tensor_file(path: Path, layout: Layout, tensors: Mapping[str, Tensor]) -> str:
    """Read a file whose header has this `layout`, in its order, into `tensors`. Returns the checksum of the whole file.

    The caller has checked the layout against `tensors`, which may leave some out. Raises `ValueError` if the file ends
    early.
    """
    sizes = {name: dtype.itemsize * torch.Size(shape).numel() for name, (dtype, shape) in layout.items()}
    with open_regular(path) as file:
        one_pass = UncachedPass(file.fileno())
        _read_past(file, one_pass, os.fstat(file.fileno()).st_size - sum(sizes.values()))
        for name, nbytes in sizes.items():
            if name in tensors:
                _read_into(file, one_pass, memory_of(tensors[name]))
            else:
                _read_past(file, one_pass, nbytes)
        return one_pass.end()


def checksum_file(path: Path, advance: Callable[[int], object] = lambda nbytes: None) -> str:
    """Return the checksum of a file of any size. `advance` receives the number of bytes of each step."""
    with open_regular(path) as file:
        one_pass = UncachedPass(file.fileno())
        _read_past(file, one_pass, os.fstat(file.fileno()).st_size, advance)
        return one_pass.end()


def _read_into(file: FileIO, one_pass: UncachedPass, memory: memoryview) -> None:
    """Fill `memory` from the unbuffered `file`. Raises `ValueError` if the file ends first."""
    for piece in one_pass.pieces(memory):
        rest = piece
        while rest:
            num_read = file.readinto(rest)
            if not num_read:
                raise ValueError(f"it ends {len(rest)} bytes before a tensor does")
            rest = rest[num_read:]


def _read_past(
    file: FileIO, one_pass: UncachedPass, nbytes: int, advance: Callable[[int], object] = lambda nbytes: None
) -> None:
    """Read `nbytes` for their checksum alone. Raises `ValueError` if the file ends first."""
    scratch = memoryview(bytearray(min(nbytes, PIECE_BYTES)))
    for start in range(0, nbytes, PIECE_BYTES):
        step = scratch[: nbytes - start]
        _read_into(file, one_pass, step)
        advance(len(step))


def memory_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, in place."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def _plan_file(name: str, tensors: dict[str, Tensor]) -> TensorFile:
    # Tensors of odd sizes come last, wide elements first, so that each tensor is aligned to its element, as in the files of
    # safetensors' own writer. The others stay in order: an update waits until its layer's tensors are read.
    def sort_key(item: tuple[str, Tensor]) -> tuple[bool, int]:
        is_odd = item[1].nbytes % 8 != 0
        return is_odd, -item[1].element_size() if is_odd else 0

    ordered = dict(sorted(tensors.items(), key=sort_key))
    return TensorFile(name, ordered, encode_header(layout_of(ordered)))


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def encode_header(layout: Layout) -> bytes:
    """Return the beginning of a file of these tensors, whose bytes follow in this order; its length is a multiple of 8."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in layout.items():
        begin, end = end, end + dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-(LENGTH_BYTES + len(text)) % 8)  # JSON ignores spaces
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
