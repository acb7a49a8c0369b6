"""Tensors that stay in their files: memory-mapped, so that bytes are read when they are first used, and never written.

The kernel may drop them again whenever it needs the memory. A file that is cut short while it is mapped ends the
process with SIGBUS at the next use of what is gone: no file of a running model may be changed.
"""

import mmap
import warnings
from pathlib import Path

import torch
from torch import Tensor

from torchround.hf.errors import HFError
from torchround.hf.folder import StoredTensor


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
