"""Bundles: the parameters that travel together, and the place of each in its bundle's flat buffers.

Shared parameters (tied weights) are a bundle of their own, which belongs to every layer that uses it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchround.engine.store.segments import FlatParameter, Segment, parameter_facts
from torchround.layer import FileTensor, LayeredModel
from torchround.optim.optimizer import Optimizer, ParameterFacts, UpdateRule
from torchround.optim.split_weights import join, split
from torchround.optim.update_pass import UpdateBuffers

# 256 elements are 512 bytes in 16 bits: each parameter starts where vector loads, CUDA copies and direct disk
# writes need it. Matrix kernels see the alignment of an ordinary tensor, so they give the same bits.
ALIGNMENT_ELEMENTS = 256

# Elements of which fp32 weights are joined or split at once, so that the temporaries stay small.
SPLIT_ELEMENTS = 2**20


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

    @property
    def splits_weights(self) -> bool:
        """Whether its device weights are the upper halves of the fp32 weights: neither predicted nor one update behind."""
        return not self.predicts and self.name != "bounded"

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

    `device_weights` are the copies in the training dtype that devices upload, one for each version that is kept.
    `weight` holds the fp32 weights. If they are split, the newest device weights are their upper halves, `residual`
    is what those lack (`optim/split_weights.py`), and `weight` is None. `segments` cut the elements by update rule and
    hold the optimizer's state. A frozen bundle has device weights only, or `mapped` memory in their place: files that
    are only read.

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
    segments: tuple[Segment, ...] = ()
    device_weights: list[Tensor] = field(default_factory=list)
    mapped: tuple[MappedRange, ...] = ()
    owner: int = 0
    is_owned: bool = True
    adds_up: bool = False
    gradient: Tensor | None = None
    weight: Tensor | None = None
    residual: Tensor | None = None

    @property
    def is_remote(self) -> bool:
        """Whether another machine trains it: this one has device weights and neither fp32 state nor a gradient sum."""
        return self.trainable and not self.is_owned

    @property
    def fp32_weight(self) -> Tensor:
        """The fp32 weights of a bundle that keeps them as they are."""
        assert self.weight is not None, f"{self.parameters[0].name} has no fp32 weights here"
        return self.weight

    def copy_weights(self, version: int, start: int = 0, stop: int | None = None) -> Tensor:
        """Return elements `[start, stop)` of the weights as `[stop - start]` values, for reading.

        They are a fresh fp32 copy if the weights are split, otherwise the buffer itself: fp32, or a frozen bundle's
        device weights. `version` is the newest one.
        """
        assert not self.is_remote, f"{self.parameters[0].name} belongs to machine {self.owner}"
        stop = self.numel if stop is None else stop
        if self.residual is None:
            return (self.device_weights[0] if self.weight is None else self.weight)[start:stop]
        values = torch.empty(stop - start)
        for first in range(start, stop, SPLIT_ELEMENTS):
            chunk = slice(first, min(first + SPLIT_ELEMENTS, stop))
            joined = join(self.version(version)[chunk], self.residual[chunk])
            values[chunk.start - start : chunk.stop - start] = joined
        return values

    def set_weights(self, values: Tensor, version: int, start: int = 0) -> None:
        """Write flat values from element `start` on. Split weights write the newest device weights with them.

        The other device weights are for `HostStore.refresh_device_weights`.
        """
        assert not self.is_remote, f"{self.parameters[0].name} belongs to machine {self.owner}"
        if self.residual is None:
            self.copy_weights(version, start, start + values.numel()).copy_(values)
            return
        for first in range(0, values.numel(), SPLIT_ELEMENTS):
            upper, residual = split(values[first : first + SPLIT_ELEMENTS].float())
            chunk = slice(start + first, start + first + upper.numel())
            self.version(version)[chunk].copy_(upper)
            self.residual[chunk].copy_(residual)

    def update_buffers(self, segment: Segment, written: Tensor, step: int) -> UpdateBuffers:
        """Return what an update of a segment reads and writes, after `step` steps.

        `written` are the bundle's device weights that the update makes, or the fp32 weights in place of device weights
        that lag.
        """
        elements = slice(segment.start, segment.stop)
        return UpdateBuffers(
            rule=segment.rule,
            format=segment.format,
            weight=None if self.weight is None else self.weight[elements],
            residual=None if self.residual is None else self.residual[elements],
            current=self.version(step)[elements],
            written=written[elements],
            parts=segment.parts,
            gradient=None if self.gradient is None else self.gradient[elements],
            direction=segment.direction,
        )

    def inputs(self, step: int) -> list[Tensor]:
        """Return the buffers that an update after `step` steps reads and leaves as they are."""
        split = self.version(step) if self.residual is not None else None
        directions = [segment.direction for segment in self.segments]
        return [flat for flat in (self.gradient, *directions, split) if flat is not None]

    def state(self) -> list[Tensor]:
        """Return the buffers that an update changes beside the device weights."""
        found = [flat for flat in (self.weight, self.residual) if flat is not None]
        return found + [flat for segment in self.segments for flat in segment.parts.values()]

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
    model: LayeredModel, mapped: Collection[str], optimizer: Optimizer
) -> tuple[list[Bundle], list[list[ParameterLocation]]]:
    """Group the model's parameters into bundles, in order of first use. Buffers are not allocated yet.

    Returns the bundles and, for each layer, the locations of its parameters. Parameters share a bundle if the
    same layers use them, and if they are alike in being trained and in being `mapped`. `optimizer` says which rule
    updates each.
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
    bundles, place = [], {}
    facts = parameter_facts(model)
    for index, ((layers, trainable, _), keys) in enumerate(groups.items()):
        bundle = _lay_out(index, layers, trainable, [facts[first[key][0]] for key in keys], optimizer)
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


def stored_numel(numel: int) -> int:
    """Return the elements that a parameter of `numel` takes in a bundle, padding included."""
    # One without elements takes a place too, so that it begins inside its own segment.
    return -(-max(numel, 1) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    """Return the submodule that holds parameter `path`, and the parameter's name in it."""
    prefix, _, name = path.rpartition(".")
    return layer.get_submodule(prefix), name


def _lay_out(
    index: int,
    layers: tuple[int, ...],
    trainable: bool,
    parameters: Sequence[ParameterFacts],
    optimizer: Optimizer,
) -> Bundle:
    """Give each parameter an aligned place, rule by rule, so that an update has one range for each rule.

    Those with weight decay come first: the places then do not depend on how large the decay is.
    """
    by_rule: dict[UpdateRule, list[ParameterFacts]] = {}
    for facts in sorted(parameters, key=lambda facts: not facts.is_decayed):
        by_rule.setdefault(optimizer.rule_of(facts), []).append(facts)
    placed: list[FlatParameter] = []
    segments: list[Segment] = []
    start = 0
    for rule, alike in by_rule.items():
        first = start
        for facts in alike:
            placed.append(FlatParameter(facts.name, start, facts.shape))
            start += stored_numel(facts.shape.numel())
        segments.append(Segment(first, start, rule, optimizer.format))
    return Bundle(index, layers, trainable, tuple(placed), start, tuple(segments) if trainable else ())
