"""Reads stored tensors into wanted ones of another form: other names, dtypes or numbers of tensors for the same values.

The arithmetic is the caller's (`Converter`). This room knows which tensors belong together, and brings each stored one
front to back in pieces. So no tensor is in memory a second time, in any order of the files.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""

Receiver = Callable[[int, Tensor], None]
"""Takes consecutive elements of a stored tensor, flat, and the number of elements before them."""


@dataclass(frozen=True)
class TensorSink:
    """A stored tensor of `numel` elements of `dtype`, taken in pieces from the front. Pieces are valid for one call.

    Each piece except the last one has a multiple of 2^20 elements.
    """

    dtype: torch.dtype
    numel: int
    take: Receiver


@dataclass(frozen=True)
class Conversion:
    """Tensors of a checkpoint, `stored`, whose values go to the `wanted` ones.

    `receivers` gets the wanted tensors and returns what takes each stored one. The stored tensors come in any order,
    one after the other, and every wanted element must be written whatever it was before.
    """

    stored: Layout
    wanted: Layout
    receivers: Callable[[Mapping[str, Tensor]], Mapping[str, Receiver]]


class Converter(Protocol):
    """Knowledge of forms in which tensors may be stored: a load asks it if a checkpoint does not hold the wanted one."""

    def conversions(self, stored: Layout, wanted: Layout) -> Sequence[Conversion]:
        """Return the conversions for a checkpoint. Several machines call it with the same layouts."""


class NoConverter:
    """A converter that leaves every tensor as it is stored."""

    def conversions(self, stored: Layout, wanted: Layout) -> Sequence[Conversion]:
        """Return no conversion."""
        return ()


@dataclass(frozen=True)
class ReadingPlan:
    """The way from the stored tensors of a checkpoint to the wanted ones: in place, or by `conversions`."""

    stored: Layout
    conversions: Sequence[Conversion]

    def differences(self, wanted: Layout, optional: Callable[[str], bool]) -> str:
        """Return how the stored tensors differ from the wanted ones, "" if they do not. Conversions are no difference."""
        from_stored = {name for conversion in self.conversions for name in conversion.stored}
        return differences_of(
            {name: entry for name, entry in self.stored.items() if name not in from_stored},
            {name: entry for name, entry in wanted.items() if name not in self.converted},
            optional,
        )

    @property
    def converted(self) -> frozenset[str]:
        """The names of the wanted tensors that conversions fill."""
        return frozenset(name for conversion in self.conversions for name in conversion.wanted)

    def filled(self, wanted: Layout) -> frozenset[str]:
        """Return the names of the wanted tensors that the checkpoint fills."""
        return frozenset(wanted.keys() & (self.stored.keys() | self.converted))

    def needed(self, wanted: Layout) -> frozenset[str]:
        """Return the names of the stored tensors that the wanted ones are read from."""
        plain = self.stored.keys() & (wanted.keys() - self.converted)
        return frozenset(plain.union(*(conversion.stored for conversion in self._for(wanted))))

    def destinations(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor | TensorSink]:
        """Return where each needed stored tensor is read to, by its stored name."""
        found: dict[str, Tensor | TensorSink] = {
            name: tensor for name, tensor in tensors.items() if name not in self.converted
        }
        for conversion in self._for(layout_of(tensors)):
            receivers = conversion.receivers({name: tensors[name] for name in conversion.wanted})
            for name, (dtype, shape) in conversion.stored.items():
                found[name] = TensorSink(dtype, torch.Size(shape).numel(), receivers[name])
        return found

    def _for(self, wanted: Layout) -> Iterator[Conversion]:
        """Yield the conversions whose results are wanted. A machine wants all tensors of a parameter, or none."""
        yield from (found for found in self.conversions if found.wanted.keys() <= wanted.keys())


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    """Return dtype and shape of each tensor."""
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}


def differences_of(stored: Layout, wanted: Layout, optional: Callable[[str], bool]) -> str:
    """Return how the stored tensors differ from the wanted ones; "" if they do not."""

    def show(entry: tuple[torch.dtype, tuple[int, ...]]) -> str:
        return f"{str(entry[0]).removeprefix('torch.')} {list(entry[1])}"

    missing = [f"{name} is missing" for name in wanted if name not in stored and not optional(name)]
    extra = [f"{name} is not part of it" for name in stored if name not in wanted and not optional(name)]
    changed = [
        f"{name} is {show(stored[name])} instead of {show(wanted[name])}"
        for name in wanted
        if name in stored and stored[name] != wanted[name]
    ]
    differences = missing + extra + changed
    shown = "; ".join(differences[:5]) + ("; .." if len(differences) > 5 else "")
    return f"{len(differences)} tensors are not this model's: {shown}" if differences else ""
