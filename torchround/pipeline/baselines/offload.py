"""Offload and reload of activations on one stream per device, in slots of their own (PipeOffload section 4.2).

The slots are planned on a grid in which each forward, backward and weight gradient takes one unit. The
simulator then runs the transfers in that order with their real durations.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import NamedTuple

from torchround.pipeline.baselines.device_bound import (
    BACKWARD,
    FORWARD,
    Action,
    BoundStage,
    ScheduleError,
    SimulationSetup,
)
from torchround.pipeline.timeline import Task, TaskKind

OFFLOAD, RELOAD = TaskKind.OFFLOAD, TaskKind.RELOAD

# A grid unit is a third of a chunk's forward and backward; the round trip of its activations is k of these.
UNITS_PER_CHUNK = 3


class Planned(NamedTuple):
    """An action with its start on the grid; for a transfer the start of its slot, and the stage whose activations move."""

    start: float
    action: Action


@dataclass(frozen=True)
class OffloadPlan:
    """The offloaded stages, and the time of one way: per stage in seconds, and as a slot in grid units."""

    num_offloaded: int
    one_way_s: tuple[float, ...]
    slot: float

    @staticmethod
    def of(setup: SimulationSetup, stages: Sequence[BoundStage], offloaded_chunks: int) -> "OffloadPlan":
        """Plan to offload the first `offloaded_chunks` of each device. Raises `ScheduleError` if k is too large for it."""
        num_offloaded = offloaded_chunks * setup.num_devices
        one_way_s = tuple(_one_way_s(setup, stage) for stage in stages)
        compute_s = sum(map(_compute_s, stages[:num_offloaded]))
        ratio = 2 * sum(one_way_s[:num_offloaded]) / compute_s if compute_s > 0 else 0.0
        chunks = len(stages) // setup.num_devices
        if ratio * offloaded_chunks > chunks:
            raise ScheduleError(
                f"moving a chunk's activations to the host and back takes {ratio:.2f} x its compute (k): with "
                f"{offloaded_chunks} of {chunks} chunks offloaded the stream cannot keep up"
            )
        return OffloadPlan(num_offloaded, one_way_s, max(ratio * UNITS_PER_CHUNK / 2, 1e-3))

    def add_transfers(self, tasks: list[Task], first: int, planned: Sequence[Planned]) -> None:
        """Add one device's transfers to `tasks`; `tasks[first:]` are its own tasks, in the order of `planned`.

        A reload starts after the task before its slot, and a forward after the offload before it. Otherwise a
        device could run ahead of the plan and fill its memory.
        """
        index_of = {item.action: first + position for position, item in enumerate(planned)}
        starts = [item.start for item in planned]
        offloads: list[tuple[float, int]] = []  # (end of the slot, task)
        for transfer in self.transfers(planned):
            forward = replace(transfer.action, kind=FORWARD)
            own = index_of[forward]
            if transfer.action.kind is OFFLOAD:
                offloads.append((transfer.start + self.slot, len(tasks)))
                after = own
            else:
                after = first + bisect_right(starts, transfer.start - 1) - 1
                _wait(tasks, index_of[replace(forward, kind=BACKWARD)], len(tasks))
            tasks.append(self._task(transfer.action, tasks[own], after))
        # Forwards wait for the offloads whose slots end before them, so that memory stays as planned.
        for item in planned:
            ended = bisect_right(offloads, (item.start, len(tasks)))
            if self._is_offloaded(item.action, FORWARD) and ended:
                _wait(tasks, index_of[item.action], offloads[ended - 1][1])

    def transfers(self, planned: Sequence[Planned]) -> list[Planned]:
        """Assign slots, which are for an offload and for a reload in turn; return the transfers in order of time.

        Forwards from left to right take the first free offload slot after them, backwards from right to left
        the last free reload slot before them. If the reload would come first, the activations stay on the
        device.
        """
        pair = 2 * self.slot
        offload_slot: dict[Action, int] = {}
        free = 0
        for item in planned:
            if self._is_offloaded(item.action, FORWARD):
                free = max(free, ceil((item.start + 1) / pair))
                offload_slot[item.action] = free
                free += 1
        transfers = []
        last = floor(planned[-1].start / pair)
        for item in reversed(planned):
            if self._is_offloaded(item.action, BACKWARD):
                last = min(last, floor(item.start / pair)) - 1
                forward = replace(item.action, kind=FORWARD)
                # Equal numbers are legal: in each pair of slots the offload comes before the reload.
                if last >= offload_slot[forward]:
                    offload, reload = replace(forward, kind=OFFLOAD), replace(forward, kind=RELOAD)
                    transfers.append(Planned(offload_slot[forward] * pair, offload))
                    transfers.append(Planned(last * pair + self.slot, reload))
        return sorted(transfers, key=lambda transfer: transfer.start)

    def _is_offloaded(self, action: Action, kind: TaskKind) -> bool:
        return action.kind is kind and action.stage < self.num_offloaded

    def _task(self, transfer: Action, forward: Task, after: int) -> Task:
        held_bytes = forward.holds_bytes
        return Task(
            device=forward.device,
            kind=transfer.kind,
            duration_s=self.one_way_s[transfer.stage],
            layers=forward.layers,
            micro_batch=forward.micro_batch,
            after=((after, 0.0),),
            stream="offload",
            holds_bytes=held_bytes if transfer.kind is RELOAD else 0,
            frees_bytes=held_bytes if transfer.kind is OFFLOAD else 0,
            moves_bytes=held_bytes,
        )


def _compute_s(stage: BoundStage) -> float:
    return stage.forward_s + stage.recompute_s + stage.backward_s


def _one_way_s(setup: SimulationSetup, stage: BoundStage) -> float:
    """Compute the seconds to move one micro-batch's kept activations of a stage to the host, or back."""
    if setup.pcie_bytes_per_s:
        return stage.held_bytes / setup.pcie_bytes_per_s
    return setup.offload_ratio * _compute_s(stage) / 2


def _wait(tasks: list[Task], index: int, before: int) -> None:
    tasks[index] = replace(tasks[index], after=(*tasks[index].after, (before, 0.0)))
