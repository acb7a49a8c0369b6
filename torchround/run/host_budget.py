"""What a run keeps in host memory, counted before it is allocated, against what the machine has.

Linux hands out memory that it does not have and kills whoever uses it, so a run that is too large would end
without a word.
"""

from collections.abc import Collection
from pathlib import Path

import psutil

from torchround.config import EngineTable, TrainingTable
from torchround.engine.build import DTYPES
from torchround.layer import LayeredModel
from torchround.pipeline.memory import HostMemory, ParameterCounts, host_state, size_text

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class HostMemoryError(Exception):
    """The machine has less memory than weights, gradients and optimizer state need."""


def parameter_counts(model: LayeredModel, mapped: Collection[str] = ()) -> ParameterCounts:
    """Tied parameters once; those whose names are `mapped` are frozen and counted apart."""
    users: dict[int, int] = {}
    parameters = {}
    in_files: set[int] = set()
    for name, layer in zip(model.names, model.layers, strict=True):
        for path, parameter in layer.named_parameters():
            users[id(parameter)] = users.get(id(parameter), 0) + 1
            parameters[id(parameter)] = parameter
            if f"{name}.{path}" in mapped:
                in_files.add(id(parameter))
    trained = {key: parameter.numel() for key, parameter in parameters.items() if parameter.requires_grad}
    return ParameterCounts(
        trained=sum(trained.values()),
        frozen=sum(
            parameter.numel() for key, parameter in parameters.items() if key not in trained.keys() | in_files
        ),
        tied=sum(numel for key, numel in trained.items() if users[key] > 1),
        mapped=sum(parameters[key].numel() for key in in_files),
    )


def host_budget(
    model: LayeredModel,
    training: TrainingTable,
    engine: EngineTable,
    rounds: int,
    mapped: Collection[str] = (),
) -> HostMemory:
    """Weights, gradients and optimizer state as `HostStore` allocates them, but for its padding.

    `mapped` are names of weights that stay in files.
    """
    gradient_dtype = training.dtype if engine.grad_dtype == "auto" else engine.grad_dtype
    element_bytes, gradient_bytes = DTYPES[training.dtype].itemsize, DTYPES[gradient_dtype].itemsize
    return host_state(parameter_counts(model, mapped), engine.update, rounds, element_bytes, gradient_bytes)


def check_host_memory(budget: HostMemory, available_bytes: int) -> None:
    """Raises `HostMemoryError` where the budget is more than there is."""
    if budget.state_bytes > available_bytes:
        raise HostMemoryError(
            f"the run needs {budget_text(budget)} of host memory, and {size_text(available_bytes)} are available: "
            f"{size_text(budget.state_bytes - available_bytes)} are missing. What helps: a smaller model.flavor, "
            'training.dtype = "bfloat16", engine.update = "sync", engine.rounds = 1'
        )


def budget_text(budget: HostMemory) -> str:
    """The sum and its parts on one line."""
    return (
        f"{size_text(budget.state_bytes)} (weights {size_text(budget.weight_bytes)}, gradients "
        f"{size_text(budget.gradient_bytes)}, optimizer state {size_text(budget.optimizer_bytes)})"
    )


def available_host_bytes() -> int:
    """Free memory of the machine, or the limit of the container where that is less."""
    limits = [int(psutil.virtual_memory().available)]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another kind of cgroup, or "max"
            continue
    return min(limits)
