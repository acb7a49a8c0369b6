"""The tensors of a Hugging Face folder: where each one's bytes are. Headers only; no tensor is read here.

A folder holds `model.safetensors`, or several files with `model.safetensors.index.json` that says which tensor
is in which.
"""

import itertools
import json
import math
import mmap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import DTYPE_NAMES
from torchround.untrusted.strict_json import parse_json
from torchround.untrusted.terminal import terminal_safe

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class StoredTensor:
    """One tensor: its bytes are `[begin, begin + nbytes)` of the file `path`.

    `dtype` is None where torch has none of that name (`dtype_name`), or none that is read here.
    """

    name: str
    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        return _DTYPES.get(self.dtype_name)


def read_folder(folder: Path, single_file: str = SINGLE_FILE) -> dict[str, StoredTensor]:
    """Every tensor by name, of `single_file` or of the index's files.

    Raises `HFError` for files that are missing, truncated or not safetensors.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder, single_file):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise HFError(f"{folder}: {name} is in {tensors[name].path.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of one safetensors file. Raises `HFError` if the file does not hold all of their bytes."""
    try:
        size_bytes = path.stat().st_size
        with open(path, "rb") as file:
            length = file.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(length, "little")
            if not 0 < header_bytes <= min(size_bytes, _MAX_HEADER_BYTES):
                raise HFError(f"{path}: {_strange(path, size_bytes)}")
            text = file.read(header_bytes)
    except OSError as error:
        raise HFError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(text) < header_bytes:
        raise HFError(f"{path}: truncated: its header takes {header_bytes} bytes, the file has {size_bytes}")
    start = _LENGTH_BYTES + header_bytes
    try:
        entries = parse_json(text)
        entries.pop("__metadata__", None)
        tensors = {name: _parse(path, name, entry, start) for name, entry in entries.items()}
        _refuse_overlaps(list(tensors.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HFError(f"{path}: its header is damaged: {error}") from error
    end = max((tensor.begin + tensor.nbytes for tensor in tensors.values()), default=start)
    if end > size_bytes:
        raise HFError(f"{path}: truncated: its tensors end at byte {end}, the file has {size_bytes}")
    return tensors


def _files(folder: Path, single_file: str) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file() and single_file == SINGLE_FILE:
        return [folder / name for name in _indexed_files(index)]
    single = folder / single_file
    if single.is_file():
        return [single]
    if not folder.is_dir():
        raise HFError(f"{folder}: no such folder")
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:10]) or "nothing"
    raise HFError(
        f"{folder}: neither {single_file} nor {INDEX_FILE} is there (found: {found}); legal: a folder with "
        "weights in safetensors format"
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise HFError(f"{index} cannot be read: {error}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise HFError(f"{index}: {name!r} is not the name of a file beside it")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise HFError(f"{index.parent}: {len(absent)} of {len(names)} files are missing: {', '.join(absent)}")
    return names


def _parse(path: Path, name: str, entry: Any, start: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not all(type(number) is int for number in (begin, end, *shape)):
        raise ValueError(f"{name} has shape {shape} at bytes {begin} to {end}: not all are integers")
    tensor = StoredTensor(name, path, str(entry["dtype"]), shape, start + begin, end - begin)
    if begin < 0 or end < begin or any(size < 0 for size in shape):
        raise ValueError(f"{name} has shape {shape} at bytes {begin} to {end}")
    if tensor.dtype is not None and tensor.nbytes != math.prod(shape) * tensor.dtype.itemsize:
        raise ValueError(
            f"{name} takes {tensor.nbytes} bytes, its shape {shape} in {tensor.dtype_name} others"
        )
    return tensor


def _refuse_overlaps(tensors: list[StoredTensor]) -> None:
    """No byte is of two tensors."""
    ordered = sorted(tensors, key=lambda tensor: (tensor.begin, tensor.nbytes))
    for before, after in itertools.pairwise(ordered):
        if before.begin + before.nbytes > after.begin:
            raise ValueError(f"{before.name} and {after.name} overlap")


def _strange(path: Path, size_bytes: int) -> str:
    with open(path, "rb") as file:
        beginning = file.read(len(_LFS_POINTER))
    if beginning == _LFS_POINTER:
        return "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
    return f"truncated, or no safetensors file ({size_bytes} bytes)"


# Bytes of stored tensors, read by offset through one scratch buffer.


# Read and converted at once.
PIECE_BYTES = 8 * 2**20


class TensorFiles:
    """Files that are opened once, as a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._scratch = bytearray(0)

    def read(self, tensor: StoredTensor, start: int, nbytes: int) -> Tensor:
        """uint8 `[nbytes]` from byte `start` of the tensor on; good until the next call."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        piece = memoryview(self._scratch)[:nbytes]
        try:
            if tensor.path not in self._open:
                self._open[tensor.path] = open(tensor.path, "rb", buffering=0)  # noqa: SIM115
            file = self._open[tensor.path]
            file.seek(tensor.begin + start)
            num_read = 0
            while num_read < nbytes:
                more = file.readinto(piece[num_read:])  # type: ignore[attr-defined]
                if not more:
                    raise HFError(f"{tensor.path}: truncated: it ends inside {tensor.name}")
                num_read += more
        except OSError as error:
            raise HFError(f"{tensor.path} cannot be read: {error.strerror or error}") from error
        return torch.frombuffer(piece, dtype=torch.uint8)

    def __enter__(self) -> "TensorFiles":  # noqa: PYI034  (typing.Self needs Python 3.11)
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()


# Tensors that stay in their files: memory-mapped, so that bytes are read when they are first used, and never written.
#
# The kernel may drop them again whenever it needs the memory. A file that is cut short while it is mapped ends the
# process with SIGBUS at the next use of what is gone: no file of a running model may be changed.


def can_map(tensor: StoredTensor, dtype: torch.dtype) -> bool:
    """Whether the file's bytes are those of a tensor of `dtype`, at a place where one can begin."""
    return tensor.dtype == dtype and tensor.nbytes > 0 and tensor.begin % dtype.itemsize == 0


class MappedFiles:
    """Read-only mappings, one for each file. They live as long as a tensor refers to them."""

    def __init__(self) -> None:
        self._files: dict[Path, Tensor] = {}

    def flat(self, tensor: StoredTensor) -> Tensor:
        """The tensor's numbers, flat, as a view of the file. Raises `HFError` if it cannot be mapped."""
        assert tensor.dtype is not None, f"{tensor.name} is {tensor.dtype_name}"
        if tensor.path not in self._files:
            self._files[tensor.path] = _map(tensor.path)
        return self._files[tensor.path][tensor.begin : tensor.begin + tensor.nbytes].view(tensor.dtype)


def _map(path: Path) -> Tensor:
    """The whole file as uint8."""
    try:
        with open(path, "rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise HFError(f"{path} cannot be mapped: {error.strerror or error}") from error
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")  # nor is it to be written
        return torch.frombuffer(mapping, dtype=torch.uint8)


# The one error of this room: a Hugging Face folder that cannot be used as it is.


class HFError(Exception):
    """Something is missing, damaged, or of another model; the message holds the path and the names."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))
