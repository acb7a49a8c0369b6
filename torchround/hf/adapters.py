"""Adapters in PEFT's files, and weights with adapters merged into them; both are streamed in pieces.

PEFT stacks the adapters of experts that are one tensor: `lora_A [E r, A]` with rows expert by expert, `lora_B [Z, r E]` with
columns rank by rank. A stack itself is `[E, Z, A]`, or `[E, A, Z]` with inputs first. A checkpoint holds of DoRA's magnitude
what training added to the norms of the frozen weight's rows, a file of PEFT the sum (`models/common/lora.py`).

Shapes: E experts, A inputs, Z outputs, r rank.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from torchround.config import LoraTable
from torchround.hf.export import ExportedTensor
from torchround.hf.pretrained import PretrainedWeights
from torchround.hf.tensor_folder import PIECE_BYTES, HFError, StoredTensor, TensorFiles, read_object
from torchround.layer import HFTensors
from torchround.packed_formats import PackedPlace

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"

# Keys of `[lora]` and those of PEFT with the same values.
KEYS: Mapping[str, str] = MappingProxyType(
    {"rank": "r", "alpha": "lora_alpha", "rslora": "use_rslora", "dora": "use_dora"}
    | {"rank_pattern": "rank_pattern", "alpha_pattern": "alpha_pattern"}
)
# Settings of PEFT that make an adapter compute something else than those of `[lora]` do.
UNSUPPORTED = (
    *("use_qalora", "use_bdlora", "lora_bias", "modules_to_save", "layer_replication"),
    *("trainable_token_indices", "alora_invocation_tokens"),
    *("arrow_config", "monteclora_config", "kasa_config", "velora_config"),
)
# Values of `init_lora_weights` that leave the base as it was released. PiSSA, OLoRA, CorDA and LoftQ change it.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter in files, and its place in the tensor that it is merged into.

    `a [E r, A]`, `b [Z, r E]`, and with DoRA what was added to the norms of rows, `magnitude [Z]`. E is `num_experts`, 1 for
    a linear layer. The tensor is a whole stack, or the matrix of `expert` from its output `row` on.
    """

    a: StoredTensor
    b: StoredTensor
    magnitude: StoredTensor | None
    scale: float
    num_experts: int = 1
    inputs_first: bool = False
    expert: int = 0
    row: int = 0


