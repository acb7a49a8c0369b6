"""LoRA adapters in PEFT's format: `adapter_config.json` and `adapter_model.safetensors`."""

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from torchround.config import LoraTable
from torchround.hf.errors import HFError
from torchround.hf.pretrained import HFTensors, PretrainedWeights

CONFIG_FILE = "adapter_config.json"
TENSOR_FILE = "adapter_model.safetensors"


def read_adapters(
    table: LoraTable, names: Mapping[str, HFTensors], shapes: Mapping[str, Sequence[int]]
) -> PretrainedWeights:
    """The adapters in the folder `table.path`, for parameters `names`.

    Raises `HFError` where they are of another rank or scale, of a kind that is not built, or other tensors.
    """
    folder = Path(os.path.expanduser(table.path or ""))
    try:
        content = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        found = {key: content.get(key) for key in ("peft_type", "r", "lora_alpha", "bias")}
        special = [
            key for key in ("use_rslora", "use_dora", "rank_pattern", "alpha_pattern") if content.get(key)
        ]
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise HFError(f"lora.path: {folder / CONFIG_FILE} cannot be read: {error}") from error
    wanted = {"peft_type": "LORA", "r": table.rank, "lora_alpha": table.alpha, "bias": "none"}
    wrong = [
        f"{key} is {found[key]!r} instead of {wanted[key]!r}" for key in wanted if found[key] != wanted[key]
    ]
    wrong += [f"{key} is not supported" for key in special]
    if wrong:
        raise HFError(f"lora.path: {folder / CONFIG_FILE}: {'; '.join(wrong)}")
    return PretrainedWeights(folder, names, shapes, single_file=TENSOR_FILE)


class WithAdapters:
    """A base and the adapters on it, read one after the other."""

    def __init__(self, base: PretrainedWeights, adapters: PretrainedWeights) -> None:
        self.folder = base.folder
        self._parts = base, adapters

    def map_tensors(self, parameters: Collection[str], dtype: torch.dtype) -> dict[str, tuple[Tensor, ...]]:
        """Parameters of the base, as `PretrainedWeights.map_tensors`."""
        return self._parts[0].map_tensors(parameters, dtype)

    def load(self, views: Mapping[str, Tensor]) -> None:
        """Fill the views of base and adapters."""
        for part in self._parts:
            part.load(views)
