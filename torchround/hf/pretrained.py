"""Weights and adapters of Hugging Face folders, read tensor by tensor into memory that already exists.

Names, shapes and types are checked by the headers before the first byte is read. Reading takes a few MiB of scratch
(MXFP4: one expert matrix), so a model is never in memory twice.
"""

import functools
import hashlib
import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor

from torchround.hf.tensor_folder import (
    PIECE_BYTES,
    SINGLE_FILE,
    HFError,
    StoredTensor,
    TensorFiles,
    can_map,
    map_file,
    read_folder,
    view_of,
)
from torchround.layer import FileTensor, HFTensors, names_in, part_shape
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LISTED_NAMES = 20

# Bytes of each tensor that its fingerprint samples.
SAMPLED_BYTES = 64

# MXFP4 (OCP Microscaling Formats 1.0): FP4 numbers that share one power of two per 32. A byte holds two E2M1 numbers (sign,
# two exponent bits, one mantissa bit), the low half first. A scale is a UE8M0 byte: 2^(byte - 127), or not a number. GPT-OSS
# files hold an expert matrix as `<name>_blocks [E, Z, G, 16]` and `<name>_scales [E, Z, G]`, output rows first; the 16-bit
# tensor `<name>` is `[E, 32 G, Z]`, inputs first.
BLOCK, SCALE_BIAS, SCALE_NAN = 32, 127, 255
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class PretrainedWeights:
    """The weights in `folder` for a model whose parameters have `shapes` by name.

    `names`: the tensor, or the tensors to stack, that hold a parameter; parameters without an entry are not read.
    `redundant`: tensors that the folder may have although no parameter needs them. `tensors`: the folder's headers, if they
    are read already. Raises `HFError` with a list of
    the tensors that are missing, unknown, of another shape, or of a type that is not read.
    """

    def __init__(
        self,
        folder: Path | str,
        names: Mapping[str, HFTensors],
        shapes: Mapping[str, Sequence[int]],
        redundant: Collection[str] = (),
        single_file: str = SINGLE_FILE,
        tensors: Mapping[str, StoredTensor] | None = None,
    ) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.names = names
        self._tensors = read_folder(self.folder, single_file) if tensors is None else tensors
        wanted: dict[str, tuple[int, ...]] = {}
        for name, held in names.items():
            wanted.update(dict.fromkeys(names_in(held), part_shape(held, shapes[name])))
        self._check(wanted, set(redundant))
        self._mapped: frozenset[str] = frozenset()
        # Set from `read_adapters` if the run starts with saved adapters.
        self.adapters: PretrainedWeights | None = None

    def restrict(self, parameters: Collection[str]) -> None:
        """Let `load` read these parameters alone; the others come from elsewhere."""
        self.names = {name: self.names[name] for name in parameters}

    def bytes_of(self, parameters: Collection[str]) -> int:
        """Count the bytes that `load` reads from the files of the folder itself for these parameters."""
        return sum(
            self._tensors[part].nbytes
            for name, tensors in self.names.items()
            for tensor in names_in(tensors)
            for part in self._stored(tensor)
            if name in parameters and name not in self._mapped
        )

    def fingerprint(self) -> str:
        """Compute a digest by which copies of one folder are alike: each tensor's name, shape and first bytes."""
        digest = hashlib.sha256()
        with TensorFiles() as files:
            for name, tensor in sorted(self._tensors.items()):
                first = files.read(tensor, 0, min(tensor.nbytes, SAMPLED_BYTES))
                digest.update(
                    f"{name} {tensor.dtype_name} {tensor.shape} ".encode() + first.numpy().tobytes()
                )
        others = "" if self.adapters is None else f" and {self.adapters.fingerprint()}"
        return digest.hexdigest()[:16] + others

    def load(self, views: Mapping[str, AbstractContextManager[Tensor]]) -> None:
        """Fill `views` by parameter name, then the views of the adapters, if any. Mapped parameters are left out.

        Each view is asked for only while its parameter is read (`HostStore.filling`). A parameter without a view is not
        read: on several machines, each holds a part of what is trained.
        """
        progress = Progress(f"reading {self.folder}", self.bytes_of(views), size_text)
        with TensorFiles() as files:
            for name, tensors in self.names.items():
                if name in self._mapped or name not in views:
                    continue
                with views[name] as whole:
                    for tensor, view in _parts(tensors, whole):
                        self._read(files, tensor, view)
                        progress.advance(sum(self._tensors[part].nbytes for part in self._stored(tensor)))
        if self.adapters is not None:
            self.adapters.load(views)

    def map_tensors(
        self, parameters: Collection[str], dtype: torch.dtype
    ) -> dict[str, tuple[FileTensor, ...]]:
        """Map the parameters that the files hold as aligned numbers of `dtype`, without reading any.

        Returns for each the flat tensors in files that make it up, in order. Later calls of `load` skip them.
        """
        map_once, mapped = functools.cache(map_file), {}
        for name in parameters:
            stored = [self._tensors[part] for part in names_in(self.names[name]) if part in self._tensors]
            if len(stored) == len(names_in(self.names[name])) and all(can_map(t, dtype) for t in stored):
                mapped[name] = tuple(view_of(map_once(tensor.path), tensor) for tensor in stored)
        self._mapped = frozenset(mapped)
        return mapped

    def stored_tensors(self) -> Mapping[str, StoredTensor]:
        return self._tensors

    def dtypes(self) -> dict[str, torch.dtype]:
        """List the type of each tensor in the folder; bfloat16 for MXFP4."""
        found = {}
        for tensors in self.names.values():
            for name in names_in(tensors):
                stored = self._tensors.get(name)
                found[name] = (stored.dtype if stored else None) or torch.bfloat16
        return found

    def _stored(self, name: str) -> list[str]:
        """List the stored tensors that hold `name`: the tensor itself, or its MXFP4 blocks and scales."""
        quantised = [f"{name}_blocks", f"{name}_scales"]
        if name not in self._tensors and all(part in self._tensors for part in quantised):
            return quantised
        return [name]

    def _read(self, files: TensorFiles, name: str, view: Tensor) -> None:
        stored = [self._tensors[part] for part in self._stored(name)]
        if len(stored) == 2:
            _read_mxfp4(files, stored[0], stored[1], view)
        else:
            read_plain(files, stored[0], view)

    def _check(self, wanted: Mapping[str, tuple[int, ...]], redundant: set[str]) -> None:
        problems: dict[str, list[str]] = defaultdict(list)
        used = set(redundant)
        for name, shape in wanted.items():
            used.update(self._stored(name))
            self._check_one(name, shape, problems)
        problems["not part of the model"] = sorted(self._tensors.keys() - used)
        problems = {kind: found for kind, found in problems.items() if found}
        if problems:
            listed = (f"{kind}: {_some(found)}" for kind, found in problems.items())
            raise HFError(f"{self.folder}: the weights do not fit this model", *listed)

    def _check_one(self, name: str, shape: tuple[int, ...], problems: dict[str, list[str]]) -> None:
        stored = [self._tensors[part] for part in self._stored(name) if part in self._tensors]
        if not stored:
            problems["missing"].append(name)
            return
        legal: Collection[torch.dtype] = (torch.uint8,) if len(stored) == 2 else READABLE
        expected = _quantised_shapes(shape) if len(stored) == 2 else [shape]
        for tensor, want in zip(stored, expected, strict=True):
            if tensor.dtype not in legal:
                problems["of a type that is not read"].append(f"{tensor.name} ({tensor.dtype_name})")
            if tensor.shape != want:
                problems["of another shape"].append(
                    f"{tensor.name} {list(tensor.shape)} instead of {list(want)}"
                )


