"""The tensors of a Hugging Face folder: finding them by their headers, reading them in pieces, mapping them.

A folder holds `model.safetensors`, or several files and `model.safetensors.index.json`, which says which tensor is in
which file. With both, the single file is read, as transformers does.
"""

import json
import logging
import math
import mmap
import os
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import DTYPES, ITEM_BYTES
from torchround.layer import FileTensor
from torchround.untrusted.tensor_header import read_tensor_header
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
PIECE_BYTES = 8 * 2**20  # read and converted at once

_MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
_LFS_POINTER = b"version https://git-lfs"

# Of `config.json`; the second is an old one of compressed-tensors.
QUANTISATION_KEYS = ("quantization_config", "compression_config")

OTHER_FORMATS = (".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")
"""Endings of files with weights that are not safetensors."""


class HFError(Exception):
    """A Hugging Face folder with something missing, damaged, or of another model; the message names path and names."""

    def __init__(self, message: object, *lines: object) -> None:
        super().__init__(terminal_safe(message, *lines))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in bytes `[begin, begin + nbytes)` of the file `path`. `dtype` is None if `dtype_name` is not supported."""

    name: str
    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    begin: int
    nbytes: int

    @property
    def dtype(self) -> torch.dtype | None:
        return DTYPES.get(self.dtype_name)

    @property
    def known_dtype(self) -> torch.dtype:
        """The type, of a tensor that was checked to have one that torchround reads."""
        assert self.dtype is not None, f"{self.name} is {self.dtype_name}"
        return self.dtype

    @property
    def parts(self) -> "tuple[StoredTensor, ...]":
        """The tensors of files that hold it."""
        return (self,)

    @property
    def unit_bytes(self) -> int:
        """Bytes that are read at once at no more cost than a few of them."""
        return 1

    def read(self, files: "TensorFiles", start: int, nbytes: int) -> Tensor:
        """Read uint8 `[nbytes]` from byte `start` of the tensor on; valid until the next read by `files`."""
        return files.read_range(self, self.begin + start, nbytes)


def read_folder(folder: Path, single_file: str = SINGLE_FILE) -> dict[str, StoredTensor]:
    """Find tensors by name in `single_file` or the index's files. Reads headers only. Raises `HFError` for bad files."""
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder, single_file):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise HFError(f"{folder}: {name} is in {tensors[name].path.name} and in {path.name}")
            tensors[name] = tensor
    return tensors


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises `HFError`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HFError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise HFError(f"{path} does not hold a JSON object")
    return content


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Find the tensors of one safetensors file. Raises `HFError` if the file does not hold all of their bytes."""
    try:
        with open(path, "rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
            file.seek(0)
            start, entries = read_tensor_header(file, _MAX_HEADER_BYTES, ITEM_BYTES)
    except OSError as error:
        raise HFError(f"{path} cannot be read: {error.strerror or error}") from error
    except EOFError as error:
        advice = "a Git LFS pointer, not the file itself; fetch it with `git lfs pull`"
        raise HFError(f"{path}: {advice if is_pointer else error}") from error
    except ValueError as error:
        raise HFError(f"{path}: its header is damaged: {error}") from error
    return {
        name: StoredTensor(
            name, path, entry.dtype_name, entry.shape, start + entry.begin, entry.end - entry.begin
        )
        for name, entry in entries.items()
    }


def _files(folder: Path, single_file: str) -> list[Path]:
    single, index = folder / single_file, folder / INDEX_FILE
    if single.is_file():
        # transformers reads the single file too if there is an index beside it.
        if single_file == SINGLE_FILE and index.is_file():
            logger.warning(
                "%s holds both %s and %s; the weights are read from %s, as transformers does",
                *(terminal_safe(folder), single_file, INDEX_FILE, single_file),
            )
        return [single]
    if index.is_file() and single_file == SINGLE_FILE:
        return [folder / name for name in _indexed_files(index)]
    if not folder.is_dir():
        raise HFError(f"{folder}: no such folder")
    names = sorted(path.name for path in folder.iterdir())
    lacks = f"{folder}: has neither {single_file} nor {INDEX_FILE} "
    others = [name for name in names if Path(name).suffix in OTHER_FORMATS]
    # Trainers leave files of these endings beside safetensors (`training_args.bin`); those say nothing about the weights.
    if others and not any(name.endswith(".safetensors") for name in names):
        raise HFError(
            f"{lacks}but {', '.join(others[:4])}, a format that torchround does not read; legal: a release in "
            "safetensors format, or what transformers makes of this one: "
            f"{'PeftModel' if single_file != SINGLE_FILE else 'AutoModelForCausalLM'}"
            ".from_pretrained(..).save_pretrained(NEW_FOLDER)"
        )
    raise HFError(
        f"{lacks}(found: {', '.join(names[:10]) or 'nothing'}); legal: a folder with weights in safetensors format"
    )


def _indexed_files(index: Path) -> list[str]:
    try:
        names = sorted(set(read_object(index)["weight_map"].values()))
    except (KeyError, TypeError, AttributeError) as error:
        raise HFError(f"{index} cannot be read: {error}") from error
    for name in names:
        # A path in an index could name any file of the machine, and an export looks for links by their endings.
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise HFError(f"{index}: {name!r} is not the name of a safetensors file beside it")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise HFError(f"{index.parent}: {len(absent)} of {len(names)} files are missing: {', '.join(absent)}")
    return names


def quantisation(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the table of a `config.json` that describes packed weights, empty if there is none."""
    inner = content.get("text_config")
    for holder in (content, inner if isinstance(inner, dict) else {}):
        for key in QUANTISATION_KEYS:
            if isinstance(table := holder.get(key), dict) and table:
                return table
    return {}


