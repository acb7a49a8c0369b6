"""Costs of each layer for one micro-batch: seconds and bytes, measured or counted from shapes.

The planner and the simulator read these numbers and nothing else of a model, so a plan can be made for a
model or a card that is not at hand. `backward_s` is without recomputation: a backward stage pays `forward_s`
once more.
"""

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import accumulate
from statistics import median
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from torchround.untrusted.strict_json import parse_json

# How files are read: each number in its own type, and no key that is not a field.
READ = ConfigDict(strict=True, extra="forbid")
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Bytes = Annotated[int, Field(ge=0)]
# Host memory traffic of adding up a round's gradients, as a share of an update's, if nothing is known of the optimizer:
# near AdamW's with exact state and 16-bit gradients (10 of 26 bytes per parameter).
ADDING_SHARE = 0.4


class CostsError(ValueError):
    """A cost that is negative, not finite or missing, or a key that is not known."""


@dataclass(frozen=True)
class KeptCost:
    """A part of a layer whose result can be kept on the host: its bytes, and the seconds of recomputation that it saves."""

    __pydantic_config__: ClassVar[ConfigDict] = READ
    name: str
    nbytes: Bytes
    seconds: Seconds


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
      step (`run_jobs` in `step_time.py`).
    - `job_slot_bytes`, `job_scratch_bytes`: device memory of such a job, for copies and while it computes.
    - `keepable`: parts whose results can be kept from the forward, so that a backward stage does not recompute them.
    - `kept`: names of those that are kept if the layer is in a backward stage.
    - `keeps_whole`: whether the layer keeps all of them or nothing, as a compiled layer does.
    - `unpacked_bytes`: the numbers of its packed weights, which a device holds while the layer runs.
    """

    __pydantic_config__: ClassVar[ConfigDict] = READ
    name: str
    forward_s: Seconds
    backward_s: Seconds
    weight_bytes: Bytes = 0
    gradient_bytes: Bytes = 0
    activation_bytes: Bytes = 0
    boundary_bytes: Bytes = 0
    workspace_bytes: Bytes = 0
    optimizer_s: Seconds = 0.0
    job_s: Seconds = 0.0
    job_link_s: Seconds = 0.0
    job_slot_bytes: Bytes = 0
    job_scratch_bytes: Bytes = 0
    keepable: tuple[KeptCost, ...] = ()
    kept: tuple[str, ...] = ()
    keeps_whole: bool = False
    unpacked_bytes: Bytes = 0

    def __post_init__(self) -> None:
        names = [part.name for part in self.keepable]
        if len(set(names)) != len(names):
            raise CostsError(f"layer {self.name}: the names of its parts repeat: {names}")
        if unknown := [name for name in self.kept if name not in names]:
            raise CostsError(f"layer {self.name} cannot keep {unknown}; it can keep {names}")
        if self.keeps_whole and self.kept and len(self.kept) < len(names):
            raise CostsError(f"layer {self.name} keeps all of {names} or nothing, given {list(self.kept)}")

    @property
    def compute_bytes(self) -> int:
        return self.activation_bytes + self.workspace_bytes

    @property
    def kept_bytes(self) -> int:
        return sum(part.nbytes for part in self.keepable if part.name in self.kept)

    @property
    def saved_s(self) -> float:
        """Return the seconds of recomputation that the kept parts save; never more than the forward."""
        return min(sum(part.seconds for part in self.keepable if part.name in self.kept), self.forward_s)

    @property
    def recompute_s(self) -> float:
        return self.forward_s - self.saved_s

    def timed(self, forward_s: float, backward_s: float) -> "LayerCost":
        """Return the layer with other seconds. Parts keep their share of the forward."""
        share = forward_s / self.forward_s if self.forward_s else 0.0
        parts = tuple(replace(part, seconds=part.seconds * share) for part in self.keepable)
        return replace(self, forward_s=forward_s, backward_s=backward_s, keepable=parts)


@dataclass(frozen=True)
class Costs:
    """The costs of all layers in order.

    - `hop_s`: seconds from a stage's output to the next stage's input, per micro-batch.
    - `shared`: groups of layers that share trained weights, each group in rising order.
    - `adding_share`: time to add up one round's gradients on the host, as a share of an update's.
    - `launch_s`: host time to launch all kernels of a micro-batch. All devices of a process share one interpreter lock, so
      a step takes at least this for each micro-batch. 0 for measured seconds, which contain it.
    """

    __pydantic_config__: ClassVar[ConfigDict] = READ
    layers: tuple[LayerCost, ...]
    hop_s: Seconds = 0.0
    shared: tuple[tuple[int, ...], ...] = ()
    adding_share: Seconds = ADDING_SHARE
    launch_s: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.layers:
            raise CostsError("costs need at least one layer")
        if wrong := [layer for group in self.shared for layer in group if not 0 <= layer < self.num_layers]:
            raise CostsError(f"shared names layer {wrong[0]}, there are {self.num_layers}")

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
        kept = tuple(layer.kept for layer in self.layers)
        return kept if any(kept) else ()

    def keeping(self, kept: Sequence[Sequence[str]]) -> "Costs":
        """Return the costs of a run in which each layer keeps the parts of these names; empty keeps nothing.

        Raises `CostsError` for a name that a layer lacks, or another number of layers.
        """
        kept = kept or [()] * self.num_layers
        if len(kept) != self.num_layers:
            raise CostsError(f"kept names are given for {len(kept)} layers, there are {self.num_layers}")
        pairs = zip(self.layers, map(tuple, kept), strict=True)
        layers = (layer if layer.kept == names else replace(layer, kept=names) for layer, names in pairs)
        return replace(self, layers=tuple(layers))

    def to_json(self) -> str:
        """Write the costs as JSON; docs/schedules.md describes the keys."""
        return json.dumps({"hop_s": self.hop_s, "layers": [asdict(layer) for layer in self.layers]}, indent=2)

    @staticmethod
    def from_json(text: str) -> "Costs":
        """Read what `to_json` wrote; names and bytes may be left out. Raises `CostsError` for anything else."""
        try:
            data = parse_json(text)
            if isinstance(data, dict) and isinstance(data.get("layers"), list):
                for index, layer in enumerate(data["layers"]):
                    if isinstance(layer, dict):
                        layer.setdefault("name", f"layer.{index}")
            return TypeAdapter(Costs).validate_json(json.dumps(data))
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            given = "" if first["type"] == "value_error" else f", given {first['input']!r:.100}"
            text = first["msg"].removeprefix("Value error, ")
            raise CostsError(f"costs: {place}: {text}{given}") from None
        except ValueError as error:
            raise CostsError(f"costs are not valid JSON: {error}") from error


def measured_costs(
    counted: Costs,
    times: Mapping[tuple[str, int], Sequence[float]],
    updates: Iterable[Sequence[tuple[int, float]]] = (),
    run_again: Collection[int] = (),
) -> Costs:
    """Return `counted` with measured seconds in place of counted ones.

    - `times`: seconds by kind and layer: `forward`, `recompute` and `backward`, and the last layer's `fused`.
    - `updates`: for each step the layers and seconds of its updates; empty for a skipped update.
    - `run_again`: layers that run again inside of their backward.

    `counted` also says what the layers kept: their recomputations were shorter than their forwards.
    """
    # Medians, because the first step (caches, compilation) and other processes make single samples far too long.
    layers = []
    for index, layer in enumerate(counted.layers[:-1]):
        # A recomputation of all is the same work as a forward.
        repeated = [] if layer.kept else times.get(("recompute", index), [])
        forward_s = median([*times["forward", index], *repeated])
        backward_s = median(times["backward", index])
        if index in run_again:
            again = layer.recompute_s / layer.forward_s if layer.kept else 1.0
            backward_s = max(backward_s - forward_s * again, 0.0)
        layers.append(layer.timed(forward_s, backward_s))
    # The head's slot runs forward and backward in one go: split it in the counted proportion.
    head = counted.layers[-1]
    whole_s = median(times["fused", counted.num_layers - 1])
    share = head.forward_s / (head.forward_s + head.backward_s)
    layers.append(head.timed(whole_s * share, whole_s * (1 - share)))
    if by_step := [step for step in updates if step]:  # otherwise the optimizer's counted seconds stay
        # A shared bundle counts with its first layer, whose upload waits for it.
        of_layers = [[0.0] * len(by_step) for _ in layers]
        for number, bundles in enumerate(by_step):
            for index, update_s in bundles:
                of_layers[index][number] += update_s
        layers = [replace(c, optimizer_s=median(s)) for c, s in zip(layers, of_layers, strict=True)]
    return replace(counted, layers=tuple(layers), launch_s=0.0)


@dataclass(frozen=True)
class BundleCount:
    """Trained parameters that the same layers use, which travel together.

    - `by_rule`: their number by update rule, in the order of `UpdateCosts.rules`, padding included.
    - `layers`: the layers that use them, in rising order.
    """

    by_rule: tuple[int, ...]
    layers: tuple[int, ...] = (0,)

    @property
    def numel(self) -> int:
        return sum(self.by_rule)


@dataclass(frozen=True)
class ParameterCounts:
    """Numbers of parameters of a model; tied ones count once.

    - `bundles`: the parameters with a gradient (few with LoRA).
    - `frozen`: parameters without one that are in host memory.
    - `mapped`: frozen parameters that stay in files; they are not in `frozen`.
    - `packed`: elements of packed parameters in host memory, which no checkpoint holds; they are not in `frozen`.
    """

    bundles: tuple[BundleCount, ...]
    frozen: int = 0
    mapped: int = 0
    packed: int = 0

    @property
    def trained(self) -> int:
        return sum(bundle.numel for bundle in self.bundles)

    @property
    def by_rule(self) -> tuple[int, ...]:
        return tuple(map(sum, zip(*(bundle.by_rule for bundle in self.bundles), strict=True)))

    @property
    def shared_layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(sorted(bundle.layers for bundle in self.bundles if len(bundle.layers) > 1))
