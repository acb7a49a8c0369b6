"""Bundles: the parameters that travel together, and where each one lies in its bundle's flat buffers.

Shared parameters (tied weights) are a bundle of their own, which belongs to every layer that uses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchround.layer import FileTensor, LayeredModel, decayed_names

# 256 elements are 512 bytes in 16 bits: each parameter starts where vector loads, CUDA copies and direct disk
# writes need it. Matrix kernels see the alignment of an ordinary tensor, so they give the same bits.
ALIGNMENT_ELEMENTS = 256


@dataclass(frozen=True)
class UpdatePolicy:
    """The number of weight versions that are kept. Step `t` reads `v(t - versions + 1)`; the first steps read `v(0)`.

    Under each policy step `t`'s gradient is applied to `v(t)` and gives `v(t + 1)`; they differ in the version that
    the gradient is computed with. The step's number alone decides that version, never timing.

    If it `predicts`, a version's device weights are taken one update ahead of its fp32 weights, towards the version
    that the gradient will be applied to (`store/prediction.py`).
    """

    name: str
    versions: int
    predicts: bool = False

    def version_read(self, step: int) -> int:
        """Return the version that step `step` computes with."""
        return max(step - (self.versions - 1), 0)


SYNC = UpdatePolicy("sync", 1)
ASYNC = UpdatePolicy("async", 2)
# `async` with `engine.delay_correction = "predict"`, its default.
ASYNC_PREDICT = UpdatePolicy("async", 2, predicts=True)
# One version of each weight, updated as soon as its gradient is complete (PACI). The forward of step `t` reads
# `v(t - 1)` in the first `HostStore.stale_layers` layers, everything else reads `v(t)`.
BOUNDED = UpdatePolicy("bounded", 1)
POLICIES = {policy.name: policy for policy in (SYNC, ASYNC, BOUNDED)}


@dataclass(frozen=True)
class FlatParameter:
    """One parameter's place in its bundle's flat buffers, in elements. `name` is `layer.path`."""

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        """The element after its last one."""
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        """Return the parameter as a view of one of its bundle's flat buffers."""
        return flat[self.start : self.stop].view(self.shape)


@dataclass(frozen=True)
class MappedRange:
    """Consecutive elements of a bundle, from element `start` on, in one flat tensor.

    If they are in a `file`, they begin at its byte `begin`, and `memory` maps them.
    """

    start: int
    memory: Tensor
    file: FileTensor | None = None
    begin: int = 0

    def part(self, start: int, stop: int) -> "MappedRange":
        """Return elements `[start, stop)` of the range."""
        begin = self.begin + start * self.memory.itemsize
        return MappedRange(self.start + start, self.memory[start:stop], self.file, begin)


@dataclass
class Bundle:
    """Parameters with common flat buffers. `layers` use it, in model order; several layers mean tied parameters.

    `weight` (fp32), `exp_avg` and `exp_avg_sq` are the optimizer's, `device_weights` the copies in the
    training dtype that devices upload, one for each version that is kept. Elements `[0, decayed)` belong to
    parameters with weight decay. A frozen bundle has device weights only, or `mapped` memory in their place:
    files that are only read.

    A gradient that `adds_up` comes in several parts, from rounds, machines or the layers that share the bundle;
    the host sums them in fp32.

    `owner` is the machine that keeps the bundle's fp32 state, updates it and saves it. A trained bundle of another
    machine has device weights only, and receives them from its owner.
    """

    index: int
    layers: tuple[int, ...]
    trainable: bool
    parameters: tuple[FlatParameter, ...]
    numel: int
    decayed: int
    device_weights: list[Tensor] = field(default_factory=list)
    mapped: tuple[MappedRange, ...] = ()
    owner: int = 0
    is_owned: bool = True
    adds_up: bool = False
    gradient: Tensor | None = None
    weight: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None

    @property
    def is_remote(self) -> bool:
        """Whether another machine trains it: this one has device weights and neither fp32 state nor a gradient sum."""
        return self.trainable and not self.is_owned

    @property
    def authority(self) -> Tensor:
        """The buffer that decides the bundle's values: fp32 weights, or the device weights of a frozen bundle.

        A trained bundle of another machine has none here.
        """
        assert not self.is_remote, f"{self.parameters[0].name} belongs to machine {self.owner}"
        return self.device_weights[0] if self.weight is None else self.weight

    def version(self, version: int) -> Tensor:
        """Return the buffer that holds, or will hold, the device weights of `version`.

        Ask only for versions that are kept or being written: an older number gives the buffer of a newer
        version.
        """
        return self.device_weights[version % len(self.device_weights)]

    def sources(self, version: int, start: int, stop: int) -> Iterator[MappedRange]:
        """Yield the host memory that elements `[start, stop)` of a version are uploaded from.

        Gaps between parameters in mapped files have no memory and are left out.
        """
        if not self.mapped:
            yield MappedRange(start, self.version(version)[start:stop])
        for mapped in self.mapped:
            first, last = max(start, mapped.start), min(stop, mapped.start + mapped.memory.numel())
            if first < last:
                yield mapped.part(first - mapped.start, last - mapped.start)