def read_plain(files: TensorFiles, tensor: StoredTensor, view: Tensor) -> None:
    """Read a tensor into `view`, converted to its type. Shape and type were checked. Raises `HFError`."""
    dtype = tensor.known_dtype
    flat = view.view(-1)
    step = PIECE_BYTES // dtype.itemsize
    for start in range(0, flat.numel(), step):
        target = flat[start : start + step]
        piece = files.read(tensor, start * dtype.itemsize, target.numel() * dtype.itemsize)
        target.copy_(piece.view(dtype))


def _read_mxfp4(files: TensorFiles, blocks: StoredTensor, scales: StoredTensor, view: Tensor) -> None:
    """Expand expert by expert, from `[Z, G, 16]` and `[Z, G]` to `view[e] [32 G, Z]`."""
    block_bytes, scale_bytes = (tensor.nbytes // len(view) for tensor in (blocks, scales))
    for expert, matrix in enumerate(view):
        shared = files.read(scales, expert * scale_bytes, scale_bytes).view(scales.shape[1:]).clone()
        packed = files.read(blocks, expert * block_bytes, block_bytes).view(blocks.shape[1:])
        matrix.copy_(dequantise(packed, shared).T)


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Expand uint8 `[..., G, 16]` and `[..., G]` to fp32 `[..., 32 G]`; exact, but numbers beyond fp32 become infinite."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32)
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # by byte, [256, 2]
    numbers = pairs[blocks.int()].flatten(-2)  # [..., G, 32]
    # Through fp64, because fp32's exp2 flushes the smallest powers to zero.
    factors = torch.exp2(scales.double() - SCALE_BIAS).masked_fill_(scales == SCALE_NAN, torch.nan).float()
    return numbers.mul_(factors[..., None]).flatten(-2)


def _parts(tensors: HFTensors, view: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with the part of the view that it fills."""
    if isinstance(tensors, str):
        yield tensors, view
    else:
        parts = view.view(-1, *part_shape(tensors, view.shape))
        yield from zip(names_in(tensors), parts, strict=True)


def _quantised_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Compute the shapes of blocks and scales of `[E, inputs, outputs]`; impossible ones unless 32 divides the inputs."""
    if len(shape) != 3 or shape[1] % BLOCK:
        return [(), ()]
    groups = (shape[0], shape[2], shape[1] // BLOCK)
    return [(*groups, BLOCK // 2), groups]


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:LISTED_NAMES])
    more = len(names) - LISTED_NAMES
    return f"{shown}, and {more} more" if more > 0 else shown
