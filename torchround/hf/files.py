"""Bytes of stored tensors, read by offset through one scratch buffer."""

from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from torchround.hf.errors import HFError
from torchround.hf.folder import StoredTensor

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
