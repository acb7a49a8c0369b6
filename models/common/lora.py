"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen weights: linear layers, and stacks of experts.

A frozen `W x` becomes `W x + (alpha / rank) B (A drop(x))`. The wrapped module keeps its place and its parameters'
names, so that everything that knows those (Hugging Face names, costs) stays as it is. A begins random, B at zero.

Shapes: R rows, A inputs, Z outputs, r rank, E experts.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.common.errors import ModelConfigError
from models.common.experts import SwiGLUExperts, grouped_product
from models.common.family import HFNames, HFTensors
from models.common.routing import Routes
from torchround.layer import LayeredModel, MicroBatch

PEFT_PREFIX = "base_model.model."
_WEIGHT = ".weight"


@dataclass(frozen=True)
class LoraShape:
    """`targets` are the last parts of Hugging Face module names, as in PEFT's `target_modules`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class Adapter(nn.Module):
    """What all adapters share. `place` is unique in the model; `seed` is set before each forward, None: no dropout.

    Each mask comes from a generator of its own, made from micro-batch, place and `use`: the recomputation in a
    backward stage sees the same mask, and threads share nothing.
    """

    lora: LoraShape
    place: int
    seed: int | None

    def init_adapter(self, generator: torch.Generator) -> None:
        """A uniform within `1 / sqrt(inputs)`, B zero."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("lora_a"):
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound, generator=generator)
                elif name.endswith("lora_b"):
                    parameter.zero_()

    def adapter_flops(self, num_tokens: int) -> float:
        """Matrix products of the forward, where the module it adapts does not count them itself."""
        return 0.0

    def adapter_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """Kept for the backward, likewise."""
        return 0

    def drop(self, x: Tensor, use: int = 0) -> Tensor:
        """`x` with a share `dropout` of its elements zeroed and the others scaled up."""
        if self.seed is None or not self.lora.dropout:
            return x
        generator = torch.Generator(x.device).manual_seed(mask_seed(self.seed, self.place, use))
        kept = torch.empty(x.shape, dtype=torch.bool, device=x.device)
        kept.bernoulli_(1 - self.lora.dropout, generator=generator)
        return x * kept / (1 - self.lora.dropout)


def mask_seed(seed: int, place: int, use: int) -> int:
    """A 63-bit number in which all three are mixed (multiplication by odd constants)."""
    return (seed * 0x9E3779B97F4A7C15 + place * 0xC2B2AE3D27D4EB4F + use * 0x165667B19E3779F9) % 2**63


class LoraLinear(nn.Linear, Adapter):
    """A linear layer, frozen, with an adapter `lora_a [r, A]`, `lora_b [Z, r]`."""

    def __init__(self, base: nn.Linear, lora: LoraShape, place: int) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        self.lora, self.place, self.seed = lora, place, None
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, device="meta"))

    def adapter_flops(self, num_tokens: int) -> float:
        return 2.0 * num_tokens * (self.lora_a.numel() + self.lora_b.numel())

    def adapter_bytes(self, num_tokens: int, element_bytes: int) -> int:
        """What A gives; with dropout, its input and the mask."""
        dropped = self.in_features * (element_bytes + 1) if self.lora.dropout else 0
        return num_tokens * (self.lora.rank * element_bytes + dropped)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(self.drop(x), self.lora_a)
        return F.linear(x, self.weight, self.bias) + F.linear(low, self.lora_b) * self.lora.scale


class LoraExperts(SwiGLUExperts, Adapter):
    """SwiGLU experts, frozen, with adapters `<name>_lora_a [E, r, A]`, `<name>_lora_b [E, Z, r]` on some of the three.

    Each expert's adapter is its own. On CUDA a rank that 8 does not divide takes the loop over experts.
    """

    def __init__(self, base: SwiGLUExperts, lora: LoraShape, place: int, adapted: tuple[str, ...]) -> None:
        num_experts, ffn_size, hidden_size = base.gate.shape
        super().__init__(hidden_size, num_experts, ffn_size)
        self.gate, self.up, self.down = base.gate, base.up, base.down
        self.lora, self.place, self.seed, self.adapted = lora, place, None, adapted
        for name in adapted:
            _, outputs, inputs = getattr(base, name).shape
            a = torch.empty(num_experts, lora.rank, inputs, device="meta")
            b = torch.empty(num_experts, outputs, lora.rank, device="meta")
            setattr(self, f"{name}_lora_a", nn.Parameter(a))
            setattr(self, f"{name}_lora_b", nn.Parameter(b))

    def row_flops(self) -> float:
        return super().row_flops() + sum(2.0 * (a.numel() + b.numel()) for a, b in self._pairs())

    def row_elements(self) -> int:
        """And what each A gives; with dropout, its input and the mask."""
        inputs = sum(a.shape[-1] + 1 for a, _ in self._pairs()) if self.lora.dropout else 0
        return super().row_elements() + len(self.adapted) * self.lora.rank + inputs

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        """A and B of one expert."""
        return [(getattr(self, f"{n}_lora_a")[0], getattr(self, f"{n}_lora_b")[0]) for n in self.adapted]

    def product(self, name: str, rows: Tensor, routes: Routes) -> Tensor:
        plain = super().product(name, rows, routes)
        if name not in self.adapted:
            return plain
        a, b = getattr(self, f"{name}_lora_a"), getattr(self, f"{name}_lora_b")
        dropped = self.drop(rows, use=1 + self.adapted.index(name))
        low = grouped_product(dropped, a.transpose(1, 2), routes.ends)
        return plain + grouped_product(low, b.transpose(1, 2), routes.ends) * self.lora.scale


