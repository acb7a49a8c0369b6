"""Weights and adapters of Hugging Face folders, read tensor by tensor into memory that already exists.

Names, shapes and types are checked by the headers before the first byte is read. Reading takes a few MiB of scratch
(MXFP4: one expert matrix), so a model is never in memory twice.
"""

import functools
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path

import torch
from torch import Tensor

from torchround.hf.packed import PackedTensor, read_numbers
from torchround.hf.tensor_folder import (
    SINGLE_FILE,
    HFError,
    StoredTensor,
    TensorFiles,
    can_map,
    map_file,
    view_of,
)
from torchround.layer import FileTensor, HFTensors, names_in, part_shape
from torchround.packed_formats import PackedPlace
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LISTED_NAMES = 20

# Bytes of each tensor that its fingerprint samples.
SAMPLED_BYTES = 64


class PretrainedWeights:
    """The weights in `folder` for a model whose parameters have `shapes` by name.

    `names`: the tensor, or the tensors to stack, that hold a parameter; parameters without an entry are not read.
    `redundant` and `carried`: tensors that the folder may have although no parameter needs them; an export copies the carried
    ones. `tensors`: the folder's headers, if they are read already. Raises `HFError` with a list of the tensors that are
    missing, unknown, of another shape, or of a type that is not read.
    """

    def __init__(
        self,
        folder: Path | str,
        names: Mapping[str, HFTensors],
        shapes: Mapping[str, Sequence[int]],
        redundant: Collection[str] = (),
        single_file: str = SINGLE_FILE,
        tensors: Mapping[str, StoredTensor] | None = None,
        carried: Collection[str] = (),
    ) -> None:
        self.folder = Path(os.path.expanduser(folder))
        self.names = names
        self.tensors = read_numbers(self.folder, single_file) if tensors is None else tensors
        wanted: dict[str, tuple[int, ...]] = {}
        for name, held in names.items():
            wanted.update(dict.fromkeys(names_in(held), part_shape(held, shapes[name])))
        self.carried = {name: self.tensors[name] for name in sorted(carried)}
        self._check(wanted, {*redundant, *carried})
        self._mapped: frozenset[str] = frozenset()
        # Set from `read_adapters` if the run starts with saved adapters.
        self.adapters: PretrainedWeights | None = None

    def restrict(self, parameters: Collection[str]) -> None:
        """Let `load` read these parameters alone; the others come from elsewhere."""
        self.names = {name: self.names[name] for name in parameters}

    def bytes_of(self, parameters: Collection[str]) -> int:
        """Count the bytes that `load` reads from the files of the folder itself for these parameters."""
        return sum(
            part.nbytes
            for name, tensors in self.names.items()
            for tensor in names_in(tensors)
            for part in self.tensors[tensor].parts
            if name in parameters and name not in self._mapped
        )

    def carried_text(self) -> str | None:
        """Say which parts of the folder are not trained, each with its count and bytes; None if there are none.

        A part begins where its names leave those of the parameters: `model.visual`, `mtp`, `model.layers.61`.
        """
        read = {name for held in self.names.values() for name in names_in(held)}
        trained = {name[: match.start()] for name in read for match in re.finditer(r"\.", name)}
        parts: dict[str, list[int]] = defaultdict(list)
        for name, tensor in self.carried.items():
            ends = [match.start() for match in re.finditer(r"\.", name)] or [len(name)]
            parts[next((name[:end] for end in ends if name[:end] not in trained), name)].append(tensor.nbytes)
        sizes = [f"{part}: {len(some)} tensors, {size_text(sum(some))}" for part, some in parts.items()]
        return f"{'; '.join(sizes)}; carried through the export" if sizes else None

    def fingerprint(self, with_adapters: bool = True) -> str:
        """Compute a digest by which copies of one folder are alike: each tensor's name, shape and first bytes."""
        digest = hashlib.sha256()
        with TensorFiles() as files:
            stored = [part for tensor in self.tensors.values() for part in tensor.parts]
            for tensor in sorted(stored, key=attrgetter("name")):
                digest.update(f"{tensor.name} {tensor.dtype_name} {tensor.shape} ".encode())
                digest.update(tensor.read(files, 0, min(tensor.nbytes, SAMPLED_BYTES)).numpy().tobytes())
        own, adapters = digest.hexdigest()[:16], self.adapters if with_adapters else None
        return own if adapters is None else f"{own} and {adapters.fingerprint()}"

    def load(
        self, views: Mapping[str, AbstractContextManager[Tensor | PackedPlace]], skipped: Collection[str] = ()
    ) -> None:
        """Fill `views` by parameter name, then the views of the adapters, if any. Mapped parameters are left out.

        Each view is asked for only while its parameter is read (`HostStore.filling`). A parameter without a view is not
        read: on several machines, each holds a part of what is trained.
        """
        views = {name: view for name, view in views.items() if name not in skipped}
        progress = Progress(f"reading {self.folder}", self.bytes_of(views), size_text)
        with TensorFiles() as files:
            for name, tensors in self.names.items():
                if name in self._mapped or name not in views:
                    continue
                with views[name] as whole:
                    for tensor, view in _parts(tensors, whole):
                        try:
                            self._read(files, tensor, view)
                        except ValueError as error:
                            stored = self.tensors[tensor]
                            raise HFError(f"{stored.path}: {tensor} cannot be packed: {error}") from error
                        progress.advance(sum(part.nbytes for part in self.tensors[tensor].parts))
        if self.adapters is not None:
            self.adapters.load(views)

    def _read(self, files: TensorFiles, name: str, view: Tensor | PackedPlace) -> None:
        """Read a tensor into `view`, converted to its type, or packed. Shape and type were checked. Raises `HFError`."""
        tensor = self.tensors[name]
        if (
            isinstance(view, PackedPlace)
            and isinstance(tensor, PackedTensor)
            and tensor.packs_as(view.format)
        ):
            tensor.read_packed(files, view)
        elif isinstance(view, PackedPlace):
            for start, piece in files.pieces(tensor, view.format.unit):
                view.write(start, piece)
        else:
            for start, piece in files.pieces(tensor):
                view.view(-1)[start : start + len(piece)].copy_(piece)

    def map_tensors(
        self, parameters: Collection[str], dtype: torch.dtype
    ) -> dict[str, tuple[FileTensor, ...]]:
        """Map the parameters that the files hold as aligned numbers of `dtype`, without reading any.

        Returns for each the flat tensors in files that make it up, in order. Later calls of `load` skip them.
        """
        map_once, mapped = functools.cache(map_file), {}
        for name in parameters:
            stored = [self.tensors[part] for part in names_in(self.names[name]) if part in self.tensors]
            if len(stored) == len(names_in(self.names[name])) and all(can_map(t, dtype) for t in stored):
                mapped[name] = tuple(view_of(map_once(tensor.path), tensor) for tensor in stored)
        self._mapped = frozenset(mapped)
        return mapped

    def _check(self, wanted: Mapping[str, tuple[int, ...]], redundant: set[str]) -> None:
        problems: dict[str, list[str]] = defaultdict(list)
        for name, shape in wanted.items():
            if (tensor := self.tensors.get(name)) is None:
                problems["missing"].append(name)
                continue
            if tensor.dtype not in READABLE:
                problems["of a type that is not read"].append(f"{name} ({tensor.dtype_name})")
            if tensor.shape != shape:
                problems["of another shape"].append(f"{name} {list(tensor.shape)} instead of {list(shape)}")
        problems["not part of the model"] = sorted(self.tensors.keys() - redundant - wanted.keys())
        problems["of a type that cannot be copied"] = [
            f"{one.name} ({one.dtype_name})" for one in self.carried.values() if one.dtype is None
        ]
        problems = {kind: found for kind, found in problems.items() if found}
        if problems:
            listed = (f"{kind}: {_some(found)}" for kind, found in problems.items())
            raise HFError(f"{self.folder}: the weights do not fit this model", *listed)


def _parts(tensors: HFTensors, view: Tensor | PackedPlace) -> Iterator[tuple[str, Tensor | PackedPlace]]:
    """Yield each tensor with the part of the view that it fills."""
    names = names_in(tensors)
    if isinstance(view, PackedPlace):
        yield from zip(names, view.split(len(names)), strict=True)
    else:
        yield from zip(names, view.view(-1, *part_shape(tensors, view.shape)), strict=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:LISTED_NAMES])
    more = len(names) - LISTED_NAMES
    return f"{shown}, and {more} more" if more > 0 else shown
