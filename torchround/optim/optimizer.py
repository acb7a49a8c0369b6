"""The seam of optimizers: what one says of a parameter, of its named state, and of one update's arithmetic.

An `Optimizer` chooses an `UpdateRule` for each parameter. A rule says which values it keeps for each element and how an
update changes them and the weight. A `StateFormat` says how the values are kept. The store, checkpoints, the planner
and the compiled pass ask these three and know no optimizer by name.

A new optimizer is a file in `optim/rules/` and a table in `config/optimizer_tables.py`; docs/optimizers.md has all of Lion.
`UpdateRule` and `Optimizer` are the contract.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from torchround.config.optimizer_tables import OptimizerTable
from torchround.optim.formats import EXACT, FORMATS, StateFormat, StateValue

Tensors = tuple[Tensor, ...]
Keys = TypeVar("Keys", bound=OptimizerTable)


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

    - `values`: what is kept for each element. Each starts at zero, and a checkpoint holds it under its name.
    - `kernel_source`: C++ of one element's arithmetic for the compiled pass, in the operations and the order of `new_values`.
      Without it there is only the plain pass. It defines `update_values(float *values, float gradient, Numbers n)`, which
      changes the values in place, and `updated_weight(float weight, const float *rooted, float gradient, float direction,
      Numbers n)`, which gets those of the new values that are never negative as their roots. `n` are the numbers.
    - `uses_direction`: an update gets a second input beside the gradient, which devices computed from `look_ahead`. The
      optimizer's table says `updates_by_layer = False`.
    - `can_predict`: `next_step` says where the state alone would move the weight, in C++ too: `next_step(const float *rooted,
      Numbers n)`. The optimizer's table says `can_predict = True`.
    """

    values: ClassVar[tuple[StateValue, ...]]
    kernel_source: ClassVar[str | None] = None
    uses_direction: ClassVar[bool] = False
    can_predict: ClassVar[bool] = False

    @abstractmethod
    def numbers(self, lr: float, update: int, gradient_scale: float) -> tuple[float, ...]:
        """Compute the numbers of one update in float64; each is rounded once to fp32.

        `update` counts the applied updates from 1. `new_values` has to multiply the gradient by `gradient_scale`, which undoes
        the loss scale and clips.
        """

    @abstractmethod
    def new_values(
        self, weight: Tensor, values: Tensors, gradient: Tensor, numbers: Tensors, direction: Tensor | None
    ) -> tuple[Tensor, Tensors]:
        """Compute the new weight and the new values, in the order of `values`, as fresh tensors. The arguments are only read.

        All are 1-D fp32 of equal length, a chunk of a segment, so no element may depend on another. `numbers` are `[]` fp32
        tensors. `direction` is None without `uses_direction`. Use only operations that IEEE 754 rounds exactly (add, subtract,
        multiply, divide, `formats.exact_root`), none fused (`addcmul`, `lerp`), so that the compiled pass gives the same bits.
        """

    def next_step(self, values: Tensors, numbers: Tensors) -> Tensor:
        """Compute the step, weight decay apart, that the values ask for, as a fresh tensor."""
        raise TypeError(f"{type(self).__name__} cannot predict a step from its values")

    def look_ahead(self, values: Tensors, gradient: Tensor, numbers: Tensors) -> Tensor:
        """Compute what devices turn into the direction, fresh fp32. `numbers` that depend on the rate must not be read."""
        raise TypeError(f"{type(self).__name__} uses no direction")


class Optimizer(ABC, Generic[Keys]):
    """An optimizer with its settings: the rule of each parameter, and the format of the rules' values.

    - `table`: the class of the settings, by which `make_optimizer` finds the optimizer. Both derive from their base class
      itself: a class that derives from another optimizer's is not found.
    - `splits_weights`: whether bf16 weights may be kept as device weights and residuals.
    """

    table: ClassVar[type[OptimizerTable]]
    splits_weights: ClassVar[bool] = True

    def __init__(self, settings: Keys) -> None:
        self.settings = settings
        self.format: StateFormat = FORMATS[settings.state]

    @abstractmethod
    def rule_of(self, parameter: ParameterFacts) -> UpdateRule:
        """Choose the rule of a parameter. `parameter.is_decayed`: weight decay applies to it."""


def make_optimizer(table: OptimizerTable) -> Optimizer[Any]:
    """Make the optimizer whose class names the class of the table. Raises `KeyError` if none does."""
    for module in iter_modules([str(Path(__file__).with_name("rules"))]):
        import_module(f"torchround.optim.rules.{module.name}")
    classes: list[type[Optimizer[Any]]] = Optimizer.__subclasses__()
    known = {found.table: found for found in classes if hasattr(found, "table")}
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


class NoState(Optimizer[OptimizerTable]):
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
