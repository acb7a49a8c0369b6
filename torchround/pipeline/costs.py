"""Costs of each layer for one micro-batch: seconds and bytes, measured or counted from shapes.

The planner and the simulator read these numbers and nothing else of a model, so a plan can be made for a
model or a card that is not at hand. `backward_s` is without recomputation: a backward stage pays `forward_s`
once more.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Protocol

from torchround.pipeline.cards import DeviceSpec
from torchround.pipeline.rates import RATES, CardRates, CountedProducts, Rates
from torchround.pipeline.update_costs import JOB_DTYPE, JobWork
from torchround.untrusted.strict_json import parse_json

# Share of the nominal PCIe rate that one hop reaches: a boundary activation goes
# down to the host and up again, and the two directions overlap. RoundPipe's five
# measured hops are `boundary_bytes / (0.66 x 32 GB/s)` within 2 %.
HOP_EFFICIENCY = 0.66

# Host memory traffic of adding up a round's gradients, as a share of an update's, if nothing is known of the optimizer:
# near AdamW's with exact state and 16-bit gradients (10 of 26 bytes per parameter).
ADDING_SHARE = 0.4


class CostsError(ValueError):
    """A cost that is negative, not finite or missing, or a key that is not known."""


@dataclass(frozen=True)
class KeptCost:
    """A part of a layer whose result can be kept on the host: its bytes, and the seconds of recomputation that it saves."""

    name: str
    nbytes: int
    seconds: float

    def __post_init__(self) -> None:
        for name in ("nbytes", "seconds"):
            _check_amount(f"part {self.name}: {name}", getattr(self, name))


@dataclass(frozen=True)
class LayerCost:
    """The costs of one layer for one micro-batch, in seconds and bytes of one device.

    - `weight_bytes`: all parameters as they are uploaded.
    - `gradient_bytes`: gradients of the trained parameters, in the dtype that a device accumulates in.
    - `activation_bytes`: memory kept from this layer's forward to its backward.
    - `boundary_bytes`: the layer's output.
    - `workspace_bytes`: scratch inside one call.
    - `optimizer_s`: one update of the layer on the host, once per step.
    - `job_s`, `job_link_s`: what a device computes for the layer's update, and one copy for it in each direction, once per
      step (`run_jobs` in `simulation/step_time.py`).
    - `job_slot_bytes`, `job_scratch_bytes`: device memory of such a job, for copies and while it computes.
    - `keepable`: parts whose results can be kept from the forward, so that a backward stage does not recompute them.
    - `kept`: names of those that are kept if the layer lies in a backward stage.
    - `keeps_whole`: whether the layer keeps all of them or nothing, as a compiled layer does.
    """

    name: str
    forward_s: float
    backward_s: float
    weight_bytes: int = 0
    gradient_bytes: int = 0
    activation_bytes: int = 0
    boundary_bytes: int = 0
    workspace_bytes: int = 0
    optimizer_s: float = 0.0
    job_s: float = 0.0
    job_link_s: float = 0.0
    job_slot_bytes: int = 0
    job_scratch_bytes: int = 0
    keepable: tuple[KeptCost, ...] = ()
    kept: tuple[str, ...] = ()
    keeps_whole: bool = False

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name not in ("name", "keepable", "kept", "keeps_whole"):
                _check_amount(f"layer {self.name}: {field.name}", getattr(self, field.name))
        names = [part.name for part in self.keepable]
        if len(set(names)) != len(names):
            raise CostsError(f"layer {self.name}: the names of its parts repeat: {names}")
        if unknown := [name for name in self.kept if name not in names]:
            raise CostsError(f"layer {self.name} cannot keep {unknown}; it can keep {names}")
        if self.keeps_whole and self.kept and len(self.kept) < len(names):
            raise CostsError(f"layer {self.name} keeps all of {names} or nothing, given {list(self.kept)}")

    @property
    def compute_bytes(self) -> int:
        """Return the memory of a device that one call of the layer takes."""
        return self.activation_bytes + self.workspace_bytes

    @property
    def kept_bytes(self) -> int:
        """Return the bytes that the layer keeps on the host for one micro-batch."""
        return sum(part.nbytes for part in self.keepable if part.name in self.kept)

    @property
    def saved_s(self) -> float:
        """Return the seconds of recomputation that the kept parts save; never more than the forward."""
        return min(sum(part.seconds for part in self.keepable if part.name in self.kept), self.forward_s)

    @property
    def recompute_s(self) -> float:
        """Return the seconds of one recomputation in a backward stage."""
        return self.forward_s - self.saved_s

    def timed(
        self, forward_s: float, backward_s: float, part_s: Mapping[str, float] = MappingProxyType({})
    ) -> "LayerCost":
        """Return the layer with other seconds. Parts that `part_s` does not name keep their share of the forward."""
        share = forward_s / self.forward_s if self.forward_s else 0.0
        parts = tuple(
            replace(part, seconds=part_s.get(part.name, part.seconds * share)) for part in self.keepable
        )
        return replace(self, forward_s=forward_s, backward_s=backward_s, keepable=parts)


def _check_amount(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise CostsError(f"{what} = {value!r} is not a number")
    if not math.isfinite(value) or value < 0:
        raise CostsError(f"{what} = {value} must be finite and not negative")


@dataclass(frozen=True)
class Costs:
    """The costs of all layers in order.

    - `hop_s`: seconds from a stage's output to the next stage's input, per micro-batch.
    - `shared`: groups of layers that share trained weights, each group in rising order.
    - `adding_share`: time to add up one round's gradients on the host, as a share of an update's.
    - `launch_s`: host time to launch all kernels of a micro-batch. All devices of a process share one interpreter lock, so
      a step takes at least this for each micro-batch. 0 for measured seconds, which contain it.
    """

    layers: tuple[LayerCost, ...]
    hop_s: float = 0.0
    shared: tuple[tuple[int, ...], ...] = ()
    adding_share: float = ADDING_SHARE
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise CostsError("costs need at least one layer")
        if not math.isfinite(self.hop_s) or self.hop_s < 0:
            raise CostsError(f"hop_s = {self.hop_s} must be finite and not negative")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def job_s(self) -> float:
        """Return the seconds of all devices together that updates take of a step."""
        return sum(layer.job_s for layer in self.layers)

    def values(self, name: str) -> list[Any]:
        """List a field or property of all layers. It is looked up once, because a search asks thousands of times."""
        if name not in self._known:
            self._known[name] = [getattr(layer, name) for layer in self.layers]
        return self._known[name]

    def running(self, name: str) -> list[Any]:
        """List running sums of a field over the layers, from 0 on: any stage's sum is the difference of two of them."""
        if (key := f"sum of {name}") not in self._known:
            self._known[key] = [0, *accumulate(self.values(name))]
        return self._known[key]

    @cached_property
    def _known(self) -> dict[str, list[Any]]:
        return {}

    def completed_with(self) -> list[int]:
        """Return, for each layer, the first layer that shares its weights: the last one whose gradient they need."""
        first = list(range(self.num_layers))
        for group in self.shared:
            for layer in group:
                first[layer] = min(first[layer], group[0])
        return first

    @property
    def kept(self) -> tuple[tuple[str, ...], ...]:
        """Return the names of what each layer keeps; an empty tuple if none keeps anything."""
        return tuple(layer.kept for layer in self.layers) if any(layer.kept for layer in self.layers) else ()

    def keeping(self, kept: Sequence[Sequence[str]]) -> "Costs":
        """Return the costs of a run in which each layer keeps the parts of these names; empty keeps nothing.

        Raises `CostsError` for a name that a layer lacks, or another number of layers.
        """
        if not kept:
            kept = [()] * self.num_layers
        if len(kept) != self.num_layers:
            raise CostsError(f"kept names are given for {len(kept)} layers, there are {self.num_layers}")
        pairs = zip(self.layers, kept, strict=True)
        layers = tuple(
            layer if layer.kept == tuple(names) else replace(layer, kept=tuple(names))
            for layer, names in pairs
        )
        return replace(self, layers=layers)

    def to_json(self) -> str:
        """Write the costs as JSON; docs/schedules.md describes the keys."""
        return json.dumps({"hop_s": self.hop_s, "layers": [asdict(layer) for layer in self.layers]}, indent=2)

    @staticmethod
    def from_json(text: str) -> "Costs":
        """Read what `to_json` wrote; bytes that are not given are 0. Raises `CostsError` for anything else."""
        try:
            data = parse_json(text)
        except ValueError as error:
            raise CostsError(f"costs are not valid JSON: {error}") from error
        if not isinstance(data, dict) or not isinstance(data.get("layers"), list):
            raise CostsError('costs need an object with a list "layers"')
        hop_s = data.get("hop_s", 0.0)
        if isinstance(hop_s, bool) or not isinstance(hop_s, (int, float)):
            raise CostsError(f"hop_s = {hop_s!r} is not a number")
        return Costs(
            tuple(_layer_from(index, item) for index, item in enumerate(data["layers"])), float(hop_s)
        )