def add_adapters(model: LayeredModel, names: HFNames, lora: LoraShape) -> None:
    """Freeze the model and put adapters on every module whose Hugging Face name ends in one of the targets.

    Raises `ModelConfigError` for a target that no module has.
    """
    places = adapted_modules(model, names, lora)
    for layer in model.layers:
        layer.requires_grad_(False)
    for number, (layer_index, path, parts) in enumerate(places):
        layer = model.layers[layer_index]
        base = layer.get_submodule(path)
        adapter = LoraLinear(base, lora, number) if isinstance(base, nn.Linear) else None
        if isinstance(base, SwiGLUExperts):
            adapter = LoraExperts(base, lora, number, parts)  # type: ignore[assignment]
        assert adapter is not None, f"{path} was found to be a module that takes adapters"
        layer.set_submodule(path, adapter)
    if lora.dropout:
        for layer_index in {index for index, _, _ in places}:
            model.layers[layer_index].register_forward_pre_hook(_hand_out_seed)


def adapted_modules(
    model: LayeredModel, names: HFNames, lora: LoraShape
) -> list[tuple[int, str, tuple[str, ...]]]:
    """Layer, path of the module, and which of its weights (experts have three) the targets name."""
    found: dict[tuple[int, str], list[str]] = {}
    known: set[str] = set()
    for index, (layer_name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, module in layer.named_modules():
            for part in _adaptable(module):
                tensors = names[f"{layer_name}.{path}.{part}"]
                target = _module_name(tensors if isinstance(tensors, str) else tensors[0]).rpartition(".")[2]
                known.add(target)
                if target in lora.targets:
                    found.setdefault((index, path), []).append(part)
    unknown = [target for target in lora.targets if target not in known]
    if unknown:
        raise ModelConfigError(
            f"lora.targets: this model has no {', '.join(map(repr, unknown))}; legal: {', '.join(sorted(known))}"
        )
    return [(index, path, tuple(parts)) for (index, path), parts in found.items()]


def adapter_names(model: LayeredModel, names: HFNames) -> HFNames:
    """Each adapter's parameters and the tensors that PEFT's files hold them in."""
    adapters: HFNames = {}
    for name in model.stored_shapes():
        for ours, theirs in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
            if name.endswith(ours):
                # "<path>.lora_a" belongs to "<path>.weight", "<path>.gate_lora_a" to "<path>.gate"
                stem = name.removesuffix(ours)
                base = names[stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"]
                adapters[name] = _renamed(base, theirs)
    return adapters


def adapter_pairs(adapters: HFNames) -> dict[str, tuple[str, str]]:
    """Each adapted parameter and its A and B, from the keys of `adapter_names`."""
    pairs = {}
    for a in adapters:
        if a.endswith("lora_a"):
            stem = a.removesuffix("lora_a")
            adapted = stem.removesuffix("_") if stem.endswith("_") else f"{stem}weight"
            pairs[adapted] = (a, f"{stem}lora_b")
    return pairs


def peft_config(lora: Mapping[str, Any], base: str | None) -> dict[str, Any]:
    """The content of `adapter_config.json`."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": lora["dropout"],
        "target_modules": list(lora["targets"]),
        "bias": "none",
        "inference_mode": True,
    }


def _adaptable(module: nn.Module) -> Iterator[str]:
    if isinstance(module, nn.Linear):
        yield "weight"
    elif isinstance(module, SwiGLUExperts):
        yield from ("gate", "up", "down")


def _module_name(tensor: str) -> str:
    return tensor.removesuffix(_WEIGHT)


def _renamed(tensors: HFTensors, kind: str) -> HFTensors:
    def one(tensor: str) -> str:
        return f"{PEFT_PREFIX}{_module_name(tensor)}.{kind}{_WEIGHT}"

    return one(tensors) if isinstance(tensors, str) else tuple(map(one, tensors))


def _hand_out_seed(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    micro_batch = arguments[1]
    assert isinstance(micro_batch, MicroBatch), "a layer is called with its input and the micro-batch"
    for module in layer.modules():
        if isinstance(module, Adapter):
            module.seed = micro_batch.dropout_seed
