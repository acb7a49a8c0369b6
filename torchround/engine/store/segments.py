"""Segments: consecutive elements of a bundle that one update rule is for, and the state that the rule keeps.

A bundle's parameters are placed rule by rule, so that an update is one pass over flat memory for each rule. Every segment
begins at an aligned place, so no block of values that share a scale belongs to two of them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchround.layer import LayeredModel, decayed_names, matrix_names
from torchround.optim.formats import StateFormat, StatePart, StateValue
from torchround.optim.optimizer import ParameterFacts, UpdateRule


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


@dataclass
class Segment:
    """Elements `[start, stop)` of a bundle, which `rule` updates.

    `parts` are the flat buffers of the rule's values in `format`, by the part's name. They hold one element for each
    `StatePart.block` elements of the segment. A rule with a direction reads it from `direction`, which devices write.
    A bundle of another machine has neither.
    """

    start: int
    stop: int
    rule: UpdateRule
    format: StateFormat
    parts: dict[str, Tensor] = field(default_factory=dict)
    direction: Tensor | None = None

    @property
    def numel(self) -> int:
        """The number of its elements, gaps between parameters included."""
        return self.stop - self.start

    def kinds(self) -> Iterator[StatePart]:
        """Yield the parts that the rule's values have in this format."""
        for value in self.rule.values:
            yield from self.format.parts(value)

    def allocate(self, flat: Callable[[int, torch.dtype], Tensor]) -> None:
        """Make the buffers of all parts, zeroed, by `flat(numel, dtype)`."""
        self.parts = {part.name: flat(-(-self.numel // part.block), part.dtype) for part in self.kinds()}

    def view(self, part: StatePart, parameter: FlatParameter) -> Tensor:
        """Return a parameter's share of a part: in the parameter's shape, or flat if it has one element for a block."""
        first = (parameter.start - self.start) // part.block
        count = -(-parameter.shape.numel() // part.block)
        flat = self.parts[part.name][first : first + count]
        return flat.view(parameter.shape) if part.block == 1 else flat

    def cut(self, start: int, stop: int, rule: UpdateRule) -> "Segment":
        """Return elements `[start, stop)` as a segment of `rule`, on the same memory. The rule keeps the same values."""
        first, last = start - self.start, stop - self.start
        blocks = {part.name: part.block for part in self.kinds()}
        return Segment(
            start,
            stop,
            rule,
            self.format,
            {name: flat[first // blocks[name] : last // blocks[name]] for name, flat in self.parts.items()},
            None if self.direction is None else self.direction[first:last],
        )


def reassigned(
    segments: Sequence[Segment],
    parameters: Sequence[FlatParameter],
    rules: Mapping[str, UpdateRule],
    state_format: StateFormat,
) -> tuple[Segment, ...]:
    """Return the segments of a bundle for other rules, by parameter, on the same memory.

    Raises `ValueError` if a rule keeps other values than the segment has, or in another format.
    """
    found = []
    for segment in segments:
        inside = [p for p in parameters if segment.start <= p.start < segment.stop]
        runs = [(rule, list(run)) for rule, run in itertools.groupby(inside, lambda p: rules[p.name])]
        stops = [run[0].start for _, run in runs[1:]] + [segment.stop]
        for (rule, run), stop in zip(runs, stops, strict=True):
            kept, asked = (segment.rule.values, segment.format.name), (rule.values, state_format.name)
            if kept != asked:
                raise ValueError(
                    f"{run[0].name} keeps {_words(*kept)}, and the optimizer asks for {_words(*asked)}"
                )
            found.append(segment.cut(run[0].start, stop, rule))
    return tuple(found)


def _words(values: Sequence[StateValue], state_format: str) -> str:
    return f"{', '.join(value.name for value in values) or 'no state'} ({state_format})"


def parameter_facts(model: LayeredModel) -> dict[str, ParameterFacts]:
    """Return what an optimizer may know of each stored parameter, by name."""
    users: dict[int, set[int]] = {}
    for index, layer in enumerate(model.layers):
        for parameter in layer.parameters():
            users.setdefault(id(parameter), set()).add(index)
    decayed, matrices, last = decayed_names(model), matrix_names(model), len(model.layers) - 1
    facts: dict[str, ParameterFacts] = {}
    seen: set[int] = set()
    for index, (layer_name, layer) in enumerate(zip(model.names, model.layers, strict=True)):
        for path, parameter in layer.named_parameters():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name, is_alone = f"{layer_name}.{path}", users[id(parameter)] == {index}
            is_matrix = name in matrices and parameter.ndim in (2, 3) and parameter.numel() > 0
            facts[name] = ParameterFacts(
                name, parameter.shape, name in decayed, is_matrix and is_alone and 0 < index < last
            )
    return facts