def _layer_from(index: int, item: Any) -> LayerCost:
    known = {field.name for field in fields(LayerCost)}
    if not isinstance(item, dict):
        raise CostsError(f"layer {index} is {item!r}, not an object")
    if unknown := sorted(set(item) - known):
        raise CostsError(f"layer {index} has unknown keys {unknown}; known: {sorted(known)}")
    if missing := [key for key in ("forward_s", "backward_s") if key not in item]:
        raise CostsError(f"layer {index} lacks {missing}")
    parts = item.get("keepable", ())
    named = {field.name for field in fields(KeptCost)}
    if not isinstance(parts, (list, tuple)) or any(
        not isinstance(part, dict) or set(part) != named for part in parts
    ):
        raise CostsError(f"layer {index}: keepable needs a list of objects with {sorted(named)}")
    kept = item.get("kept", ())
    if not isinstance(kept, (list, tuple)) or any(not isinstance(name, str) for name in kept):
        raise CostsError(f"layer {index}: kept = {kept!r} must be a list of names")
    if not isinstance(item.get("keeps_whole", False), bool):
        raise CostsError(f"layer {index}: keeps_whole = {item['keeps_whole']!r} must be true or false")
    given = {**item, "keepable": tuple(KeptCost(**part) for part in parts), "kept": tuple(kept)}
    return LayerCost(**{"name": f"layer.{index}", **given})


