"""The optimizer of a pipeline: one of ours on the flat store, or any optimizer of `torch.optim` on the host weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import nn

from torchround.config import OptimizerTable
from torchround.config.optimizer_tables import optimizer_tables
from torchround.engine.store.bundles import ASYNC, ASYNC_PREDICT, UpdatePolicy
from torchround.engine.store.host_store import HostStore
from torchround.engine.update import trained_weights
from torchround.library.module_layer import WrappedNet
from torchround.library.refusals import PipelineUsageError
from torchround.optim import HostOptimizer, HostOptimizerError
from torchround.optim.optimizer import NO_STATE, Optimizer, make_optimizer

# As in `torch.optim`.
OUR_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer that a pipeline was asked for: one of ours with these settings, or one of `torch.optim`."""

    ours: OptimizerTable | None
    host: HostOptimizer | None = None

    def for_engine(self) -> OptimizerTable | HostOptimizer:
        """Return what an engine takes. Each engine gets the same object, so that the optimizer's state stays."""
        chosen = self.ours or self.host
        assert chosen is not None, "one of the two was chosen"
        return chosen

    def for_store(self) -> Optimizer:
        """Return what a store keeps state for: nothing if the optimizer brings its own."""
        return NO_STATE if self.ours is None else make_optimizer(self.ours)

    @property
    def late_policy(self) -> UpdatePolicy:
        """The policy of `update = "async"`: with predicted weights if the optimizer can predict them."""
        return ASYNC_PREDICT if self.ours is not None and self.ours.can_predict else ASYNC

    def bind(self, store: HostStore) -> None:
        """Make the `torch.optim` object now, so that a scheduler can have it before the first batch."""
        if self.host is not None:
            try:
                self.host.bind(trained_weights(store))
            except HostOptimizerError as error:
                raise PipelineUsageError(str(error)) from error


def _our_table(name: str, given: Mapping[str, Any]) -> OptimizerTable:
    """Return the settings of our own optimizer of that name. Raises `PipelineUsageError`."""
    tables = optimizer_tables()
    table = tables.get(name)
    if table is None:
        ours = ", ".join(f'"{known}"' for known in tables)
        raise PipelineUsageError(
            f"optimizer = {name!r}; legal: {ours}, a class of torch.optim, or a callable of named parameters"
        )
    if unknown := given.keys() - table.model_fields.keys():
        raise PipelineUsageError(f'"{name}" has no {", ".join(sorted(unknown))}; leave it out')
    usual = {key: value for key, value in OUR_DEFAULTS.items() if key in table.model_fields}
    try:
        return table.model_validate({**usual, **given})
    except ValidationError as error:
        # A wrong element is a mistake in the whole argument, as its caller sees it.
        wrong = {str(details["loc"][0]): details["msg"].lower() for details in error.errors()}
        problems = "; ".join(f"{key} = {given[key]!r}: {message}" for key, message in wrong.items())
        raise PipelineUsageError(f'optimizer = "{name}": {problems}') from error


def choose_optimizer(
    asked: str | Callable[..., torch.optim.Optimizer],
    wrapped: WrappedNet,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] | None,
    eps: float | None,
    state: Literal["exact", "compact"],
) -> OptimizerChoice:
    """Return the optimizer that is asked for. Raises `PipelineUsageError` if there is no such one.

    A class gets the named parameters, `lr`, `weight_decay` if it has one, and `betas` and `eps` if they are given. Undecayed parameters
    are a group of their own. Any other callable gets the named parameters alone and sees to weight decay itself.
    """
    plain: dict[str, str] = {}
    for name, stored in wrapped.stored.items():
        plain.setdefault(stored, name)
    if isinstance(asked, str):
        given = {"betas": betas, "eps": eps, "weight_decay": weight_decay, "state": state}
        return OptimizerChoice(_our_table(asked, {k: v for k, v in given.items() if v is not None}))
    if state != "exact":
        raise PipelineUsageError(f"state = {state!r} is for our own optimizers; leave it out")
    if isinstance(asked, torch.optim.Optimizer):
        name = type(asked).__name__
        raise PipelineUsageError(
            f"optimizer is an object of {name}, which updates other tensors than the host weights; give the class "
            f"(optimizer=torch.optim.{name}, lr=...), or a callable: optimizer=lambda named: torch.optim.{name}(named, ...)"
        )
    if not callable(asked):
        raise PipelineUsageError(f"optimizer = {asked!r} is neither a class of torch.optim nor a callable")

    def renamed(named: NamedParameters) -> list[tuple[str, nn.Parameter]]:
        return [(plain[stored], parameter) for stored, parameter in named]

    factory: Callable[..., torch.optim.Optimizer] = asked
    if not inspect.isclass(asked):
        return OptimizerChoice(None, HostOptimizer(lambda named: asked(renamed(named))))
    known = inspect.signature(asked).parameters
    options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay}
    for name, value in (("betas", betas), ("eps", eps)):
        if value is not None and name not in known:
            raise PipelineUsageError(f"{asked.__name__} has no {name}; leave it out")
        options |= {} if value is None else {name: value}
    if weight_decay and "weight_decay" not in known:
        raise PipelineUsageError(f"{asked.__name__} has no weight_decay; leave it out")
    given = {name: value for name, value in options.items() if name in known}
    decayed = wrapped.model.decayed or frozenset()

    def make(named: NamedParameters) -> torch.optim.Optimizer:
        with_decay = renamed([(name, value) for name, value in named if name in decayed])
        without = renamed([(name, value) for name, value in named if name not in decayed])
        groups: list[dict[str, Any]] = [{"params": with_decay}] if with_decay else []
        if without:
            groups.append({"params": without, **({"weight_decay": 0.0} if "weight_decay" in known else {})})
        return factory(groups, **given)

    return OptimizerChoice(None, HostOptimizer(make))
