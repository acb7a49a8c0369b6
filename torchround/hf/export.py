"""Writing a Hugging Face folder's safetensors from tensors that are in other files, piece by piece.

Memory holds one piece at a time, so a model of any size is exported with a few MiB.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from torchround.checkpoint.tensor_file import encode_header, memory_of
from torchround.hf.tensor_folder import INDEX_FILE, SINGLE_FILE, HFError, StoredTensor, TensorFiles
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
        for _, piece in files.pieces(self.source):
            yield piece.to(self.dtype)


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


def keep_packed(
    tensors: Iterable[ExportedTensor], base: Mapping[str, StoredTensor]
) -> tuple[list[ExportedTensor], list[str] | None]:
    """Put the codes and scales of `base` in the place of numbers that they still stand for.

    What programs run as one stays packed as a whole or not at all: the projections of an attention or of a feed-forward
    network, the experts of a block. Returns the tensors and the modules that only `base` packs; None if nothing is packed.
    """
    tensors = list(tensors)
    packed = {
        one.name: base[one.name] for one in tensors if one.name in base and len(base[one.name].parts) > 1
    }
    with TensorFiles() as files:
        fit = {one.name for one in tensors if one.name in packed and _is_same(files, one, packed[one.name])}
    changed = {_group(name) for name in packed.keys() - fit}
    kept: list[ExportedTensor] = []
    for one in tensors:
        stays = one.name in packed and _group(one.name) not in changed
        parts = packed[one.name].parts if stays else ()
        kept += [ExportedTensor(part.name, part, part.known_dtype) for part in parts] or [one]
    modules = [name for name in packed if _group(name) in changed]
    paths = [_group(name) if ".experts." in name else name.removesuffix(".weight") for name in modules]
    return kept, list(dict.fromkeys(paths)) if len(modules) < len(packed) else None


def _group(name: str) -> str:
    """Name the module above a weight's own; for experts the module of all of them."""
    return re.sub(r"\.experts\b.*", ".experts", name.removesuffix(".weight").rpartition(".")[0])


def _is_same(files: TensorFiles, tensor: ExportedTensor, packed: StoredTensor) -> bool:
    """Check whether a tensor without adapters has the numbers of `packed`, rounded to the type that it is stored in."""
    source = tensor.source
    if type(tensor) is not ExportedTensor or source is packed:
        return type(tensor) is ExportedTensor
    dtype = source.known_dtype
    for start, piece in files.pieces(packed):
        rounded = piece.to(dtype, copy=True)  # the next read overwrites the piece
        found = files.read(source, start * dtype.itemsize, len(piece) * dtype.itemsize)
        if not torch.equal(found.view(dtype), rounded):
            return False
    return True


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