def quantised_advice(table: Mapping[str, Any]) -> str | None:
    """Say what to do instead of training on a release whose weights are not read; None for one that is read."""
    method = table.get("quant_method")
    groups = table.get("config_groups")
    weights = [group.get("weights") or {} for group in groups.values()] if isinstance(groups, dict) else []
    is_float8 = bool(weights) and all(
        (one.get("type"), one.get("num_bits")) == ("float", 8) for one in weights
    )
    if not table or method in ("mxfp4", "fp8") or (method == "compressed-tensors" and is_float8):
        return None
    name = f"{method}, {table['format']}" if isinstance(table.get("format"), str) else str(method)
    ways = {
        "bitsandbytes": "AutoModelForCausalLM.from_pretrained(FOLDER).dequantize().save_pretrained(NEW_FOLDER)",
        "compressed-tensors": "AutoModelForCausalLM.from_pretrained(FOLDER, quantization_config="
        "CompressedTensorsConfig(run_compressed=False)).save_pretrained(NEW_FOLDER)",
    }
    way = f", or what transformers makes of this one: {ways[str(method)]}" if method in ways else ""
    return (
        f"this is a quantised ({name}) release, whose weights torchround does not read; legal: the same model's release in "
        f"bfloat16, float16, float32, FP8 or MXFP4 (usually the name without the suffix){way}"
    )


class TensorFiles:
    """Files that are opened once and read by offset through one scratch buffer; a context manager."""

    def __init__(self) -> None:
        self._open: dict[Path, BinaryIO] = {}
        self._scratch = bytearray(0)

    def pieces(self, tensor: StoredTensor, multiple: int = 1) -> Iterator[tuple[int, Tensor]]:
        """Yield the numbers of a tensor, flat, a few MiB at a time: a `multiple` of them, and the place of the first.

        A piece is valid until the next read.
        """
        size, numel = tensor.known_dtype.itemsize, math.prod(tensor.shape)
        multiple = math.lcm(multiple, max(tensor.unit_bytes // size, 1))
        step = max(PIECE_BYTES // size // multiple, 1) * multiple
        for start in range(0, numel, step):
            piece = tensor.read(self, start * size, min(step, numel - start) * size)
            yield start, piece.view(tensor.known_dtype)

    def read_range(self, tensor: StoredTensor, begin: int, nbytes: int) -> Tensor:
        """Read uint8 `[nbytes]` from byte `begin` of the tensor's file on; valid until the next call."""
        if len(self._scratch) < nbytes:
            self._scratch = bytearray(nbytes)
        piece = memoryview(self._scratch)[:nbytes]
        try:
            if tensor.path not in self._open:
                self._open[tensor.path] = open(tensor.path, "rb", buffering=0)  # noqa: SIM115
            file = self._open[tensor.path]
            file.seek(begin)
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


def can_map(tensor: StoredTensor, dtype: torch.dtype) -> bool:
    """Check whether the file's bytes can be used as a tensor of `dtype` as they are: same type, aligned."""
    is_stored_so = tensor.parts == (tensor,) and tensor.dtype == dtype
    return is_stored_so and tensor.nbytes > 0 and tensor.begin % dtype.itemsize == 0


def map_file(path: Path) -> FileTensor:
    """Map the whole file as uint8, read-only: bytes are read at first use. Raises `HFError` if that is impossible.

    The map lives as long as a view of it. The system may drop its pages again whenever it needs the memory. If the
    file is cut short while it is mapped, the next use of the missing part by the map ends the process with SIGBUS, so
    no file of a running model may be changed.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            mapping = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise HFError(f"{path} cannot be mapped: {error.strerror or error}") from error
    weakref.finalize(mapping, os.close, descriptor)
    with warnings.catch_warnings():
        # PyTorch warns because it cannot mark a tensor as read-only. Nothing here writes to it.
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return FileTensor(torch.frombuffer(mapping, dtype=torch.uint8), path, descriptor, 0)


def view_of(mapped: FileTensor, tensor: StoredTensor) -> FileTensor:
    numbers = mapped.memory[tensor.begin : tensor.begin + tensor.nbytes].view(tensor.known_dtype)
    return FileTensor(numbers, mapped.path, mapped.descriptor, tensor.begin)
