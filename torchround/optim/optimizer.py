"""The seam of optimizers: what one says of a parameter, of its named state, and of one update's arithmetic.

An `Optimizer` chooses an `UpdateRule` for each parameter. A rule says which values it keeps for each element and how an
update changes them and the weight. A `StateFormat` says how the values are kept. The store, checkpoints, the planner
and the compiled pass ask these three and know no optimizer by name.

A new optimizer is a file in `optim/rules/` and a table in `config/optimizer_tables.py`.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import ClassVar

import torch
from torch import Tensor

from torchround.config.optimizer_tables import OptimizerTable
from torchround.optim.formats import EXACT, FORMATS, StateFormat, StateValue

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class ParameterFacts:
    """The properties of a parameter that an optimizer may choose its rule by.

    `name` is `<layer>.<path>`, as the store names it. `is_block_matrix` holds for a matrix, or a stack of matrices
    [E, m, n] (experts), of a layer that is neither the first nor the last, and not tied.
    """

    name: str
    shape: torch.Size
    is_decayed: bool
    is_block_matrix: bool


class UpdateRule(ABC):
    """The update of parameters of one kind. A frozen dataclass: parameters with equal rules share a segment.

    `kernel_source` is C++ of one element's arithmetic for the compiled pass; without it there is only the plain one.
    A rule that `uses_direction` gets a second input beside the gradient, which devices computed from its `look_ahead`. A rule that
    `can_predict` says in `next_step` where the state alone would move the weight.
    """

    values: ClassVar[tuple[StateValue, ...]]
    kernel_source: ClassVar[str | None] = None
    uses_direction: ClassVar[bool] = False
    can_predict: ClassVar[bool] = False

    @abstractmethod
    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        """Return the numbers of one update in float64; each is rounded once to fp32. `update` counts from 1."""

    @abstractmethod
    def new_values(
        self, weight: Tensor, values: Tensors, gradient: Tensor, numbers: Tensors, direction: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Return the new weight and the new values as fresh fp32 tensors; the arguments are only read.

        All are 1-D fp32 of equal length, `numbers` are `[]` fp32 tensors. Only exactly rounded operations are used, none
        fused, so that the compiled pass can give the same bits.
        """

    def next_step(self, values: Tensors, numbers: Tensors) -> Tensor:
        """Return the step, weight decay apart, that the values ask for, as a fresh tensor."""
        raise TypeError(f"{type(self).__name__} cannot predict a step from its values")

    def look_ahead(self, values: Tensors, gradient: Tensor, numbers: Tensors) -> Tensor:
        """Return what devices turn into the direction, fresh fp32. `numbers` that depend on the rate must not be read."""
        raise TypeError(f"{type(self).__name__} uses no direction")


class Optimizer(ABC):
    """An optimizer with its settings: the rule of each parameter, and the format of the rules' values.

    A subclass names the table that it is made from, by which `make_optimizer` finds it. If it
    `splits_weights`, bf16 weights may be kept as device weights and residuals.
    """

    table: ClassVar[type[OptimizerTable]]
    splits_weights: ClassVar[bool] = True

    def __init__(self, settings: OptimizerTable) -> None:
        self.settings = settings
        self.format: StateFormat = FORMATS[settings.state]

    @abstractmethod
    def rule_of(self, parameter: ParameterFacts) -> UpdateRule: ...


def make_optimizer(table: OptimizerTable) -> Optimizer:
    """Make the optimizer whose class names the class of the table. Raises `KeyError` if none does."""
    for module in iter_modules([str(Path(__file__).with_name("rules"))]):
        import_module(f"torchround.optim.rules.{module.name}")
    known = {found.table: found for found in Optimizer.__subclasses__() if hasattr(found, "table")}
    return known[type(table)](table)


@dataclass(frozen=True)
class Unchanged(UpdateRule):
    """The rule of weights that a `HostOptimizer` updates, or that stay as they are: no values, no update."""

    values = ()

    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        return ()

    def new_values(
        self, weight: Tensor, values: Tensors, gradient: Tensor, numbers: Tensors, direction: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        raise TypeError("weights without state have no update")


class NoState(Optimizer):
    """The optimizer of a store without state: of inference, and of optimizers of `torch.optim`, which need fp32 leaves."""

    splits_weights = False

    def __init__(self) -> None:
        self.format = EXACT

    def rule_of(self, parameter: ParameterFacts) -> UpdateRule:
        return Unchanged()


NO_STATE = NoState()


@lru_cache(maxsize=64)  # all segments of one rule have the same numbers in a step
def rounded_numbers(numbers: tuple[float, ...]) -> Tensors:
    """Round each number of an update once, to a `[]` fp32 tensor."""
    return tuple(torch.tensor(number, dtype=torch.float32) for number in numbers)
