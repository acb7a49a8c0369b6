"""Bundles: the parameters that travel together, and the place of each in its bundle's flat buffers.

Shared parameters (tied weights) are a bundle of their own, which belongs to every layer that uses it. A bundle's
parameters are placed update rule by update rule, so that an update is one pass over flat memory for each rule.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchround.accelerators import has_triton
from torchround.engine.errors import EngineUsageError
from torchround.layer import FileTensor, LayeredModel, decayed_names
from torchround.optim.formats import StateFormat, StatePart
from torchround.optim.optimizer import Optimizer, ParameterFacts, UpdateRule
from torchround.optim.split_weights import join_parameter, split_parameter
from torchround.optim.update_pass import UpdateBuffers
from torchround.packed_formats import PackedFormat, PackedPlace, unpacking_bytes
from torchround.planning.machine_shares import assign_owners

# 256 elements are 512 bytes in 16 bits: each parameter starts where vector loads, CUDA copies and direct disk
# writes need it. Matrix kernels see the alignment of an ordinary tensor, so they give the same bits.
ALIGNMENT_ELEMENTS = 256

# The kinds of weights in checkpoints, whose tensors have the names `<kind>/<parameter>`.
WEIGHTS = "weights"
RESIDUAL = "residual"
# Checkpoints name versions of the device weights older than the newest `master_<age>_old/..`. The word is from an early
# release: these are not the float32 weights. It stays, so that checkpoints already written load.
OLDER_WEIGHTS = "master_"


@dataclass(frozen=True)
class FlatParameter:
    """One parameter's place in its bundle's flat buffers, in elements; unpacked ones if the bundle is packed.

    `name` is `layer.path`.
    """

    name: str
    start: int
    shape: torch.Size

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.stop].view(self.shape)


@dataclass
class Segment:
    """Elements `[start, stop)` of a bundle, which `rule` updates, and the `parameters` in them.

    `parts` are the flat buffers of the rule's values in `format`, with one element for each `StatePart.block` elements. A
    rule with a direction reads it from `direction`, which devices write. A bundle of another machine has neither.
    """

    start: int
    stop: int
    rule: UpdateRule
    format: StateFormat
    parameters: tuple[FlatParameter, ...]
    parts: dict[str, Tensor] = field(default_factory=dict)
    direction: Tensor | None = None

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def kinds(self) -> list[StatePart]:
        return [part for value in self.rule.values for part in self.format.parts(value)]

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter's share of each part, named as in checkpoints; flat if the part has an element for a block."""
        for part in self.kinds:
            for parameter in self.parameters:
                first, stop = parameter.start - self.start, parameter.stop - self.start
                share = self.parts[part.name][first // part.block : part.numel(stop)]
                share = share.view(parameter.shape) if part.block == 1 else share
                yield f"{part.name}/{parameter.name}", share

    def assign(self, rules: Mapping[str, UpdateRule], value_format: StateFormat) -> None:
        """Take another rule, by parameter, on the same memory.

        Raises `EngineUsageError` if it keeps other values than the segment, or in another format, or if there are several.
        """
        rule, *others = dict.fromkeys(rules[parameter.name] for parameter in self.parameters)
        kept, asked = _values_of(self.rule, self.format), _values_of(rule, value_format)
        if others or asked != kept:
            with_others = " with several rules" if others else ""
            raise EngineUsageError(
                f"the host store is not of this optimizer: {self.parameters[0].name} keeps {kept}; the optimizer asks for "
                f"{asked}{with_others}; make it with optimizer=make_optimizer(table)"
            )
        self.rule = rule


def _values_of(rule: UpdateRule, value_format: StateFormat) -> str:
    return f"{', '.join(value.name for value in rule.values) or 'no state'} ({value_format.name})"


@dataclass
class Bundle:
    """Parameters with common flat buffers. `layers`, whose names `name` has, use it, in model order; several are tied.

    `device_weights` are the copies in the training dtype that devices upload, one for each version that is kept.
    `weight` holds the fp32 weights. If they are split, the newest device weights are their upper halves, `residual`
    is what those lack (`optim/split_weights.py`), and `weight` is None. `segments` cut the elements by update rule and
    hold the optimizer's values. A frozen bundle has device weights only, or what is `mapped`: tensors in files, each with its
    first element in the bundle. If it is `packed`, its `numel` elements are the bytes of that format, of `unpacked_numel`
    numbers that a device unpacks. A gradient that `adds_up` comes in several parts, from rounds, machines or the layers that
    share the bundle; the host sums them in fp32. Its state is its fp32 weights, or `residual`, with the optimizer's values.

    The machine `owner` keeps the fp32 state, updates it and saves it. On other machines the bundle has device weights only.
    """

    index: int
    name: str
    layers: tuple[int, ...]
    trainable: bool
    parameters: tuple[FlatParameter, ...]
    numel: int
    segments: tuple[Segment, ...] = ()
    device_weights: list[Tensor] = field(default_factory=list)
    mapped: tuple[tuple[int, FileTensor], ...] = ()
    packed: PackedFormat | None = None
    unpacked_numel: int = 0
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
    def is_reloaded(self) -> bool:
        """Whether each start reads it from the pretrained files, and so no checkpoint and no message holds it."""
        return bool(self.mapped) or self.packed is not None

    @property
    def fp32_weight(self) -> Tensor:
        assert self.weight is not None, f"{self.parameters[0].name} has no fp32 weights here"
        return self.weight

    @property
    def whole_gradient(self) -> Tensor:
        assert self.gradient is not None, f"bundle {self.index} has no gradient buffer"
        return self.gradient

    def version(self, version: int) -> Tensor:
        """Return the buffer that holds, or will hold, the device weights of `version`, one that is kept or being written."""
        return self.device_weights[version % len(self.device_weights)]

    def newest(self, version: int) -> Tensor:
        """Choose the buffer that decides the weights; `version` is the newest one. Split weights need the residual too."""
        return self.version(version) if self.weight is None else self.weight

    def values(self, parameter: FlatParameter, version: int) -> Tensor:
        """View a parameter's values; `version` is the newest one. Split weights are a copy in fp32, packed ones unpacked."""
        assert not self.is_remote, f"{parameter.name} belongs to machine {self.owner}"
        if self.packed is not None:
            numbers = torch.empty(parameter.shape, dtype=self.device_weights[0].dtype)
            self._place(parameter).read(numbers.view(-1))
            return numbers
        upper = parameter.view(self.newest(version))
        return upper if self.residual is None else join_parameter(upper, parameter.view(self.residual))

    @property
    def early_numel(self) -> int:
        """The numbers that a device unpacks before a layer runs. Products unpack stacks that are packed by matrix."""
        return 0 if self.packed is None or self.packed.by_matrix else self.unpacked_numel

    def unpacking_bytes(self, element_bytes: int, kind: str) -> int:
        """Count what a device needs to unpack the bundle, besides the numbers that it unpacks before a layer runs."""
        if self.early_numel or self.packed is None:
            return unpacking_bytes(self.early_numel, kind)
        # Triton's products unpack by the tile.
        numel = 0 if has_triton(kind) else self.parameters[0].shape[1:].numel()
        return numel * element_bytes + unpacking_bytes(numel, kind)

    def place(self, packed: Tensor) -> PackedPlace:
        """Find the codes and scales in the bundle's packed elements, on the host or on a device."""
        assert self.packed is not None, f"{self.name} is not packed"
        return self.packed.place(packed.view(torch.uint8), self.unpacked_numel)

    def packed_bytes(self, packed: Tensor) -> Tensor:
        """View the bundle's packed elements as the bytes of its format, without padding."""
        assert self.packed is not None, f"{self.name} is not packed"
        return packed.view(torch.uint8)[: self.packed.nbytes(self.unpacked_numel)]

    def _place(self, parameter: FlatParameter) -> PackedPlace:
        return self.place(self.device_weights[0]).part(parameter.start, parameter.shape.numel())

    @contextmanager
    def writing(self, parameter: FlatParameter, version: int) -> Iterator[Tensor | PackedPlace]:
        """Yield a parameter's values, or the place to pack them, to be changed within `HostStore.writing`."""
        if self.packed is not None:
            yield self._place(parameter)
            return
        values = self.values(parameter, version)
        yield values
        if self.residual is not None:
            split_parameter(values, parameter.view(self.version(version)), parameter.view(self.residual))

    def saved_views(self, version: int, lags: bool) -> dict[str, Tensor]:
        """View the bundle's part of a checkpoint, of which `version` is the newest.

        Device weights are among them if nothing else gives them: upper halves, older versions, and those that lag.
        """
        kinds = {WEIGHTS: self.newest(version)}
        if self.residual is not None:
            kinds[RESIDUAL] = self.residual
        values = dict(view for segment in self.segments for view in segment.views())
        return self._named(kinds) | values | self.older_views(version, lags)

    def older_views(self, version: int, lags: bool) -> dict[str, Tensor]:
        ages = range(1, 2 if lags else len(self.device_weights))
        return self._named({f"{OLDER_WEIGHTS}{age}_old": self.version(version - age) for age in ages})

    def _named(self, kinds: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {f"{kind}/{p.name}": p.view(flat) for kind, flat in kinds.items() for p in self.parameters}

    def update_buffers(self, written: Tensor, step: int) -> Iterator[UpdateBuffers]:
        """Yield what an update after `step` steps, which makes `written`, reads and writes, segment by segment."""
        for segment in self.segments:
            elements = slice(segment.start, segment.stop)
            yield UpdateBuffers(
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
        upper = None if self.residual is None else self.version(step)
        directions = [segment.direction for segment in self.segments]
        return [flat for flat in (self.gradient, *directions, upper) if flat is not None]

    def state(self) -> list[Tensor]:
        """Return the buffers that an update changes beside the device weights."""
        found = [flat for flat in (self.weight, self.residual) if flat is not None]
        return found + [flat for segment in self.segments for flat in segment.parts.values()]

    def sources(self, version: int) -> Sequence[tuple[int, Tensor]]:
        """List the host memory that a version is uploaded from, each part with its first element in the bundle."""
        return [(start, in_file.memory) for start, in_file in self.mapped] or [(0, self.version(version))]


@dataclass(frozen=True)
class Ownership:
    """This machine's number among the machines of a run."""

    machine: int
    num_machines: int

    def assign(self, bundles: Sequence[Bundle]) -> None:
        """Give each bundle an owner, alike on all machines, by bytes. A frozen one is only saved, a reloaded one never."""
        for trainable in (True, False):
            group = [bundle for bundle in bundles if bundle.trainable is trainable]
            sizes = [0 if bundle.is_reloaded else bundle.numel for bundle in group]
            for bundle, owner in zip(group, assign_owners(sizes, self.num_machines), strict=True):
                bundle.owner, bundle.is_owned = owner, owner == self.machine


@dataclass(frozen=True)
class ParameterLocation:
    """The place of one parameter of a layer: `path` in the module, `parameter` in bundle `bundle`."""

    path: str
    bundle: int
    parameter: FlatParameter


def collect_bundles(
    model: LayeredModel, mapped: Collection[str], optimizer: Optimizer, element_bytes: int
) -> tuple[list[Bundle], list[list[ParameterLocation]]]:
    """Group the model's parameters into bundles, in order of first use, with the locations of each layer's parameters.

    Parameters share a bundle if the same layers use them, and if they are alike in being trained, in being `mapped` and in
    the format that they are packed in. A stack that is packed by matrix has a bundle of its own. `optimizer` says which rule
    updates each. Buffers are not allocated yet.
    """
    uses, facts = _parameter_uses(model), parameter_facts(model)
    groups: dict[tuple[tuple[int, ...], bool, bool, PackedFormat | None, str], list[ParameterFacts]] = {}
    for name, parameter, layers in uses.values():
        packed = model.packed.get(name)
        alone = name if packed is not None and packed.by_matrix else ""
        group = (tuple(layers), parameter.requires_grad, name in mapped, packed, alone)
        groups.setdefault(group, []).append(facts[name])
    bundles: list[Bundle] = []
    for (users, trainable, _, packed, _), parameters in groups.items():
        segments = _lay_out(parameters, optimizer)
        numbers = numel = segments[-1].stop
        if packed is not None:
            numel = stored_numel(-(-packed.nbytes(numbers) // element_bytes))
        bundles.append(
            Bundle(
                index=len(bundles),
                name=", ".join(model.names[layer] for layer in users),
                layers=users,
                trainable=trainable,
                parameters=tuple(parameter for segment in segments for parameter in segment.parameters),
                numel=numel,
                segments=tuple(segments) if trainable else (),
                packed=packed,
                unpacked_numel=0 if packed is None else numbers,
            )
        )
    places = {p.name: (bundle.index, p) for bundle in bundles for p in bundle.parameters}
    locations = [
        [
            ParameterLocation(path, *places[uses[id(parameter)][0]])
            for path, parameter in layer.named_parameters(remove_duplicate=False)
        ]
        for layer in model.layers
    ]
    return bundles, locations


def parameter_facts(model: LayeredModel) -> dict[str, ParameterFacts]:
    matrices, last = decayed_names(model), len(model.layers) - 1
    facts = {}
    for name, parameter, layers in _parameter_uses(model).values():
        is_matrix = name in matrices and parameter.ndim in (2, 3) and parameter.numel() > 0
        is_block_matrix = is_matrix and len(layers) == 1 and 0 < layers[0] < last
        facts[name] = ParameterFacts(name, parameter.shape, name in matrices, is_block_matrix)
    return facts


def _parameter_uses(model: LayeredModel) -> dict[int, tuple[str, nn.Parameter, list[int]]]:
    """Find, by its identity, each parameter with the name of its first use and all layers that use it."""
    uses: dict[int, tuple[str, nn.Parameter, list[int]]] = {}
    for index, (layer_name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters():
            uses.setdefault(id(parameter), (f"{layer_name}.{path}", parameter, []))[2].append(index)
    return uses


def _lay_out(parameters: Sequence[ParameterFacts], optimizer: Optimizer) -> list[Segment]:
    """Give each parameter an aligned place, by rule. Decayed ones have segments of their own, however large the decay is."""
    by_rule: dict[tuple[bool, UpdateRule], list[ParameterFacts]] = {}
    for facts in sorted(parameters, key=lambda facts: not facts.is_decayed):
        by_rule.setdefault((facts.is_decayed, optimizer.rule_of(facts)), []).append(facts)
    segments: list[Segment] = []
    stop = 0
    for (_, rule), alike in by_rule.items():
        first, placed = stop, []
        for facts in alike:
            placed.append(FlatParameter(facts.name, stop, facts.shape))
            stop += stored_numel(facts.shape.numel())
        segments.append(Segment(first, stop, rule, optimizer.format, tuple(placed)))
    return segments


def stored_numel(numel: int) -> int:
    # One without elements takes a place too, so that it begins inside its own segment.
    return -(-max(numel, 1) // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS


def mapped_ranges(
    bundle: Bundle, mapped: Mapping[str, Sequence[FileTensor]], dtype: torch.dtype
) -> Iterator[tuple[int, FileTensor]]:
    """Yield `Bundle.mapped` of a frozen bundle. Files hold each of its parameters as consecutive flat tensors."""
    assert not bundle.trainable, f"{bundle.parameters[0].name} is trained, so it cannot stay in a file"
    if bundle.packed is not None:  # one tensor for all of them
        [whole] = mapped[bundle.parameters[0].name]
        assert whole.memory.numel() == bundle.numel, f"{bundle.name}: another bundle's packed weights"
        yield 0, whole
        return
    for parameter in bundle.parameters:
        start = parameter.start
        for in_file in mapped[parameter.name]:
            assert in_file.memory.dtype == dtype, f"{parameter.name}: {in_file.memory.dtype}, not {dtype}"
            yield start, in_file
            start += in_file.memory.numel()
        assert start == parameter.stop, f"{parameter.name}: {start - parameter.start} elements are mapped"


def owner_of(layer: nn.Module, path: str) -> tuple[nn.Module, str]:
    prefix, _, name = path.rpartition(".")
    return layer.get_submodule(prefix), name
