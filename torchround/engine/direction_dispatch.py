"""The slots of direction jobs among those of stages, and the deal of a step's bundles to the devices."""

from dataclasses import replace
from typing import Any

from torchround.engine.board import Board, HandOverKey
from torchround.engine.direction_jobs import DirectionJob, directed_bundles
from torchround.engine.passes import FIRST_SIZES, STAGE_JOB
from torchround.engine.store.host_store import HostStore
from torchround.engine.update_report import UPDATED
from torchround.planning.partition import StageKind, StageTask, slots_before_late_jobs


class DirectionDispatch:
    """The direction jobs of the newest step, which are handed out once, in stage slots of their own.

    In `sync` they come right after the step's stages, because the next step waits for its update. Otherwise they come
    after the forward stages of the next step, and after at least `num_devices - 1` of its stages
    (`partition.slots_before_late_jobs`): by then the gradients have landed, so few devices wait.
    """

    def __init__(self, store: HostStore, board: Board, num_devices: int) -> None:
        self._bundles = directed_bundles(store)
        self._board = board
        self._num_devices = num_devices
        self._comes_late = store.policy.versions > 1
        self._waiting: int | None = None

    def begin(self, step: int) -> bool:
        """Take the jobs of a step, whose `step()` was called. Returns whether they are to be handed out at once."""
        self._waiting = step if self._bundles else None
        return not self._comes_late

    def make_way(self, tasks: list[StageTask]) -> tuple[list[StageTask], int]:
        """Return a step's tasks with slots left free for the jobs that wait, and the number of tasks before those.

        As many slots as devices, so that each stage keeps its device.
        """
        num_forward = next((i for i, t in enumerate(tasks) if t.stage.kind is not StageKind.FORWARD), 0)
        before = slots_before_late_jobs(num_forward, len(tasks), self._num_devices)
        if self._waiting is None:
            return tasks, before
        later = [replace(task, slot=task.slot + self._num_devices) for task in tasks[before:]]
        return [*tasks[:before], *later], before

    def is_awaited(self, key: HandOverKey[Any]) -> bool:
        """Tell whether `key` is an update that jobs still have to be handed out for."""
        return key.kind is UPDATED and self._waiting is not None and key.number >= self._waiting

    def hand_out(self, first_slot: int) -> tuple[int, ...]:
        """Hand out the jobs that wait, from `first_slot` on. Returns their slots: one for each device, or none.

        The bundles are dealt to the devices in turn, the first one to the device whose turn it is. Devices without a
        bundle get an empty job, because a device takes every `num_devices`-th slot.
        """
        step, self._waiting = self._waiting, None
        if step is None:
            return ()
        slots = tuple(range(first_slot, first_slot + self._num_devices))
        # A machine without a part in the step has a part in its update.
        if not self._board.ready(FIRST_SIZES(0)):
            self._board.post(FIRST_SIZES(0), ())
        for position, slot in enumerate(slots):
            job = DirectionJob(slot, step, tuple(self._bundles[position :: self._num_devices]))
            self._board.post(STAGE_JOB(slot), job)
        return slots
