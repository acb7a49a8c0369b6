"""Bundles: parameters that travel together, and their places in flat buffers."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchround.layer import LayeredModel
from torchround.optim import decayed_names

# 256 elements are 512 bytes in 16 bits: each parameter starts where vector loads, CUDA copies and disks want it, and
# matrix kernels see the alignment of an ordinary tensor, so they give the same bits.
ALIGNMENT_ELEMENTS = 256


@dataclass(frozen=True)
class FlatParameter:
    """One parameter's place in its bundle's flat buffers, in elements. `name` is `layer.path`."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class MappedRange:
    """Consecutive elements of a bundle, from element `start` on, flat in memory of their own."""

    start: int
    memory: Tensor


@dataclass
class Bundle:
    """Parameters with common flat buffers. `layers` use it, in model order; more than one means tied.

    Elements `[0, decayed)` belong to parameters with weight decay. Frozen bundles have a master only.
    `masters[v % len(masters)]` holds version `v`. A gradient that `adds_up` comes in several parts, from rounds
    or from the layers that share the bundle, and is summed in fp32 on the host. A frozen bundle whose weights stay in
    mapped files has `segments` instead of a master: they are only read.
    """

    index: int
    layers: tuple[int, ...]
    trainable: bool
    parameters: tuple[FlatParameter, ...]
    numel: int
    decayed: int
    masters: list[Tensor] = field(default_factory=list)
    segments: tuple[MappedRange, ...] = ()
    adds_up: bool = False
    gradient: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None

    @property
    def authority(self) -> Tensor:
        """Where the bundle's values are decided: fp32 weights, or the master of a frozen bundle."""
        return self.masters[0] if self.weight is None else self.weight

    def sources(self, version: int, start: int, stop: int) -> Iterator[MappedRange]:
        """Where elements `[start, stop)` of a version are uploaded from; in gaps between segments is nothing."""
        if not self.segments:
            yield MappedRange(start, self.masters[version % len(self.masters)][start:stop])
        for segment in self.segments:
            first, last = max(start, segment.start), min(stop, segment.start + segment.memory.numel())
            if first < last:
                yield MappedRange(first, segment.memory[first - segment.start : last - segment.start])


@dataclass(frozen=True)
class ParameterLocation:
    """Where one parameter of a layer lives: `path` in the module, `parameter` in bundle `bundle`."""

    path: str
    bundle: int
    parameter: FlatParameter


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that holds parameter `path`, and the parameter's name in it."""
    prefix, _, name = path.rpartition(".")
    return layer.get_submodule(prefix), name


def collect_bundles(
    model: LayeredModel, mapped: Mapping[str, object]
) -> tuple[list[Bundle], list[list[ParameterLocation]]]:
    """Group parameters by (who uses them, trainable, mapped), in order of first use."""
    users: dict[int, list[int]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), [])
            if index not in users[id(parameter)]:
                users[id(parameter)].append(index)
            first.setdefault(id(parameter), (f"{name}.{path}", parameter))
    groups: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
    for key, (name, parameter) in first.items():
        groups.setdefault((tuple(users[key]), parameter.requires_grad, name in mapped), []).append(key)
    bundles, place, decayed = [], {}, decayed_names(model)
    for index, ((layers, trainable, _), keys) in enumerate(groups.items()):
        bundle = _lay_out(index, layers, trainable, [first[key] for key in keys], decayed)
        bundles.append(bundle)
        by_name = {parameter.name: parameter for parameter in bundle.parameters}
        place.update({key: (index, by_name[first[key][0]]) for key in keys})
    bindings = [
        [
            ParameterLocation(path, *place[id(parameter)])
            for path, parameter in layer.named_parameters(remove_duplicate=False)
        ]
        for layer in model.layers
    ]
    return bundles, bindings


def _lay_out(
    index: int,
    layers: tuple[int, ...],
    trainable: bool,
    parameters: list[tuple[str, nn.Parameter]],
    with_decay: frozenset[str],
) -> Bundle:
    """Flat places, parameters with weight decay first."""
    placed, start, decayed = [], 0, 0
    for name, parameter in sorted(parameters, key=lambda item: item[0] not in with_decay):
        placed.append(FlatParameter(name, start, parameter.shape))
        start = -(-(start + parameter.numel()) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        decayed = start if name in with_decay else decayed
    return Bundle(index, layers, trainable, tuple(placed), start, decayed)


def mapped_ranges(
    bundle: Bundle, mapped: Mapping[str, Sequence[Tensor]], dtype: torch.dtype
) -> Iterator[MappedRange]:
    assert not bundle.trainable, f"{bundle.parameters[0].name} is trained, so it cannot stay in a file"
    for parameter in bundle.parameters:
        start = parameter.start
        for memory in mapped[parameter.name]:
            assert memory.ndim == 1 and memory.dtype == dtype, (
                f"{parameter.name}: {memory.dtype}, not {dtype}"
            )
            yield MappedRange(start, memory)
            start += memory.numel()
        assert start == parameter.stop, f"{parameter.name}: {start - parameter.start} elements are mapped"


@dataclass(frozen=True)
class UpdatePolicy:
    """`versions` master buffers; step `t` reads `v(t - versions + 1)`, at the start of a run `v(0)`."""

    name: str
    versions: int

    def version_read(self, step: int) -> int:
        return max(step - (self.versions - 1), 0)


SYNC = UpdatePolicy("sync", 1)


ASYNC = UpdatePolicy("async", 2)


POLICIES = {policy.name: policy for policy in (SYNC, ASYNC)}
