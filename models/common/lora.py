"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen weights, and their names in PEFT's files.

A frozen `W x` becomes `W x + (alpha / rank) B (A drop(x))`; A begins random, B at zero. The adapted module keeps its
place and its parameters' names, so that the names of its tensors in Hugging Face files stay as they are.

This file adapts linear layers. Stacks of experts compute their adapters' products themselves (`experts.py`).

Shapes: A inputs, Z outputs, r rank.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from torchround.keeping import joined, passing
from torchround.layer import (
    HFNames,
    HFTensors,
    KeptWork,
    LayeredModel,
    LayerWork,
    MicroBatch,
    Products,
    names_in,
    renamed,
)
from torchround.models.common.config import ModelConfigError
from torchround.models.kernels.projections import project

PEFT_PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True)
class LoraShape:
    """The settings of all adapters. `targets` are last parts of module names, as in PEFT's `target_modules`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        """The factor on an adapter's product."""
        return self.alpha / self.rank


class Adaptable(nn.Module):
    """A module whose matrices may have low-rank adapters; `lora` is None as long as it has none.

    `adaptable` names the module's stacked matrices that could get adapters, `adapted` those that have. `place` is
    unique in the layer. `seed` is set before each forward; None means no dropout.

    Each mask comes from a generator of its own, made from the seed of layer and micro-batch, `place` and `use`. So the
    recomputation in a backward stage sees the same mask, and threads share nothing.
    """

    adaptable: tuple[str, ...] = ()
    adapted: tuple[str, ...] = ()
    lora: LoraShape | None = None
    place: int = 0
    seed: int | Tensor | None = None

    def adapter_shapes(self, name: str, lora: LoraShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of `<name>_lora_a` and `<name>_lora_b` for the stack `name`."""
        raise TypeError(f"{type(self).__name__} has no stacked matrices")

    def add_adapters(self, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> None:
        self.lora, self.place, self.adapted = lora, place, adapted
        for name in adapted:
            for suffix, shape in zip("ab", self.adapter_shapes(name, lora), strict=True):
                setattr(self, f"{name}_lora_{suffix}", nn.Parameter(torch.empty(shape, device="meta")))

    def init_adapters(self, generator: torch.Generator) -> None:
        """Fill each A uniformly within `1 / sqrt(inputs)` and each B with zeros."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("lora_a"):
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound, generator=generator)
                elif name.endswith("lora_b"):
                    parameter.zero_()

    def drop(self, x: Tensor, use: int = 0) -> Tensor:
        """Zero a share `dropout` of the elements of `x` and scale the others up."""
        if self.seed is None or self.lora is None or not self.lora.dropout:
            return x
        share = 1 - self.lora.dropout
        return x * draw_mask(x, torch.as_tensor(self.seed), self.place, use, share) / share


@torch.library.custom_op("torchround::draw_mask", mutates_args=())
def draw_mask(x: Tensor, seed: Tensor, place: int, use: int, share: float) -> Tensor:
    """Return a bool tensor of the shape of `x`, each element True with probability `share`.

    One operation for a compiler, to which the seed is data: a 0-dimensional tensor in host memory.
    """
    generator = torch.Generator(x.device).manual_seed(mask_seed(int(seed), place, use))
    return torch.empty(x.shape, dtype=torch.bool, device=x.device).bernoulli_(share, generator=generator)


@draw_mask.register_fake
def _mask_shape(x: Tensor, seed: Tensor, place: int, use: int, share: float) -> Tensor:
    return torch.empty(x.shape, dtype=torch.bool, device=x.device)


def mask_seed(seed: int, place: int, use: int) -> int:
    """Mix all three into a 63-bit number (multiplication by odd constants)."""
    return (seed * 0x9E3779B97F4A7C15 + place * 0xC2B2AE3D27D4EB4F + use * 0x165667B19E3779F9) % 2**63


