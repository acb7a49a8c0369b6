"""The tables of optimizers: `optimizer.name` chooses one, and with it the keys that are legal in `[optimizer]`."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import SerializeAsAny, ValidatorFunctionWrapHandler, WrapValidator

from torchround.config.key_types import Beta, NonNegativeFloat, Pair, PositiveFloat, Table


class OptimizerTable(Table):
    """The keys of every optimizer. A subclass gives `name` its one legal value as the default, and keys of its own.

    `can_predict` says that its state tells the next step, which `engine.delay_correction` needs. `updates_by_layer` says
    that a layer's update needs no device, which `engine.update = "bounded"` needs.
    """

    can_predict: ClassVar[bool] = False
    updates_by_layer: ClassVar[bool] = True

    name: str
    """Optimizer, which decides the other keys that are legal here."""

    lr: PositiveFloat = 3e-4
    """Peak learning rate, reached after `lr_schedule.warmup_steps`."""

    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, as a factor of the learning rate per step. Applies to matrices, not to norms, biases or sinks."""

    state: Literal["exact", "compact"] = "exact"
    """How the optimizer's state is kept in host memory. `exact`: float32, 4 bytes for each value. `compact`: 8-bit codes with a
    scale for each 128, about 1 byte for each value; deterministic, but not the same losses as `exact`."""


class AdamWTable(OptimizerTable):
    """AdamW, run on the host in float32. Weight decay applies to matrices only, not to norms, biases or sinks."""

    can_predict = True

    name: Literal["adamw"] = "adamw"
    """Optimizer, which decides the other keys that are legal here. `adamw`: AdamW for all parameters."""

    betas: Pair[Beta] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""

    eps: PositiveFloat = 1e-8
    """Number added to the root of the second moment."""


class MuonTable(OptimizerTable):
    """Muon for the matrices of blocks: their momentum is orthogonalised on the devices. AdamW for all other parameters."""

    updates_by_layer = False

    name: Literal["muon"] = "muon"
    """Optimizer, which decides the other keys that are legal here. `muon`: each expert is a matrix of its own."""

    momentum: Beta = 0.95
    """Decay rate of Muon's momentum."""

    adamw_lr: PositiveFloat | None = None
    """Peak learning rate of the parameters that AdamW updates. The schedule is the same. Default: `lr`."""

    betas: Pair[Beta] = (0.9, 0.95)
    """AdamW's decay rates of the first and the second moment."""

    eps: PositiveFloat = 1e-8
    """AdamW's number added to the root of the second moment."""


def optimizer_tables() -> dict[str, type[OptimizerTable]]:
    return {table.model_fields["name"].default: table for table in OptimizerTable.__subclasses__()}


def table_for(given: Any) -> type[OptimizerTable]:
    name = given.get("name") if isinstance(given, dict) else None
    return optimizer_tables().get(name, AdamWTable) if isinstance(name, str) else AdamWTable


def _checked(given: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return table_for(given).model_validate(given) if isinstance(given, dict) else check(given)


ChosenOptimizer = Annotated[SerializeAsAny[OptimizerTable], WrapValidator(_checked)]
"""The type of `Config.optimizer`: the table that `optimizer.name` chooses."""
