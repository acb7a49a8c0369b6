"""What a run keeps in host memory, counted before it is allocated, against what the machine has.

Linux hands out memory that it does not have and kills whoever uses it, so a run that is too large would end
without a word.
"""

from dataclasses import dataclass
from pathlib import Path

import psutil

from torchround.config import EngineTable, TrainingTable
from torchround.engine.build import DTYPES
from torchround.engine.device import GIB
from torchround.engine.host_store import ALIGNMENT_ELEMENTS
from torchround.engine.update_policy import POLICIES
from torchround.layer import LayeredModel

CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


class HostMemoryError(Exception):
    """The machine has less memory than weights, gradients and optimizer state need."""


@dataclass(frozen=True)
class HostBudget:
    """Bytes in host memory by kind, as `HostStore` allocates them (DESIGN section 4)."""

    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.gradient_bytes + self.optimizer_bytes

    def __str__(self) -> str:
        return (
            f"{_size(self.total_bytes)} (weights {_size(self.weight_bytes)}, gradients "
            f"{_size(self.gradient_bytes)}, optimizer state {_size(self.optimizer_bytes)})"
        )

    def check(self, available_bytes: int) -> None:
        """Raises `HostMemoryError` where it is more than there is."""
        if self.total_bytes > available_bytes:
            raise HostMemoryError(
                f"the run needs {self} of host memory, and {_size(available_bytes)} are available: "
                f"{_size(self.total_bytes - available_bytes)} are missing. What helps: a smaller model.flavor, "
                'training.dtype = "bfloat16", engine.update = "sync", engine.rounds = 1'
            )


def host_budget(model: LayeredModel, training: TrainingTable, engine: EngineTable, rounds: int) -> HostBudget:
    """Counts each tied parameter once, and gradients that add up on the host in float32."""
    users: dict[int, int] = {}
    parameters = {}
    for layer in model.layers:
        for parameter in dict.fromkeys(layer.parameters()):
            users[id(parameter)] = users.get(id(parameter), 0) + 1
            parameters[id(parameter)] = parameter
    element_bytes = DTYPES[training.dtype].itemsize
    gradient_dtype = training.dtype if engine.grad_dtype == "auto" else engine.grad_dtype
    weights = gradients = optimizer = 0
    for key, parameter in parameters.items():
        numel = -(-parameter.numel() // ALIGNMENT_ELEMENTS) * ALIGNMENT_ELEMENTS
        versions = POLICIES[engine.update].versions if parameter.requires_grad else 1
        weights += numel * versions * element_bytes
        if parameter.requires_grad:
            adds_up = rounds * users[key] > 1
            gradients += numel * (4 if adds_up else DTYPES[gradient_dtype].itemsize)
            optimizer += numel * 12  # fp32 weight and two moments
    return HostBudget(weights, gradients, optimizer)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.2f} MiB"


def available_host_bytes() -> int:
    """Free memory of the machine, or the limit of the container where that is less."""
    limits = [int(psutil.virtual_memory().available)]
    for path in CGROUP_LIMITS:
        try:
            limits.append(int(Path(path).read_text()))
        except (OSError, ValueError):  # another kind of cgroup, or "max"
            continue
    return min(limits)