@dataclass(frozen=True)
class ParameterLocation:
    """The place of one parameter of a layer: `path` in the module, `parameter` in bundle `bundle`."""

    path: str
    bundle: int
    parameter: FlatParameter


def collect_bundles(
    model: LayeredModel, mapped: Mapping[str, object]
) -> tuple[list[Bundle], list[list[ParameterLocation]]]:
    """Group the model's parameters into bundles, in order of first use. Buffers are not allocated yet.

    Returns the bundles and, for each layer, the locations of its parameters. Parameters share a bundle if the
    same layers use them, and if they are alike in being trained and in being `mapped`.
    """
    # By the parameter's identity: all layers that use it, and the name and parameter of its first use.
    users: dict[int, list[int]] = {}
    first: dict[int, tuple[str, nn.Parameter]] = {}
    for index, (name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters(remove_duplicate=False):
            users.setdefault(id(parameter), [])
            if index not in users[id(parameter)]:
                users[id(parameter)].append(index)
            first.setdefault(id(parameter), (f"{name}.{path}", parameter))
    # By users, trained or frozen, mapped or not. Dictionaries keep the order of first use.
    groups: dict[tuple[tuple[int, ...], bool, bool], list[int]] = {}
    for key, (name, parameter) in first.items():
        groups.setdefault((tuple(users[key]), parameter.requires_grad, name in mapped), []).append(key)
    bundles, place, decayed = [], {}, decayed_names(model)
    for index, ((layers, trainable, _), keys) in enumerate(groups.items()):
        bundle = _lay_out(index, layers, trainable, [first[key] for key in keys], decayed)
        bundles.append(bundle)
        by_name = {parameter.name: parameter for parameter in bundle.parameters}
        place.update({key: (index, by_name[first[key][0]]) for key in keys})
    locations = [
        [
            ParameterLocation(path, *place[id(parameter)])
            for path, parameter in layer.named_parameters(remove_duplicate=False)
        ]
        for layer in model.layers
    ]
    return bundles, locations


def mapped_ranges(
    bundle: Bundle, mapped: Mapping[str, Sequence[FileTensor]], dtype: torch.dtype
) -> Iterator[MappedRange]:
    """Yield the ranges of a frozen bundle's mapped parameters, which files hold as consecutive flat tensors."""
    assert not bundle.trainable, f"{bundle.parameters[0].name} is trained, so it cannot stay in a file"
    for parameter in bundle.parameters:
        start = parameter.start
        for in_file in mapped[parameter.name]:
            memory = in_file.memory
            assert memory.ndim == 1 and memory.dtype == dtype, (
                f"{parameter.name}: {memory.dtype}, not {dtype}"
            )
            yield MappedRange(start, memory, in_file, in_file.begin)
            start += memory.numel()
        assert start == parameter.stop, f"{parameter.name}: {start - parameter.start} elements are mapped"


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds parameter `path`, and the parameter's name in it."""
    prefix, _, name = path.rpartition(".")
    return layer.get_submodule(prefix), name


def _lay_out(
    index: int,
    layers: tuple[int, ...],
    trainable: bool,
    parameters: list[tuple[str, nn.Parameter]],
    with_decay: frozenset[str],
) -> Bundle:
    """Give each parameter an aligned place. Those with weight decay come first, so the update has two ranges."""
    placed, start, decayed = [], 0, 0
    for name, parameter in sorted(parameters, key=lambda item: item[0] not in with_decay):
        placed.append(FlatParameter(name, start, parameter.shape))
        start = -(-(start + parameter.numel()) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        decayed = start if name in with_decay else decayed  # up to the next parameter, padding included
    return Bundle(index, layers, trainable, tuple(placed), start, decayed)
