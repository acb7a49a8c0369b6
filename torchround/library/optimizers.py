"""The optimizer of a pipeline: one of ours on the flat store, or any optimizer of `torch.optim` on the host weights."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pydantic import ValidationError
from torch import nn

from torchround.config import OptimizerTable
from torchround.config.optimizer_tables import optimizer_tables
from torchround.library.module_layer import WrappedNet
from torchround.library.refusals import PipelineUsageError
from torchround.optim import HostOptimizer

DEFAULT_LR = 1e-2
# As in `torch.optim`.
OUR_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-8}

NamedParameters = Sequence[tuple[str, nn.Parameter]]


def choose_optimizer(
    asked: str | Callable[..., torch.optim.Optimizer], wrapped: WrappedNet, **given: Any
) -> OptimizerTable | HostOptimizer:
    """Return the optimizer that is asked for, as engines take it. Raises `PipelineUsageError` if there is no such one.

    `given` are the settings of `Pipeline`, None where the optimizer's own default holds. A class of `torch.optim` gets the
    named parameters, those without weight decay in a group of their own, and the settings that it has. Any other callable
    gets the named parameters alone.
    """
    given = {name: value for name, value in given.items() if value is not None}
    if isinstance(asked, str):
        return _our_table(asked, {name: value for name, value in given.items() if name != "lr"})
    if not callable(asked):
        raise PipelineUsageError(
            f"optimizer is a {type(asked).__name__}, and an object updates other tensors than the host weights; give the "
            "class (optimizer=torch.optim.SGD, lr=...), or a callable of named parameters"
        )
    plain: dict[str, str] = {}
    for name, stored in wrapped.stored.items():
        plain.setdefault(stored, name)
    decayed = wrapped.model.decayed or frozenset()
    if given.pop("state") != "exact":
        raise PipelineUsageError("state is for our own optimizers; leave it out")
    make_optimizer: Callable[..., torch.optim.Optimizer] = asked
    is_class = inspect.isclass(asked)
    known = inspect.signature(asked).parameters if is_class else {}
    if is_class and (unknown := [name for name in given if given[name] and name not in known]):
        raise PipelineUsageError(
            f"{asked.__name__} has no {', '.join(unknown)}; give a callable of named parameters"
        )
    settings = {name: value for name, value in {"lr": DEFAULT_LR, **given}.items() if name in known}

    def make(named: NamedParameters) -> torch.optim.Optimizer:
        if not is_class:
            return make_optimizer([(plain[stored], parameter) for stored, parameter in named])
        groups = []
        for decays in (True, False):
            params = [(plain[stored], value) for stored, value in named if (stored in decayed) is decays]
            own = {"weight_decay": 0.0} if not decays and "weight_decay" in known else {}
            groups += [{"params": params, **own}] if params else []
        return make_optimizer(groups, **settings)

    return HostOptimizer(make)


def _our_table(name: str, given: Mapping[str, Any]) -> OptimizerTable:
    """Return the settings of our own optimizer of that name. Raises `PipelineUsageError`."""
    tables = optimizer_tables()
    if (table := tables.get(name)) is None:
        raise PipelineUsageError(
            f"optimizer = {name!r}; legal: {', '.join(map(repr, tables))}, a class of torch.optim, or a callable"
        )
    usual = {key: value for key, value in OUR_DEFAULTS.items() if key in table.model_fields}
    try:
        return table.model_validate({**usual, **given})
    except ValidationError as error:
        problems = [f"{part['loc'][0]} = {part['input']!r}: {part['msg']}" for part in error.errors()]
        raise PipelineUsageError(f"optimizer = {name!r}: {'; '.join(problems)}") from error
