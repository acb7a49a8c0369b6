"""Host optimizers: any optimizer of `torch.optim`, or one like it, on the fp32 weights in host memory.

The optimizer runs on a thread of its own, one or two steps behind its user. So there are two objects: the one that
`make` returned, which only the thread uses, and `HostOptimizer.optimizer`, which the user and schedulers see. Both have
the same state, but hyperparameters of their own. They pass from one to the other at the call that ends a step.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchround.errors import EngineUsageError

Hyperparameters = list[dict[str, Any]]


class HostOptimizerError(EngineUsageError):
    """The optimizer cannot work on host weights, or its step failed."""


class HostOptimizer:
    """An optimizer on host weights. `make` gets the trained parameters by name and returns it.

    The parameters are fp32 leaves that share the memory of the host store's weights. Their names are those of the
    store. A step sees their summed gradients as `.grad`, fp32 as well, which are None between steps.
    """

    def __init__(self, make: Callable[[list[tuple[str, nn.Parameter]]], torch.optim.Optimizer]) -> None:
        self._make = make
        self._parameters: dict[str, nn.Parameter] = {}
        self._working: torch.optim.Optimizer | None = None
        self._shown: torch.optim.Optimizer | None = None
        # By group: the hyperparameters that steps have changed, such as counters. They stay with the working object.
        self._own: list[set[str]] = []
        self._lock = threading.Lock()

    def bind(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Make the optimizer for these weights, once. Raises `HostOptimizerError` for other weights or parameters."""
        if self._working is not None:
            ours = [(name, parameter.data_ptr()) for name, parameter in self._parameters.items()]
            if ours != [(name, weight.data_ptr()) for name, weight in weights]:
                raise HostOptimizerError("this HostOptimizer belongs to another host store; make a new one")
            return
        if not weights:
            return  # nothing is trained
        parameters = {name: nn.Parameter(weight) for name, weight in weights}
        working = self._make(list(parameters.items()))
        _check(working, parameters)
        self._parameters, self._working = parameters, working
        self._own = [set() for _ in working.param_groups]
        self._shown = _shown(working)
        self._shown.register_load_state_dict_post_hook(self._take_loaded)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as its user sees it. Its hyperparameters may change at any time, its state between steps."""
        if self._shown is None:
            raise HostOptimizerError("the optimizer is made with the engine; there is none yet")
        return self._shown

    def hyperparameters(self, lr: float | None = None) -> Hyperparameters:
        """Copy the groups' hyperparameters, with `lr` in each. Raises `HostOptimizerError` if their parameters changed."""
        if self._working is None:
            return []
        if _members(self.optimizer) != _members(self._working):
            raise HostOptimizerError(
                "the parameters of the optimizer's groups changed; make a new engine with a new HostOptimizer"
            )
        # Schedulers ask whether a step came before them. It has, as far as its caller can see.
        self.optimizer._opt_called = True  # type: ignore[attr-defined]
        with self._lock:  # a step may add a key
            values = [copy.deepcopy(_without_params(group)) for group in self.optimizer.param_groups]
        return [group if lr is None else {**group, "lr": lr} for group in values]

    def step(self, hyperparameters: Hyperparameters, gradients: Mapping[str, Tensor]) -> None:
        """Update the weights from `gradients`, by name. Raises `HostOptimizerError` if the optimizer's step does."""
        assert self._working is not None, "bind() comes before step()"
        groups = self._working.param_groups
        for group, given, own in zip(groups, hyperparameters, self._own, strict=True):
            group.update({key: value for key, value in given.items() if key not in own})
        before = [copy.deepcopy(_without_params(group)) for group in groups]
        for name, parameter in self._parameters.items():
            parameter.grad = gradients[name]
        try:
            self._working.step()
        except Exception as error:
            text = f"{type(self._working).__name__}.step() raised {type(error).__name__}: {error}"
            raise HostOptimizerError(text) from error
        finally:
            # The gradients' memory is the next step's.
            for parameter in self._parameters.values():
                parameter.grad = None
        self._show_changes(before)

    def _show_changes(self, before: Hyperparameters) -> None:
        """Let the user see the hyperparameters that the step itself has changed."""
        assert self._working is not None, "a step has one"
        groups = self._working.param_groups, self.optimizer.param_groups, before, self._own
        for group, shown, old, own in zip(*groups, strict=True):
            own |= {key for key, value in _without_params(group).items() if not _same(value, old.get(key))}
            with self._lock:
                shown.update({key: copy.deepcopy(group[key]) for key in own})

    def _take_loaded(self, loaded: torch.optim.Optimizer) -> None:
        """Let the working object continue with what was loaded into the one that the user sees."""
        assert self._working is not None, "bind() comes before load_state_dict()"
        self._working.state = loaded.state
        for group, new in zip(self._working.param_groups, loaded.param_groups, strict=True):
            group.update(copy.deepcopy(_without_params(new)))


def _shown(working: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Make an optimizer with the same parameters, state and attributes, and hyperparameters of its own."""
    shown: torch.optim.Optimizer = object.__new__(type(working))
    shown.__dict__.update(working.__dict__)
    shown.param_groups = [
        {**group, **copy.deepcopy(_without_params(group))} for group in working.param_groups
    ]
    # Its own hooks for loading: the user loads into this one.
    for name in ("pre", "post"):
        hooks = f"_optimizer_load_state_dict_{name}_hooks"
        shown.__dict__[hooks] = copy.copy(working.__dict__[hooks])
    return shown


def _check(optimizer: object, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise `HostOptimizerError` for an object that would not train the given parameters."""
    name, known = type(optimizer).__name__, set(map(id, parameters.values()))
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise HostOptimizerError(f"an optimizer derives from torch.optim.Optimizer, got {name}")
    if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
        raise HostOptimizerError(
            f"{name} holds parameters that are not the given ones; pass the named parameters on as they are"
        )


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _members(optimizer: torch.optim.Optimizer) -> list[list[int]]:
    return [[id(parameter) for parameter in group["params"]] for group in optimizer.param_groups]


def _same(value: object, other: object) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return torch.equal(value, other)
    return type(value) is type(other) and bool(value == other)
