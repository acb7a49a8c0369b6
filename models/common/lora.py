"""Low-rank adapters (LoRA, arXiv 2106.09685) on frozen weights, and their names in PEFT's files.

A frozen `W x` becomes `W x + scale B (A drop(x))`; A begins random, B at zero. The adapted module keeps its place and its
parameters' names, so that the names of its tensors in Hugging Face files stay as they are.

With DoRA (arXiv 2402.09353) each row of `V = W + scale B A` is scaled to a trained length m, which begins at that of W's
row: `m V / ||V||`. The norm is a constant of each step, as section 4.3 of the paper has it and PEFT does. The parameter is
`m - ||W||`: it begins at zero whatever the weights are, and 16 bits hold a small change of m that they would not hold of m.

This file adapts linear layers. Stacks of experts compute their adapters' products themselves (`experts.py`).

Shapes: A inputs, Z outputs, r rank.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
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
    decayed_names,
    names_in,
    renamed,
)
from torchround.models.common.config import ModelConfigError
from torchround.models.kernels.projections import Projection, project
from torchround.packed_formats import PackedFormat

PEFT_PREFIX = "base_model.model."
MAGNITUDE = "lora_magnitude_vector"
_WEIGHT = ".weight"
_KINDS = ("lora_A.weight", "lora_B.weight", MAGNITUDE)
# Targets that PEFT, with transformers 5, moves to experts' stacks if a model has some, whatever else has that name.
TAKEN_FOR_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
# Of a weight whose rows' norms are computed at once, in fp32: 32 MiB.
NORM_ELEMENTS = 1 << 23


@dataclass(frozen=True)
class LoraShape:
    """The settings of all adapters, or of one. `targets` are ends of module names, as in PEFT's `target_modules`."""

    rank: int
    alpha: float
    dropout: float
    targets: tuple[str, ...]
    rslora: bool = False
    dora: bool = False
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    @property
    def scale(self) -> float:
        """The factor on an adapter's product."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def of(self, name: str) -> "LoraShape":
        """Return the settings of the adapter on module `name`. The first pattern that matches decides, as in PEFT."""
        rank = next((r for pattern, r in self.rank_pattern.items() if _matches(pattern, name)), self.rank)
        alpha = next((a for pattern, a in self.alpha_pattern.items() if _matches(pattern, name)), self.alpha)
        return replace(self, rank=rank, alpha=alpha, rank_pattern={}, alpha_pattern={})


def _matches(pattern: str, name: str) -> bool:
    """Decide as PEFT's `get_pattern_key`: the pattern is the whole name, or its end behind a dot."""
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


