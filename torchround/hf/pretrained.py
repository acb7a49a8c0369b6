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

from torchround.config import LoraTable
from torchround.hf.packed import read_numbers
from torchround.hf.tensor_folder import (
    PIECE_BYTES,
    SINGLE_FILE,
    HFError,
    StoredTensor,
    TensorFiles,
    can_map,
    map_file,
    read_object,
    view_of,
)
from torchround.layer import FileTensor, HFTensors, names_in, part_shape
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress

READABLE = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LISTED_NAMES = 20

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_TENSOR_FILE = "adapter_model.safetensors"

# Settings of PEFT that make an adapter compute something else than `x + scale * B A x` with one rank and one scale.
UNSUPPORTED_ADAPTERS = (
    *("use_rslora", "use_dora", "use_qalora", "use_bdlora", "rank_pattern", "alpha_pattern", "lora_bias"),
    *("modules_to_save", "layer_replication", "trainable_token_indices", "alora_invocation_tokens"),
    *("arrow_config", "monteclora_config", "kasa_config"),
)
# Values of `init_lora_weights` that leave the base as it was released. PiSSA, OLoRA, CorDA and LoftQ change it.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


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
        self._tensors = read_numbers(self.folder, single_file) if tensors is None else tensors
        wanted: dict[str, tuple[int, ...]] = {}
        for name, held in names.items():
            wanted.update(dict.fromkeys(names_in(held), part_shape(held, shapes[name])))
        self.carried = {name: self._tensors[name] for name in sorted(carried)}
        self._check(wanted, {*redundant, *carried})
        self._mapped: frozenset[str] = frozenset()
        # Set from `read_adapters` if the run starts with saved adapters.
        self.adapters: PretrainedWeights | None = None

    def restrict(self, parameters: Collection[str]) -> None:
        """Let `load` read these parameters alone; the others come from elsewhere."""
        self.names = {name: self.names[name] for name in parameters}

    def bytes_of(self, parameters: Collection[str]) -> int:
        """Return the bytes that `load` reads from the files of the folder itself for these parameters."""
        return sum(
            part.nbytes
            for name, tensors in self.names.items()
            for tensor in names_in(tensors)
            for part in self._tensors[tensor].parts
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

    def fingerprint(self) -> str:
        """Return a digest by which copies of one folder are alike: each tensor's name, shape and first bytes."""
        digest = hashlib.sha256()
        with TensorFiles() as files:
            stored = [part for tensor in self._tensors.values() for part in tensor.parts]
            for tensor in sorted(stored, key=attrgetter("name")):
                first = files.read(tensor, 0, min(tensor.nbytes, SAMPLED_BYTES))
                digest.update(
                    f"{tensor.name} {tensor.dtype_name} {tensor.shape} ".encode() + first.numpy().tobytes()
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
                        read_plain(files, self._tensors[tensor], view)
                        progress.advance(sum(part.nbytes for part in self._tensors[tensor].parts))
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
        """Return the type of each tensor in the folder; bfloat16 for packed ones."""
        names = [name for tensors in self.names.values() for name in names_in(tensors)]
        return {name: self._tensors[name].known_dtype for name in names}

    def _check(self, wanted: Mapping[str, tuple[int, ...]], redundant: set[str]) -> None:
        problems: dict[str, list[str]] = defaultdict(list)
        for name, shape in wanted.items():
            self._check_one(name, shape, problems)
        problems["not part of the model"] = sorted(self._tensors.keys() - redundant - wanted.keys())
        problems["of a type that cannot be copied"] = [
            f"{one.name} ({one.dtype_name})" for one in self.carried.values() if one.dtype is None
        ]
        problems = {kind: found for kind, found in problems.items() if found}
        if problems:
            listed = (f"{kind}: {_some(found)}" for kind, found in problems.items())
            raise HFError(f"{self.folder}: the weights do not fit this model", *listed)

    def _check_one(self, name: str, shape: tuple[int, ...], problems: dict[str, list[str]]) -> None:
        tensor = self._tensors.get(name)
        if tensor is None:
            problems["missing"].append(name)
            return
        if tensor.dtype not in READABLE:
            problems["of a type that is not read"].append(f"{name} ({tensor.dtype_name})")
        if tensor.shape != shape:
            problems["of another shape"].append(f"{name} {list(tensor.shape)} instead of {list(shape)}")


def read_plain(files: TensorFiles, tensor: StoredTensor, view: Tensor) -> None:
    """Read a tensor into `view`, converted to its type. Shape and type were checked. Raises `HFError`."""
    dtype = tensor.known_dtype
    flat = view.view(-1)
    unit = max(tensor.unit_bytes, dtype.itemsize) // dtype.itemsize
    step = max(PIECE_BYTES // dtype.itemsize // unit, 1) * unit
    for start in range(0, flat.numel(), step):
        target = flat[start : start + step]
        piece = files.read(tensor, start * dtype.itemsize, target.numel() * dtype.itemsize)
        target.copy_(piece.view(dtype))


def _parts(tensors: HFTensors, view: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor with the part of the view that it fills."""
    if isinstance(tensors, str):
        yield tensors, view
    else:
        parts = view.view(-1, *part_shape(tensors, view.shape))
        yield from zip(names_in(tensors), parts, strict=True)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:LISTED_NAMES])
    more = len(names) - LISTED_NAMES
    return f"{shown}, and {more} more" if more > 0 else shown


def read_adapters(
    table: LoraTable, names: Mapping[str, HFTensors], shapes: Mapping[str, Sequence[int]]
) -> PretrainedWeights:
    """Find the LoRA adapters of PEFT's format in the folder `table.path`, for the parameters `names`.

    Raises `HFError` for another rank or scale, for a kind of adapter that torchround does not build, and for
    tensors that do not fit.
    """
    folder = Path(os.path.expanduser(table.path or ""))
    try:
        content = read_object(folder / ADAPTER_CONFIG_FILE)
    except HFError as error:
        raise HFError(f"lora.path: {error}") from error
    found = {key: content.get(key) for key in ("peft_type", "r", "lora_alpha", "bias")}
    wrong = [f"{key} is not supported" for key in UNSUPPORTED_ADAPTERS if content.get(key)]
    start = content.get("init_lora_weights", True)
    wanted = {"peft_type": "LORA", "r": table.rank, "lora_alpha": table.alpha, "bias": "none"}
    differing = [
        f"{key} is {found[key]!r} instead of {wanted[key]!r}" for key in wanted if found[key] != wanted[key]
    ]
    if start not in PLAIN_STARTS:
        wrong.append(
            f"init_lora_weights is {start!r}: such adapters belong to a base that was changed with them, not to "
            "the released one; have PEFT convert them to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    if problems := differing + wrong:
        raise HFError(f"lora.path: {folder / ADAPTER_CONFIG_FILE}: {'; '.join(problems)}")
    return PretrainedWeights(folder, names, shapes, single_file=ADAPTER_TENSOR_FILE)
