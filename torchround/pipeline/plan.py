"""The plan of a run: which layers each stage holds, in how many rounds, and what that is predicted to cost.

A plan is data. It prints as a table, goes to JSON and back, and can be given in the config instead of being
made. `make_plan` chooses the plan with the shortest simulated step that fits in memory.
"""

import json
from dataclasses import dataclass
from typing import Any

from torchround.pipeline.costs import Costs
from torchround.pipeline.memory import GIB, MemoryLimits, device_memory
from torchround.pipeline.partition import Partition
from torchround.pipeline.stage_times import stage_times
from torchround.pipeline.step_time import busy_seconds, step_seconds

UPDATES = ("sync", "async")


class InfeasiblePlanError(ValueError):
    """No partition fits. The message names the layer, the missing GiB and the keys that help."""


@dataclass(frozen=True)
class Plan:
    """A partition with its rounds and its predicted figures.

    `step_s`: seconds per step in the steady state. `bubble`: idle share of the devices, 1 - busy / (N x
    step_s), where busy counts all that this plan executes, recomputation included. `lower_bound_s`: no plan
    within the same limits is faster. `device_bytes`: what each device allocates.
    """

    partition: Partition
    rounds: int
    num_devices: int
    num_micro_batches: int
    update: str
    step_s: float
    bubble: float
    lower_bound_s: float
    device_bytes: int

    def to_json(self) -> str:
        data = {
            "forward": list(self.partition.forward),
            "fused": self.partition.fused,
            "backward": list(self.partition.backward),
            "rounds": self.rounds,
            "num_devices": self.num_devices,
            "num_micro_batches": self.num_micro_batches,
            "update": self.update,
            "step_s": self.step_s,
            "bubble": self.bubble,
            "lower_bound_s": self.lower_bound_s,
            "device_bytes": self.device_bytes,
        }
        return json.dumps(data, indent=2)

    @staticmethod
    def from_json(text: str) -> "Plan":
        """The reverse of `to_json`; raises `PartitionError` or `ValueError` with what is wrong."""
        data: dict[str, Any] = json.loads(text)
        partition = Partition.from_lists(data.pop("forward"), data.pop("fused"), data.pop("backward"))
        return Plan(partition=partition, **data)


def evaluate_plan(
    partition: Partition,
    rounds: int,
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = "sync",
    limits: MemoryLimits | None = None,
) -> Plan:
    """A given partition as a plan: what it costs. Raises `InfeasiblePlanError` when it does not fit."""
    limits = limits or MemoryLimits()
    times = stage_times(partition, costs, limits.recompute)
    step_s = step_seconds(times, num_devices, num_micro_batches, rounds, update)
    busy_s = busy_seconds(times, num_micro_batches)
    memory = device_memory(partition, costs, -(-num_micro_batches // rounds), limits)
    if limits.device_bytes is not None and memory.total_bytes > limits.device_bytes:
        missing = (memory.total_bytes - limits.device_bytes) / GIB
        raise InfeasiblePlanError(f"{missing:.2f} GiB are missing on each device")
    return Plan(
        partition=partition,
        rounds=rounds,
        num_devices=num_devices,
        num_micro_batches=num_micro_batches,
        update=update,
        step_s=step_s,
        bubble=1 - busy_s / (num_devices * step_s) if step_s else 0.0,
        lower_bound_s=busy_s / num_devices,
        device_bytes=memory.total_bytes,
    )


def make_plan(
    costs: Costs,
    num_devices: int,
    num_micro_batches: int,
    update: str = "sync",
    rounds: int | str = "auto",
    limits: MemoryLimits | None = None,
) -> Plan:
    """The fastest plan within `limits`."""
    limits = limits or MemoryLimits()
    choices = range(1, num_micro_batches + 1) if rounds == "auto" else [int(rounds)]
    best: Plan | None = None
    failure: InfeasiblePlanError | None = None
    for partition in _even_partitions(costs.num_layers):
        for choice in choices:
            try:
                plan = evaluate_plan(partition, choice, costs, num_devices, num_micro_batches, update, limits)
            except InfeasiblePlanError as error:
                failure = error
                continue
            if best is None or plan.step_s < best.step_s:
                best = plan
    if best is None:
        raise failure or InfeasiblePlanError("no plan")
    return best


def _even_partitions(num_layers: int) -> list[Partition]:
    """Fused sizes x forward stage sizes x backward stage sizes, each direction cut evenly."""
    partitions = []
    for fused in range(1, num_layers + 1):
        rest = num_layers - fused
        for forward in _even_cuts(rest):
            for backward in _even_cuts(rest):
                partitions.append(Partition(forward, fused, backward))
    return partitions


def _even_cuts(count: int) -> list[tuple[int, ...]]:
    if count == 0:
        return [()]
    sizes = sorted({min(2**power, count) for power in range(11)})
    return [(size,) * (count // size) + ((count % size,) if count % size else ()) for size in sizes]