class CountedPart(Protocol):
    """The attributes of `torchround.layer.KeptWork` that `costs_from_work` reads."""

    @property
    def name(self) -> str: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def flops(self) -> float: ...
    @property
    def kind(self) -> str: ...


class CountedWork(Protocol):
    """The attributes of `torchround.layer.LayerWork` that `costs_from_work` reads.

    A protocol, because this room must not import the layers' room: that needs torch, and the planner does
    not.
    """

    @property
    def products(self) -> Sequence[CountedProducts]: ...
    @property
    def activation_bytes(self) -> int: ...
    @property
    def boundary_bytes(self) -> int: ...
    @property
    def workspace_bytes(self) -> int: ...
    @property
    def keepable(self) -> Sequence[CountedPart]: ...
    @property
    def unkept_bytes(self) -> int: ...


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a layer, or of a model; a model's tied parameters count once.

    - `trained`: parameters with a gradient (few with LoRA).
    - `frozen`: parameters without one that are in host memory.
    - `mapped`: frozen parameters that stay in files; they are not in `frozen`.
    - `bundles`: for each group of trained parameters that travel together their number and how many layers use
      them. Without it, all of them are one group of a single layer.
    - `bundle_layers`: for each of these groups the layers that use it, in rising order.
    - `bundle_rules`: for each of these groups its parameters by update rule, in the order of `UpdateCosts.rules`.
      Without it, all of them have the first rule.
    """

    trained: int
    frozen: int = 0
    mapped: int = 0
    bundles: tuple[tuple[int, int], ...] = ()
    bundle_layers: tuple[tuple[int, ...], ...] = ()
    bundle_rules: tuple[tuple[int, ...], ...] = ()

    @property
    def by_rule(self) -> tuple[int, ...]:
        """Return the trained parameters by update rule."""
        return tuple(map(sum, zip(*self.bundle_rules, strict=True))) if self.bundle_rules else (self.trained,)

    @property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """Return `bundles`, or all trained parameters as one of them."""
        return self.bundles or ((self.trained, 1),)

    def rules_of_bundles(self) -> tuple[tuple[int, ...], ...]:
        """Return the parameters of each group by update rule."""
        return self.bundle_rules or tuple((numel,) for numel, _ in self.groups)


def costs_from_work(
    names: Sequence[str],
    works: Sequence[CountedWork],
    parameters: Sequence[ParameterCounts],
    device: DeviceSpec,
    dtype: str = "bfloat16",
    element_bytes: int = 2,
    accumulate_bytes: int = 4,
    fp16_accumulation: bool = False,
    keeps_whole: Sequence[bool] = (),
    update_bytes: Sequence[float] = (),
    adding_share: float = ADDING_SHARE,
    jobs: Sequence[JobWork] = (),
    rates: Rates = RATES,
) -> Costs:
    """Estimate costs before any step has run, at the rates of each kind of work.

    The backward leaves out recomputation and, in a LoRA run, gradients of frozen weights. `update_bytes` is
    each layer's host memory traffic of an update (`UpdateCosts.traffic_bytes`); without it an update
    takes no time. `adding_share` as in `Costs`; `jobs` is each layer's work of devices for an update. `keeps_whole` says for each layer whether it keeps all its parts or nothing.
    """
    card = CardRates.of(device, dtype, fp16_accumulation, rates)
    layers = []
    whole = keeps_whole or [False] * len(names)
    updates_s = [nbytes / rates.update_bytes_per_s for nbytes in update_bytes] or [0.0] * len(names)
    parts = zip(names, works, parameters, whole, updates_s, strict=True)
    for name, work, parameter, keeps_all, update_s in parts:
        gradient_bytes = parameter.trained * accumulate_bytes
        moved_bytes = work.activation_bytes + work.unkept_bytes
        layers.append(
            LayerCost(
                name=name,
                forward_s=card.forward_s(work.products, moved_bytes),
                backward_s=card.backward_s(work.products, moved_bytes, gradient_bytes),
                weight_bytes=(parameter.trained + parameter.frozen) * element_bytes,
                gradient_bytes=gradient_bytes,
                activation_bytes=work.activation_bytes,
                boundary_bytes=work.boundary_bytes,
                workspace_bytes=work.workspace_bytes,
                optimizer_s=update_s,
                keepable=tuple(
                    KeptCost(part.name, part.nbytes, card.product_s(part.flops, part.kind))
                    for part in work.keepable
                ),
                keeps_whole=keeps_all,
            )
        )
    if jobs:
        layers = [with_job(layer, job, device, dtype) for layer, job in zip(layers, jobs, strict=True)]
    hop_s = hop_seconds(max(layer.boundary_bytes for layer in layers), device)
    return Costs(tuple(layers), hop_s, adding_share=adding_share)


def with_job(layer: LayerCost, job: JobWork, device: DeviceSpec, dtype: str) -> LayerCost:
    """Return a layer with the cost of its job, at the device's rate in bfloat16, or in `dtype` if it has none there."""
    if not job.flops:
        return layer
    card = CardRates.of(device, JOB_DTYPE if JOB_DTYPE in device.peak_flops else dtype)
    return replace(
        layer,
        job_s=card.product_s(job.flops),
        job_link_s=hop_seconds(job.copied_bytes, device),
        job_slot_bytes=job.slot_bytes,
        job_scratch_bytes=job.scratch_bytes,
    )


def hop_seconds(boundary_bytes: int, device: DeviceSpec) -> float:
    """Estimate the seconds in which a boundary activation of one device reaches the next one through host memory."""
    return boundary_bytes / (device.pcie_gb_per_s * 1e9 * HOP_EFFICIENCY)