@dataclass(frozen=True)
class MergedTensor(ExportedTensor):
    """A weight with its adapter added in fp32 and rounded once: `source + scale * B A`, with DoRA scaled row by row."""

    adapter: StoredAdapter

    def pieces(self, files: TensorFiles) -> Iterator[Tensor]:
        one, stored = self.adapter, self.source.known_dtype
        a = _read_whole(files, one.a).unflatten(0, (one.num_experts, -1))  # [E, r, A]
        b = _read_whole(files, one.b).unflatten(1, (-1, one.num_experts))  # [Z, r, E]
        added = None if one.magnitude is None else _read_whole(files, one.magnitude)
        *stack, rows, columns = self.source.shape
        row_bytes = columns * stored.itemsize
        step = rows if stack else max(1, PIECE_BYTES // row_bytes)
        for index in range(stack[0] if stack else 1):
            expert = one.expert + index
            left, right = (a[expert].T, b[..., expert].T) if one.inputs_first else (b[..., expert], a[expert])
            left = left[one.row : one.row + rows]
            for start in range(0, rows, step):
                some = left[start : start + step]
                begin = (index * rows + start) * row_bytes
                piece = self.source.read(files, begin, len(some) * row_bytes).view(stored)
                weight = piece.view(len(some), columns).float()
                merged = torch.addmm(weight, some, right, alpha=one.scale)
                if added is not None:
                    lengths = added[start : start + step] + torch.linalg.vector_norm(weight, dim=1)
                    merged *= (lengths / torch.linalg.vector_norm(merged, dim=1))[:, None]
                yield merged.to(self.dtype)


@dataclass(frozen=True)
class MagnitudeTensor(ExportedTensor):
    """DoRA's magnitude as PEFT has it: the norms of the rows of `weight`, and what `source` adds to them."""

    weight: StoredTensor

    def pieces(self, files: TensorFiles) -> Iterator[Tensor]:
        yield _read_whole(files, self.source) + _row_norms(files, self.weight, self.weight.known_dtype)


def _read_whole(files: TensorFiles, tensor: StoredTensor) -> Tensor:
    return tensor.read(files, 0, tensor.nbytes).view(tensor.known_dtype).view(tensor.shape).float().clone()


def _row_norms(files: TensorFiles, weight: StoredTensor, dtype: torch.dtype) -> Tensor:
    """Compute the norms of the rows of `weight [Z, A]`, rounded to `dtype` before, as fp32 `[Z]`."""
    columns = weight.shape[1]
    pieces = (piece.view(-1, columns).to(dtype).float() for _, piece in files.pieces(weight, columns))
    return torch.cat([torch.linalg.vector_norm(rows, dim=1) for rows in pieces])


class AdapterWeights(PretrainedWeights):
    """The adapters of a folder. `weights` are those of the base, in the type of training, by the magnitude's tensor."""

    weights: Mapping[str, StoredTensor]
    dtype: torch.dtype

    def _read(self, files: TensorFiles, name: str, view: Tensor | PackedPlace) -> None:
        super()._read(files, name, view)
        if name in self.weights:
            assert isinstance(view, Tensor), "magnitudes are trained, so they are not packed"
            view -= _row_norms(files, self.weights[name], self.dtype)


def read_adapters(
    table: LoraTable,
    names: Mapping[str, HFTensors],
    shapes: Mapping[str, Sequence[int]],
    weights: Mapping[str, StoredTensor] | None = None,
    dtype: torch.dtype = torch.float32,
) -> PretrainedWeights:
    """Find the LoRA adapters of PEFT's format in the folder `table.path`, for the parameters `names`.

    `weights` are the frozen weights of DoRA's magnitudes, by the magnitude's tensor, and `dtype` the type that they are
    trained in. Raises `HFError` for other settings than the table's, for a kind of adapter that torchround does not build,
    and for tensors that do not fit.
    """
    folder = Path(os.path.expanduser(table.path or ""))
    try:
        content = read_object(folder / CONFIG_FILE)
    except HFError as error:
        raise HFError(f"lora.path: {error}") from error
    wrong = [f"{key} is not supported" for key in UNSUPPORTED if content.get(key)]
    start = content.get("init_lora_weights", True)
    wanted: dict[str, Any] = {"peft_type": "LORA", "bias": "none"}
    wanted |= {key: getattr(table, ours) for ours, key in KEYS.items()}
    # PEFT's files may have null for what is off.
    off = {"use_rslora": False, "use_dora": False, "rank_pattern": {}, "alpha_pattern": {}}
    found: dict[str, Any] = {key: content.get(key) or off.get(key) for key in wanted}
    # Of patterns the first one that matches decides.
    differing = [
        f"{key} is {found[key]!r} instead of {value!r}"
        for key, value in wanted.items()
        if found[key] != value or (isinstance(value, dict) and list(found[key]) != list(value))
    ]
    if start not in PLAIN_STARTS:
        wrong.append(
            f"init_lora_weights is {start!r}: such adapters belong to a base that was changed with them, not to "
            "the released one; have PEFT convert them to plain LoRA (save_pretrained with "
            "path_initial_model_for_weight_conversion)"
        )
    if problems := differing + wrong:
        raise HFError(f"lora.path: {folder / CONFIG_FILE}: {'; '.join(problems)}")
    adapters = AdapterWeights(folder, names, shapes, single_file=TENSOR_FILE)
    adapters.weights, adapters.dtype = weights or {}, dtype
    return adapters
