"""The optimizer of a pipeline: our AdamW on the flat store, or any optimizer of `torch.optim` on the host weights."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchround.config import OptimizerTable
from torchround.engine.host_updates import trained_weights
from torchround.engine.store.host_store import HostStore
from torchround.library.module_layer import WrappedNet
from torchround.library.refusals import PipelineUsageError
from torchround.optim import HostOptimizer, HostOptimizerError

OUR_BETAS, OUR_EPS = (0.9, 0.999), 1e-8

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class OptimizerChoice:
    """The optimizer that a pipeline was asked for: our AdamW with these settings, or one of `torch.optim`."""

    ours: OptimizerTable | None
    host: HostOptimizer | None = None

    def for_engine(self) -> OptimizerTable | HostOptimizer:
        """Return what an engine takes. Each engine gets the same object, so that the optimizer's state stays."""
        chosen = self.ours or self.host
        assert chosen is not None, "one of the two was chosen"
        return chosen

    def bind(self, store: HostStore) -> None:
        """Make the `torch.optim` object now, so that a scheduler can have it before the first batch."""
        if self.host is not None:
            try:
                self.host.bind(trained_weights(store))
            except HostOptimizerError as error:
                raise PipelineUsageError(str(error)) from error


def choose_optimizer(
    asked: str | Callable[..., torch.optim.Optimizer],
    wrapped: WrappedNet,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] | None,
    eps: float | None,
) -> OptimizerChoice:
    """Return the optimizer that is asked for. Raises `PipelineUsageError` if there is no such one.

    A class gets the named parameters, `lr`, `weight_decay` if it has one, and `betas` and `eps` if they are given. Undecayed parameters
    are a group of their own. Any other callable gets the named parameters alone and sees to weight decay itself.
    """
    plain: dict[str, str] = {}
    for name, stored in wrapped.stored.items():
        plain.setdefault(stored, name)
    if isinstance(asked, str):
        if asked != "adamw":
            raise PipelineUsageError(
                f'optimizer = {asked!r}; legal: "adamw", a class of torch.optim, or a callable of named parameters'
            )
        eps = OUR_EPS if eps is None else eps
        return OptimizerChoice(OptimizerTable(betas=betas or OUR_BETAS, eps=eps, weight_decay=weight_decay))
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
