"""Writing a Hugging Face folder's safetensors from tensors that are in other files, piece by piece.

Memory holds one piece at a time, so a model of any size is exported with a few MiB.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import encode_header, memory_of
from torchround.hf.tensor_folder import (
    INDEX_FILE,
    PIECE_BYTES,
    SINGLE_FILE,
    HFError,
    StoredTensor,
    TensorFiles,
)
from torchround.layer import HFTensors, names_in, part_shape

SHARD_BYTES = 5 * 10**9  # as transformers writes them


@dataclass(frozen=True)
class ExportedTensor:
    """A tensor to be written under `name` in `dtype`, with the numbers of `source`."""

    name: str
    source: StoredTensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.source.shape) * self.dtype.itemsize

    def pieces(self, files: TensorFiles) -> Iterator[Tensor]:
        """Yield the numbers in order, flat, a few MiB at a time."""
        stored = self.source.known_dtype
        unit = max(self.source.unit_bytes, stored.itemsize)
        step = max(PIECE_BYTES // unit, 1) * unit
        for start in range(0, self.source.nbytes, step):
            piece = files.read(self.source, start, min(step, self.source.nbytes - start))
            yield piece.view(stored).to(self.dtype)


def unstack(
    names: Mapping[str, HFTensors],
    stored: Mapping[str, StoredTensor],
    dtype_of: Callable[[str], torch.dtype],
    base: Mapping[str, StoredTensor] | None = None,
) -> Iterator[ExportedTensor]:
    """Yield every Hugging Face tensor of the parameters in `names`, cutting a stacked parameter into its tensors.

    `stored` has the parameters of a checkpoint by name. A parameter that is missing there was mapped from the
    folder `base`, whose tensors are given under their own names. Raises `HFError` if there is no base either.
    """
    for parameter, tensors in names.items():
        if parameter not in stored:
            if base is None:
                raise HFError(
                    f"{parameter} is not in the checkpoint, and there is no base folder to take it from"
                )
            for name in names_in(tensors):
                yield ExportedTensor(name, base[name], dtype_of(name))
            continue
        source = stored[parameter]
        parts, shape = names_in(tensors), part_shape(tensors, source.shape)
        part_bytes = source.nbytes // len(parts)
        for index, name in enumerate(parts):
            part = replace(source, shape=shape, begin=source.begin + index * part_bytes, nbytes=part_bytes)
            yield ExportedTensor(name, part, dtype_of(name))


def write_tensors(
    folder: Path,
    tensors: Iterable[ExportedTensor],
    shard_bytes: int = SHARD_BYTES,
    single_file: str = SINGLE_FILE,
) -> list[str]:
    """Write files of at most `shard_bytes` (a larger tensor gets its own), and an index if several. Returns their names."""
    shards = _shards(tensors, shard_bytes)
    where: dict[str, str] = {}
    with TensorFiles() as files:
        for number, shard in enumerate(shards, start=1):
            name = single_file if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            with open(folder / name, "xb") as out:
                # Wide elements first: each tensor is then aligned to its element, as in files of the safetensors library.
                shard.sort(key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
                out.write(encode_header({one.name: (one.dtype, tuple(one.source.shape)) for one in shard}))
                for tensor in shard:
                    out.writelines(memory_of(piece) for piece in tensor.pieces(files))
            where |= dict.fromkeys((tensor.name for tensor in shard), name)
    if len(shards) > 1:
        total_bytes = sum(tensor.nbytes for shard in shards for tensor in shard)
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(where.items()))}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return sorted(set(where.values()))


def _shards(tensors: Iterable[ExportedTensor], shard_bytes: int) -> list[list[ExportedTensor]]:
    shards: list[list[ExportedTensor]] = []
    filled_bytes = 0
    for tensor in tensors:
        if not shards or filled_bytes + tensor.nbytes > shard_bytes:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(tensor)
        filled_bytes += tensor.nbytes
    return shards
