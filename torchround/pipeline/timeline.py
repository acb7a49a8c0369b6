"""What a schedule is made of, and what a run of it shows: tasks, and the timeline with its measures.

The same types serve the dispatch schedule, every baseline, and whatever draws them.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import Enum

Dependency = tuple[int, float]  # (index of a task, seconds that must pass after its end)

COMPUTE = "compute"
HOST = -1  # the "device" of work that no device does, such as the optimizer's


class TaskKind(str, Enum):
    """BACKWARD is all of it, or only the input's gradient where WEIGHT_GRADIENT is a task of its own; FUSED
    is forward and backward in one go. WEIGHTS and GRADIENTS are a stage's way up to a device and down."""

    FORWARD = "forward"
    BACKWARD = "backward"
    WEIGHT_GRADIENT = "weight_gradient"
    FUSED = "fused"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"
    RELOAD = "reload"
    WEIGHTS = "weights"
    GRADIENTS = "gradients"
    UPDATE = "update"


@dataclass(frozen=True)
class Task:
    """A piece of work for one stream of one device.

    It starts no sooner than the end of each task in `after` plus that one's lag. `holds_bytes` of device memory are
    taken at the start and kept, `scratch_bytes` are taken for the duration only, `frees_bytes` are given back at the
    end. `moves_bytes` leave or reach the device for it.
    """

    device: int
    kind: TaskKind
    duration_s: float
    layers: range
    micro_batch: int
    after: tuple[Dependency, ...] = ()
    stream: str = COMPUTE
    priority: float = 0.0
    step: int = 0
    holds_bytes: int = 0
    scratch_bytes: int = 0
    frees_bytes: int = 0
    moves_bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """Task `i` ran from `start_s[i]` to `end_s[i]`; time 0 is the start of the first one."""

    tasks: tuple[Task, ...]
    start_s: tuple[float, ...]
    end_s: tuple[float, ...]
    num_devices: int

    @property
    def makespan_s(self) -> float:
        """From 0 to the end of the last task on any stream; tasks that take no time do not count."""
        ends = (end for task, end in zip(self.tasks, self.end_s, strict=True) if task.duration_s > 0)
        return max(ends, default=0.0)

    @property
    def work_s(self) -> float:
        """Busy seconds of all compute streams together."""
        return sum(task.duration_s for task in self.tasks if task.stream == COMPUTE and task.device != HOST)

    @property
    def bubble(self) -> float:
        """`1 - work / (N x makespan)`; 0 for an empty timeline."""
        total = self.num_devices * self.makespan_s
        return 1.0 - self.work_s / total if total > 0 else 0.0

    @property
    def moved_bytes(self) -> int:
        """Bytes that crossed a link between a device and the host or another device."""
        return sum(task.moves_bytes for task in self.tasks)

    def of_device(self, device: int, stream: str = COMPUTE) -> list[int]:
        """Indices of one stream's tasks in the order they ran, without those that take no time."""
        mine = [
            i
            for i, task in enumerate(self.tasks)
            if task.device == device and task.stream == stream and task.duration_s > 0
        ]
        return sorted(mine, key=lambda i: self.start_s[i])

    def step_ends_s(self) -> list[float]:
        """When the last compute task of each training step ended."""
        ends = [0.0] * (1 + max(task.step for task in self.tasks))
        for task, end in zip(self.tasks, self.end_s, strict=True):
            if task.stream == COMPUTE and task.device != HOST:
                ends[task.step] = max(ends[task.step], end)
        return ends

    def peak_bytes(self) -> tuple[int, ...]:
        """Highest sum of held and scratch bytes, per device."""
        changes: dict[int, list[tuple[float, int]]] = defaultdict(list)
        for task, start, end in zip(self.tasks, self.start_s, self.end_s, strict=True):
            changes[task.device].append((start, task.holds_bytes + task.scratch_bytes))
            changes[task.device].append((end, -task.scratch_bytes - task.frees_bytes))
        return tuple(_highest_sum(changes[device]) for device in range(self.num_devices))


def _highest_sum(changes: list[tuple[float, int]]) -> int:
    """Peak of a running sum over time; at one moment, releases count before acquisitions."""
    highest = current = 0
    for _, change in sorted(changes):
        current += change
        highest = max(highest, current)
    return highest