class Adaptable(nn.Module):
    """A module whose matrices may have low-rank adapters; `lora` is None as long as it has none.

    `adaptable` names the module's stacked matrices that could get adapters. `adapted` has the settings of those that
    have. `inputs_first`: a stack is `[E, A, Z]`, not `[E, Z, A]`. `place` is unique in the layer. `seed` is set before each
    forward; None means no dropout.

    Each mask comes from a generator of its own, made from the seed of layer and micro-batch, `place` and `use`. So the
    recomputation in a backward stage sees the same mask, and threads share nothing.
    """

    adaptable: tuple[str, ...] = ()
    # A tuple, because layers are compiled as one kind if their settings are equal.
    shapes: tuple[tuple[str, LoraShape], ...] = ()
    inputs_first: bool = False
    lora: LoraShape | None = None
    place: int = 0
    seed: int | Tensor | None = None

    @property
    def adapted(self) -> Mapping[str, LoraShape]:
        return dict(self.shapes)

    def adapter_shapes(self, name: str, lora: LoraShape) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of `<name>_lora_a` and `<name>_lora_b` for the stack `name`."""
        raise TypeError(f"{type(self).__name__} has no stacked matrices")

    def add_adapters(self, lora: LoraShape, place: int, adapted: Mapping[str, LoraShape]) -> None:
        self.lora, self.place, self.shapes = lora, place, tuple(adapted.items())
        for name, own in adapted.items():
            for suffix, shape in zip("ab", self.adapter_shapes(name, own), strict=True):
                setattr(self, f"{name}_lora_{suffix}", nn.Parameter(torch.empty(shape, device="meta")))

    def init_adapters(self, generator: torch.Generator) -> None:
        """Fill each A uniformly within `1 / sqrt(inputs)`, and all else with zeros."""
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if name.endswith("lora_a"):
                    bound = 1 / math.sqrt(parameter.shape[-1])
                    parameter.uniform_(-bound, bound, generator=generator)
                elif name.endswith(("lora_b", "lora_magnitude")):
                    parameter.zero_()

    def stays_packed(self, name: str, packed: PackedFormat) -> bool:
        """Decide whether the products of the stack `name` unpack it themselves, and if so prepare them for the format."""
        return False

    def drop(self, x: Tensor, use: int = 0) -> Tensor:
        """Zero a share `dropout` of the elements of `x` and scale the others up."""
        if self.seed is None or self.lora is None or not self.lora.dropout:
            return x
        share = 1 - self.lora.dropout
        return x * draw_mask(x, torch.as_tensor(self.seed), self.place, use, share) / share


def init_adapters(layer: nn.Module, generator: torch.Generator) -> None:
    for module in layer.modules():
        if isinstance(module, Adaptable):
            module.init_adapters(generator)


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


class LoraLinear(Projection, Adaptable):
    """A frozen linear layer with an adapter `lora_a [r, A]`, `lora_b [Z, r]`, and with DoRA `lora_magnitude [Z]`."""

    lora: LoraShape

    def __init__(self, base: nn.Linear, lora: LoraShape, place: int) -> None:
        super().__init__(base.in_features, base.out_features, base.bias is not None)
        self.weight, self.bias = base.weight, base.bias
        self.lora, self.place, self.shapes = lora, place, (("weight", lora),)
        self.part = getattr(base, "part", None)
        self.lora_a = nn.Parameter(torch.empty(lora.rank, base.in_features, device="meta"))
        self.lora_b = nn.Parameter(torch.empty(base.out_features, lora.rank, device="meta"))
        if lora.dora:
            self.lora_magnitude = nn.Parameter(torch.empty(base.out_features, device="meta"))

    def product(self, x: Tensor) -> Tensor:
        dropped = self.drop(x)
        low = project(dropped, self.lora_a)  # [..., A] -> [..., r]
        if self.lora.dora:
            return self._scaled(x, dropped, low)
        plain = passing(F.linear, x, self.weight, self.bias)
        return joined(torch.add, plain, passing(project, low, self.lora_b) * self.lora.scale)

    def _scaled(self, x: Tensor, dropped: Tensor, low: Tensor) -> Tensor:
        """Return `W x + (growth - 1) W drop(x) + growth scale B (A drop(x))` and the bias, growth being `m / ||V||`."""
        plain = passing(F.linear, dropped, self.weight)
        changed = joined(torch.add, plain, passing(project, low, self.lora_b) * self.lora.scale)
        with torch.no_grad():
            before, now = row_norms(self.weight, self.lora_a, self.lora_b, self.lora.scale)
        # In fp32: a small growth would be lost in 16 bits.
        result = (changed * ((before + self.lora_magnitude.float()) / now)).to(x.dtype)
        if dropped is not x:
            result = result + joined(torch.sub, passing(F.linear, x, self.weight), plain)
        return result if self.bias is None else result + self.bias


def row_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Compute in fp32 the norms of the rows of `weight [Z, A]` and of `weight + scale b a`, `[2, Z]`."""
    before, now, wide = [], [], a.float()
    for start in range(0, len(weight), step := max(1, NORM_ELEMENTS // weight.shape[1])):
        rows = weight[start : start + step].float()
        changed = passing(
            lambda rows, low: torch.addmm(rows, low, wide, alpha=scale), rows, b[start : start + step].float()
        )
        before.append(torch.linalg.vector_norm(rows, dim=1))
        now.append(torch.linalg.vector_norm(changed, dim=1))
    return joined(torch.cat, before + now).view(2, -1)


def linear_work(linear: nn.Linear, num_tokens: int, element_bytes: int) -> LayerWork:
    """Count the product of a linear layer and of its adapter, if it has one.

    The layer keeps nothing itself: its input is counted where it is made. An adapter keeps the output of A, and
    with dropout its input and the mask (one byte an element). DoRA also keeps the products before they are scaled, in
    fp32 for a moment, and the rows' norms; with dropout it multiplies the frozen weight twice.
    """
    flops = 2.0 * num_tokens * linear.weight.numel()
    work = LayerWork((Products(flops, 0.0 if linear.weight.requires_grad else flops),))
    if not isinstance(linear, LoraLinear):
        return work
    dropped_bytes = linear.in_features * (element_bytes + 1) if linear.lora.dropout else 0
    adapter_flops = 2.0 * num_tokens * (linear.lora_a.numel() + linear.lora_b.numel())
    kept_bytes = num_tokens * (linear.lora.rank * element_bytes + dropped_bytes)
    work += LayerWork((Products(adapter_flops),), kept_bytes)
    if linear.lora.dora:
        norm_flops = 2.0 * linear.lora.rank * linear.weight.numel()
        products = (Products(norm_flops, norm_flops), *(work.products[:1] if linear.lora.dropout else ()))
        norm_elements = 3 * min(linear.weight.numel(), max(NORM_ELEMENTS, linear.in_features))
        elements = num_tokens * linear.out_features
        scratch_bytes = 4 * max(3 * elements, norm_elements)
        kept_bytes = elements * element_bytes + 2 * 4 * linear.out_features
        work += LayerWork(products, kept_bytes, workspace_bytes=scratch_bytes)
    return work


def kept_linears(
    name: str, linears: Sequence[nn.Linear], num_tokens: int, element_bytes: int, saved: int = 0
) -> LayerWork:
    """Count linear layers that are the part `name` of a block.

    The part keeps each layer's output, with its adapter's product in it, and the output of the adapter's A. The backward
    needs `saved` elements of the outputs for each token. With DoRA the part keeps products before they are scaled, which its
    own backward needs; what is needed of the outputs is then other memory.
    """
    work = sum((linear_work(linear, num_tokens, element_bytes) for linear in linears), start=LayerWork())
    ranks = [linear.lora.rank for linear in linears if isinstance(linear, LoraLinear)]
    scaled = [one for one in linears if isinstance(one, LoraLinear) and one.lora.dora]
    widths = [*ranks, *(one.out_features for one in linears)]
    widths += [one.out_features for one in scaled if one.lora.dropout]
    sizes = [num_tokens * width * element_bytes for width in widths]
    sizes += (norm_sizes := [2 * 4 * one.out_features for one in scaled])
    if scaled:
        saved = sum(one.out_features for one in scaled)
    same_bytes = num_tokens * (sum(ranks) + saved) * element_bytes + sum(norm_sizes)
    return replace(work, keepable=(KeptWork.of(name, sizes, work.forward_flops, same_bytes),))


def add_adapters(model: LayeredModel, names: HFNames, lora: LoraShape) -> None:
    """Freeze the model and put adapters on every module whose Hugging Face name ends in one of the targets.

    The head has none: it computes the loss from the projection's weight, chunk by chunk, without calling the module.
    Raises `ModelConfigError` for a target or a pattern that no module has, and for settings that PEFT's experts lack.
    """
    known: set[str] = set()
    found: dict[str, None] = {}  # in order
    met: set[str] = set()
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        layer.requires_grad_(False)
        adapted: dict[str, dict[str, LoraShape]] = {}
        for path, module in layer.named_modules() if layer is not model.layers[-1] else ():
            parts = ("weight",) if isinstance(module, nn.Linear) else getattr(module, "adaptable", ())
            for part in parts:
                tensors = names.get(f"{layer_name}.{path}.{part}")
                if tensors is None:  # tied: another layer stores it
                    continue
                ends = [name.removesuffix(_WEIGHT) for name in names_in(tensors)]
                known.add(ends[0].rpartition(".")[2])
                chosen = [t for t in lora.targets if all(f".{end}".endswith(f".{t}") for end in ends)]
                if chosen:
                    met.update(chosen)
                    found |= dict.fromkeys(ends)
                    if part != "weight":
                        _check_stack(lora, ends, is_one=isinstance(tensors, str))
                    adapted.setdefault(path, {})[part] = lora.of(ends[0])
        for place, (path, shapes) in enumerate(adapted.items()):
            base = layer.get_submodule(path)
            if isinstance(base, nn.Linear):
                layer.set_submodule(path, LoraLinear(base, shapes["weight"], place))
            else:
                assert isinstance(base, Adaptable), f"{path} was found to be a module that takes adapters"
                base.add_adapters(lora, place, shapes)
        if adapted and lora.dropout:
            layer.register_forward_pre_hook(_hand_out_seed)
    if unknown := [target for target in lora.targets if target not in met]:
        raise ModelConfigError(
            f"lora.targets: this model has no {', '.join(map(repr, unknown))}; legal: {', '.join(sorted(known))}"
        )
    for key in ("rank_pattern", "alpha_pattern"):
        for pattern in getattr(lora, key):
            if not any(_matches(pattern, name) for name in found):
                last = sorted({name.rpartition(".")[2] for name in found})
                near = ", ".join(get_close_matches(pattern, [*last, *found], cutoff=0.0))
                raise ModelConfigError(
                    f"lora.{key}: {pattern!r} is no name of a module with an adapter, nor the end of one behind a dot; "
                    f"nearest: {near}"
                )


def pack_base(model: LayeredModel, formats: PackedFormat | Mapping[str, PackedFormat]) -> LayeredModel:
    """Have the frozen matrices of the blocks packed in one format, or by name, except routers and those that do not fit.

    A router's choice would change by rounding its weights, and it is small. Embedding and head stay too: few of their rows
    matter for a token, and no adapter can correct them.
    """
    packed, matrices = {}, model.stored_shapes().keys() & decayed_names(model)  # biases of experts are none
    for layer_name, layer in zip(model.names[1:-1], model.layers[1:-1], strict=True):
        for path, parameter in layer.named_parameters():
            name, owner = f"{layer_name}.{path}", path.rpartition(".")[0]
            found = formats if isinstance(formats, PackedFormat) else formats.get(name)
            stays = parameter.requires_grad or name in model.own_dtypes or name not in matrices
            if found is None or stays or path.endswith("bias"):
                continue
            if found.name == "mxfp4" and getattr(layer.get_submodule(owner), "inputs_first", False):
                found = replace(found, inner=parameter.shape[-1])  # groups of inputs, as GPT-OSS is released
            if found.fits(parameter.shape) and not _is_router(layer, owner):
                module = layer.get_submodule(owner)
                is_stack = isinstance(module, Adaptable) and module.stays_packed(
                    path.rpartition(".")[2], found
                )
                packed[name] = replace(found, by_matrix=True) if is_stack else found
    return replace(model, packed=packed)


def _is_router(layer: nn.Module, path: str) -> bool:
    above, _, name = path.rpartition(".")
    # A dense feed-forward may call its gate so too; it has no experts beside it.
    is_gate_of_experts = name == "gate" and hasattr(layer.get_submodule(above), "experts")
    return is_gate_of_experts or "router" in path.split(".")


def _check_stack(lora: LoraShape, names: Sequence[str], is_one: bool) -> None:
    """Raise `ModelConfigError` for settings that PEFT does not have for experts, or has in another way.

    Experts that files hold one by one are joined by PEFT while it loads them: gate and up then have one adapter of twice
    the rank and alpha. That scale is right without `rslora` and patterns alone.
    """
    last = names[0].rpartition(".")[2]
    if lora.dora:
        raise ModelConfigError(
            f"lora.dora: PEFT has no DoRA for experts, and lora.targets names their {last}; legal: targets without experts"
        )
    patterns = (*lora.rank_pattern, *lora.alpha_pattern)
    matching = [pattern for pattern in patterns if any(_matches(pattern, name) for name in names)]
    if not is_one and (lora.rslora or matching):
        given = f"the pattern {matching[0]!r}" if matching else "lora.rslora"
        raise ModelConfigError(
            f"lora: {given} is for experts' {last}, which PEFT joins by lora.rank and lora.alpha alone; legal: patterns of "
            f"other modules, and lora.alpha = {lora.alpha * math.sqrt(lora.rank)!r} for the scale of lora.rslora"
        )


@dataclass(frozen=True)
class Adapter:
    """The adapter of one weight: the stored names of A, of B, and with DoRA of the magnitude.

    `num_experts` is that of a stack whose experts share these tensors, in PEFT's order, and is otherwise 1.
    """

    parameters: tuple[str, ...]
    shape: LoraShape
    num_experts: int
    inputs_first: bool


def adapters_of(model: LayeredModel, names: HFNames) -> dict[str, Adapter]:
    """Find the adapter of each adapted weight, by the weight's stored name. `names` are those of modules."""
    found = {}
    for layer_name, layer in zip(model.names, model.layers, strict=True):
        for path, module in layer.named_modules():
            for part, shape in module.adapted.items() if isinstance(module, Adaptable) else ():
                weight, stem = f"{layer_name}.{path}.{part}", "" if part == "weight" else f"{part}_"
                kinds = ("lora_a", "lora_b", "lora_magnitude")[: 3 if shape.dora else 2]
                parameters = tuple(f"{layer_name}.{path}.{stem}{kind}" for kind in kinds)
                num_experts = len(getattr(module, part)) if _is_stacked(names[weight]) else 1
                found[weight] = Adapter(parameters, shape, num_experts, module.inputs_first)
    return found


def adapter_names(model: LayeredModel, names: HFNames) -> HFNames:
    """Map each adapter's parameters to the tensors that hold them in PEFT's files.

    PEFT wraps a linear layer once. It wraps a module of stacked parameters once for each that has an adapter, the
    first one innermost, and an inner wrapper is its outer one's `base_layer`.
    """
    found: HFNames = {}
    adapters = adapters_of(model, names)
    modules = [weight.rpartition(".")[0] for weight in adapters]
    for index, (weight, adapter) in enumerate(adapters.items()):
        base = names[weight]
        outer = modules[index + 1 :].count(modules[index]) if _is_stacked(base) else 0
        for parameter, kind in zip(adapter.parameters, _KINDS, strict=False):
            found[parameter] = _renamed(base, "base_layer." * outer + kind)
    return found


def peft_config(
    lora: Mapping[str, Any], adapted: Iterable[HFTensors], names: Iterable[HFTensors], base: str | None
) -> dict[str, Any]:
    """Return the content of `adapter_config.json` for adapters on the tensors `adapted` of all `names` in modules.

    PEFT names linear layers by their last part, and stacked parameters by their path in a block. It refuses dropout
    on experts, so the value is 0 there; dropout is for training alone. Raises `ModelConfigError` for what PEFT would lose.
    """
    bases = list(adapted)
    # "model.layers.<i>.mlp.experts.down_proj" -> "mlp.experts.down_proj"
    parameters = sorted(
        {re.split(r"\.\d+\.", str(base), maxsplit=1)[-1] for base in bases if _is_stacked(base)}
    )
    has_experts = bool(parameters) or any(isinstance(base, tuple) for base in bases)
    linear = [f".{names_in(base)[0].removesuffix(_WEIGHT)}" for base in bases if not _is_stacked(base)]
    last = {name.rpartition(".")[2] for name in linear}
    if (lost := sorted(last & TAKEN_FOR_EXPERTS)) and any(
        str(one).endswith("experts.down_proj") for one in names
    ):
        raise ModelConfigError(
            f"PEFT takes {', '.join(lost)} for experts in this model, and would leave the adapters of linear layers of that "
            "name out; legal: an export of merged weights, or lora.targets without them (experts.down_proj for experts alone)"
        )
    patterns = {key: lora[key] for key in ("rank_pattern", "alpha_pattern")}
    settings = {"use_rslora": lora["rslora"], "use_dora": lora["dora"], **patterns}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora["rank"],
        "lora_alpha": lora["alpha"],
        "lora_dropout": 0.0 if has_experts else lora["dropout"],
        "target_modules": [t for t in lora["targets"] if any(name.endswith(f".{t}") for name in linear)],
        **({"target_parameters": parameters} if parameters else {}),
        **{key: value for key, value in settings.items() if value},
        "bias": "none",
        "inference_mode": True,
    }


def _is_stacked(tensors: HFTensors) -> bool:
    """Return whether a file holds all experts in one tensor, which is then no linear layer's weight."""
    return isinstance(tensors, str) and not tensors.endswith(_WEIGHT)


def _renamed(tensors: HFTensors, kind: str) -> HFTensors:
    # Without a linear layer's `.weight`, or the name of a stacked parameter.
    return renamed(tensors, lambda name: f"{PEFT_PREFIX}{name.rpartition('.')[0]}.{kind}")


def _hand_out_seed(layer: nn.Module, arguments: tuple[Any, ...]) -> None:
    micro_batch = arguments[1]
    assert isinstance(micro_batch, MicroBatch), "a layer is called with its input and the micro-batch"
    for module in layer.modules():
        if isinstance(module, Adaptable) and module.lora is not None:
            module.seed = micro_batch.dropout_seed
