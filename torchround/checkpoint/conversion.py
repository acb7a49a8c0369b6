"""The way from stored tensors to wanted ones, which may be of another form: other names, dtypes or numbers of tensors.

The arithmetic is the caller's (`Converter`). This room knows which tensors belong together. A load reads those of one
conversion into memory of their own, converts them, and gives the memory back before it reads much more.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

Layout = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of tensors, by name."""


@dataclass(frozen=True)
class Conversion:
    """Tensors of a checkpoint, `stored`, whose values go to the `wanted` ones.

    `convert(stored, wanted)` gets both by name, and writes every element of the wanted ones, whatever it was before.
    """

    stored: Layout
    wanted: Layout
    convert: Callable[[Mapping[str, Tensor], Mapping[str, Tensor]], None]


class Converter(Protocol):
    """Knowledge of forms in which tensors may be stored: a load asks it if a checkpoint does not hold the wanted one."""

    def conversions(self, stored: Layout, wanted: Layout) -> Iterable[Conversion]: ...


@dataclass(frozen=True)
class ReadingPlan:
    """The way from the stored tensors of a checkpoint to the wanted ones: in place, or by `conversions`."""

    stored: Layout
    wanted: Layout
    conversions: Sequence[Conversion]

    @property
    def converted(self) -> frozenset[str]:
        """The names of the wanted tensors that conversions fill."""
        return frozenset(name for conversion in self.conversions for name in conversion.wanted)

    @property
    def filled(self) -> frozenset[str]:
        """The names of the wanted tensors that the checkpoint fills."""
        return frozenset(self.wanted.keys() & self.stored.keys()) | self.converted

    @property
    def needed(self) -> frozenset[str]:
        """The names of the stored tensors that the wanted ones are read from."""
        from_stored = (name for conversion in self.conversions for name in conversion.stored)
        return (self.filled - self.converted).union(from_stored)

    def differences(self, optional: Callable[[str], bool], claimed: Collection[str] = ()) -> str:
        """Return how the stored tensors differ from the wanted ones; "" if they do not.

        Conversions are no difference, nor are tensors that are `claimed`: a machine reads them, perhaps another one.
        """

        def show(entry: tuple[torch.dtype, tuple[int, ...]]) -> str:
            return f"{str(entry[0]).removeprefix('torch.')} {list(entry[1])}"

        def matters(name: str) -> bool:
            return name not in claimed and not optional(name)

        stored, wanted, converted = self.stored, self.wanted, self.converted
        read = self.needed | converted
        differences = [f"{name} is missing" for name in wanted if name not in read and matters(name)]
        differences += [f"{name} is not part of it" for name in stored if name not in read and matters(name)]
        differences += [
            f"{name} is {show(stored[name])} instead of {show(wanted[name])}"
            for name in wanted
            if name in stored and name not in converted and stored[name] != wanted[name]
        ]
        shown = "; ".join(differences[:5]) + ("; .." if len(differences) > 5 else "")
        return f"{len(differences)} tensors are not this model's: {shown}" if differences else ""


def layout_of(tensors: Mapping[str, Tensor]) -> Layout:
    return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
