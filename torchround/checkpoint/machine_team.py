"""The machines that save and load one checkpoint together.

A save or load is a few steps that all machines take alike. After each, the machines exchange how it went, so that all
of them continue or all of them fail. One machine is a team of one, which exchanges nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchround.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    ForeignCheckpointError,
    NoCheckpointError,
    NoSpaceError,
)
from torchround.machines.group import MachineGroup

_KINDS = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        NoSpaceError,
        DamagedCheckpointError,
        ForeignCheckpointError,
        NoCheckpointError,
    )
}


def _gather_alone(value: Any, what: str) -> list[Any]:
    return [value]


@dataclass(frozen=True)
class MachineTeam:
    """The machines of a run as a checkpoint sees them.

    `gather(value, what)` returns every machine's JSON value in the order of their ranks, and blocks until all have
    come; `what` is for messages. With `shares_folder` all machines work in one folder, and machine 0 makes, publishes
    and deletes checkpoints in it. Otherwise each has a folder on its own disk, with its own tensor files beside the
    state and the manifest of the whole checkpoint.
    """

    rank: int = 0
    names: Sequence[str] = ("this machine",)
    shares_folder: bool = True
    gather: Callable[[Any, str], list[Any]] = _gather_alone

    @classmethod
    def of(cls, group: MachineGroup | None, shares_folder: bool = True) -> "MachineTeam":
        """Return the team of a run's machines; a team of one for None. One thread at a time may use it."""
        if group is None:
            return cls(shares_folder=shares_folder)
        return cls(group.rank, tuple(map(str, group.machines)), shares_folder, group.channel("saves").gather)

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    @property
    def is_part(self) -> bool:
        """Whether each machine's folder holds a part of each checkpoint."""
        return not (self.shares_folder or self.is_alone)

    @property
    def keeps_folder(self) -> bool:
        """Whether this machine makes, publishes and deletes the checkpoints of its folder."""
        return self.rank == 0 or not self.shares_folder

    def together(
        self,
        work: Callable[[], Any],
        what: str,
        failed: Callable[[type[CheckpointError], str], CheckpointError],
    ) -> list[Any]:
        """Do `work` on all machines, and return the JSON value that it returned on each.

        If it raises a `CheckpointError` on any machine, all raise `failed(type, reason)` of the first one.
        """
        value, failure, cause = None, None, None
        try:
            value = work()
        except CheckpointError as error:
            cause, failure = error, [type(error).__name__, error.reason]
        outcomes = self.gather([value, failure], what)
        for name, (_, found) in zip(self.names, outcomes, strict=True):
            if found is not None:
                kind, reason = found
                raise failed(_KINDS[kind], reason if self.is_alone else f"{name}: {reason}") from cause
        return [value for value, _ in outcomes]