class LoraLinear(nn.Linear, Adaptable):
    """A frozen linear layer with an adapter `lora_a [r, A]`, `lora_b [Z, r]`."""

    lora: LoraShape

    def __init__(self, base: nn.Linear, lora: LoraShape, place: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora, self.place = lora, place
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        low = project(self.drop(x), self.lora_a)  # [..., A] -> [..., r]
        plain = passing(F.linear, x, self.weight, self.bias)
        return joined(torch.add, plain, passing(project, low, self.lora_b) * self.lora.scale)


def linear_work(linear: nn.Linear, num_tokens: int, element_bytes: int) -> LayerWork:
    """Count the product of a linear layer and of its adapter, if it has one.

    The layer keeps nothing itself: its input is counted where it is made. An adapter keeps the output of A, and
    with dropout its input and the mask (one byte an element).
    """
    flops = 2.0 * num_tokens * linear.weight.numel()
    work = LayerWork((Products(flops, 0.0 if linear.weight.requires_grad else flops),))
    if not isinstance(linear, LoraLinear):
        return work
    dropped_bytes = linear.in_features * (element_bytes + 1) if linear.lora.dropout else 0
    adapter_flops = 2.0 * num_tokens * (linear.lora_a.numel() + linear.lora_b.numel())
    kept_bytes = num_tokens * (linear.lora.rank * element_bytes + dropped_bytes)
    return work + LayerWork((Products(adapter_flops),), kept_bytes)


def kept_linears(
    name: str, linears: Sequence[nn.Linear], num_tokens: int, element_bytes: int, saved: int = 0
) -> LayerWork:
    """Count linear layers that are the part `name` of a block.

    The part keeps each layer's output, with its adapter's product in it, and the output of the adapter's A. The backward
    needs `saved` elements of the outputs for each token.
    """
    work = sum((linear_work(linear, num_tokens, element_bytes) for linear in linears), start=LayerWork())
    ranks = [linear.lora.rank for linear in linears if isinstance(linear, LoraLinear)]
    sizes = [num_tokens * width * element_bytes for width in (*ranks, *(one.out_features for one in linears))]
    same_bytes = num_tokens * (sum(ranks) + saved) * element_bytes
    return replace(work, keepable=(KeptWork.of(name, sizes, work.forward_flops, same_bytes),))


def add_adapters(model: LayeredModel, names: HFNames, lora: LoraShape) -> None:
    """Freeze the model and put adapters on every module whose Hugging Face name ends in one of the targets.

    The head has none: it computes the loss from the projection's weight, chunk by chunk, without calling the module.
    Raises `ModelConfigError` for a target that no module has.
    """
    known: set[str] = set()
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        layer.requires_grad_(False)
        adapted: dict[str, list[str]] = {}
        for path, module in layer.named_modules() if layer is not model.layers[-1] else ():
            parts = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "adaptable", ())
            for part in parts:
                tensors = names.get(f"{layer_name}.{path}.{part}")
                if tensors is None:  # tied: another layer stores it
                    continue
                target = names_in(tensors)[0].removesuffix(_WEIGHT).rpartition(".")[2]
                known.add(target)
                if target in lora.targets:
                    adapted.setdefault(path, []).append(part)
        for place, (path, chosen) in enumerate(adapted.items()):
            base = layer.get_submodule(path)
            if isinstance(base, nn.Linear):
                layer.set_submodule(path, LoraLinear(base, lora, place))
            else:
                assert isinstance(base, Adaptable), f"{path} was found to be a module that takes adapters"
                base.add_adapters(lora, place, tuple(chosen))
        if adapted and lora.dropout:
            layer.register_forward_pre_hook(_hand_out_seed)
    if unknown := [target for target in lora.targets if target not in known]:
        raise ModelConfigError(
            f"lora.targets: this model has no {', '.join(map(repr, unknown))}; legal: {', '.join(sorted(known))}"
        )


def adapter_names(model: LayeredModel, names: HFNames) -> HFNames:
    """Map each adapter's parameters to the tensors that hold them in PEFT's files.

    PEFT wraps a linear layer once. It wraps a module of stacked parameters once for each that has an adapter, the
    first one innermost, and an inner wrapper is its outer one's `base_layer`.
    """
    found: HFNames = {}
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        for path, module in layer.named_modules():
            if not isinstance(module, Adaptable):
                continue
            own = [f"{layer_name}.{path}.{name}" for name, _ in module.named_parameters(recurse=False)]
            pairs = adapter_pairs(own)
            for index, (adapted, halves) in enumerate(pairs.items()):
                base = names[adapted]
                wrappers = "base_layer." * (len(pairs) - 1 - index) if _is_stacked(base) else ""
                for half, kind in zip(halves, ("lora_A", "lora_B"), strict=True):
                    found[half] = _renamed(base, wrappers + kind)
    return found


def adapter_pairs(adapters: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Map each adapted `<path>.weight` to `<path>.lora_a` and `lora_b`, and `<path>.gate` to `<path>.gate_lora_a` and `_b`."""
    stems = [name.removesuffix("lora_a") for name in adapters if name.endswith("lora_a")]
    return {
        stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight": (f"{stem}lora_a", f"{stem}lora_b")
        for stem in stems
    }


def peft_config(
    lora: Mapping[str, Any], adapters: HFNames, names: HFNames, base: str | None
) -> dict[str, Any]:
    """Return the content of `adapter_config.json`.

    PEFT names linear layers by their last part, and stacked parameters by their path in a block. It refuses dropout
    on experts, so the value is 0 there; dropout is for training alone.
    """
    bases = [names[adapted] for adapted in adapter_pairs(adapters)]
    # "model.layers.<i>.mlp.experts.down_proj" -> "mlp.experts.down_proj"
    parameters = sorted(
        {re.split(r"\.\d+\.", str(base), maxsplit=1)[1] for base in bases if _is_stacked(base)}
    )
    has_experts = bool(parameters) or any(isinstance(base, tuple) for base in bases)
    modules = [
        target for target in lora["targets"] if not any(name.endswith(f".{target}") for name in parameters)
    ]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0 if has_experts else lora["dropout"],
        "target_modules": modules,
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "inference_mode": True,
    }


def _is_stacked(tensors: HFTensors) -> bool:
    """Return whether a file holds all experts in one tensor, which is then no linear layer's weight."""
    return isinstance(tensors, str) and not tensors.endswith(_WEIGHT)


def _renamed(tensors: HFTensors, kind: str) -> HFTensors:
    # Without a linear layer's `.weight`, or the name of a stacked parameter.
    return renamed(tensors, lambda name: f"{PEFT_PREFIX}{name.rpartition('.')[0]}.{kind}{_WEIGHT}")


def _hand_out_seed(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    micro_batch = arguments[1]
    assert isinstance(micro_batch, MicroBatch), "a layer is called with its input and the micro-batch"
    for module in layer.modules():
        if isinstance(module, Adaptable) and module.lora is not None:
            module.seed = micro_batch.dropout_seed
