"""Frozen weights of a LoRA run that stay in the files they are released in (`lora.map_base`)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from torchround.hf import PretrainedWeights, WithAdapters
from torchround.layer import LayeredModel
from torchround.pipeline.memory import size_text

Mapped = Mapping[str, tuple[Tensor, ...]]


def map_base(
    pretrained: PretrainedWeights | WithAdapters, model: LayeredModel, dtype: torch.dtype
) -> dict[str, tuple[Tensor, ...]]:
    """All frozen parameters that the files hold in `dtype`, by name, as `HostStore` takes them. Reads none of them."""
    frozen = {
        f"{name}.{path}"
        for name, layer in zip(model.names, model.layers, strict=True)
        for path, parameter in layer.named_parameters()
        if not parameter.requires_grad
    }
    return pretrained.map_tensors(sorted(frozen & model.stored_shapes().keys()), dtype)


def mapped_text(mapped: Mapped, model: LayeredModel, dtype: torch.dtype) -> str:
    """How much of the frozen weights stays in files, on one line."""
    frozen = {p: p.numel() for layer in model.layers for p in layer.parameters() if not p.requires_grad}
    all_bytes = sum(frozen.values()) * dtype.itemsize
    mapped_bytes = sum(tensor.nbytes for tensors in mapped.values() for tensor in tensors)
    rest = "" if mapped_bytes == all_bytes else "; what files hold in another type is copied"
    return f"{size_text(mapped_bytes)} of {size_text(all_bytes)} of frozen weights stay in their files{rest}"
