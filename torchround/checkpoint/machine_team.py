"""The machines that save and load one checkpoint together.

A joint save or load is a few steps that all machines take alike. After each, the machines exchange what came of it, so
that all of them continue or all of them fail, with the same message. A checkpoint of one machine is the case of a team
of one, which exchanges nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchround.machines.group import MachineGroup
from torchround.machines.links import Purpose

Outcome = dict[str, Any]


def _gather_alone(value: Any, what: str) -> list[Any]:
    return [value]


def _nowhere(peer: int, data: Tensor, what: str) -> None:
    raise AssertionError(f"there is no machine {peer} to exchange {what} with")


@dataclass(frozen=True)
class MachineTeam:
    """The machines of a run as a checkpoint sees them: who this one is, and how all exchange what they found.

    `gather(value, what)` returns every machine's JSON value in the order of their ranks, and blocks until all have
    come; `what` is for messages. `send(peer, data, what)` and `receive(peer, into, what)` carry flat uint8 tensors.

    With `shares_folder` all machines work in one folder, and machine 0 makes, publishes and deletes checkpoints in it.
    Otherwise each has a folder on its own disk, with its own tensor files and the manifest of the whole checkpoint.
    """

    rank: int = 0
    names: Sequence[str] = ("this machine",)
    shares_folder: bool = True
    gather: Callable[[Any, str], list[Any]] = _gather_alone
    send: Callable[[int, Tensor, str], None] = _nowhere
    receive: Callable[[int, Tensor, str], None] = _nowhere

    @classmethod
    def of(cls, group: MachineGroup | None, shares_folder: bool = True) -> "MachineTeam":
        """Return the team of a run's machines; a team of one for None.

        One thread at a time may use it, as one at a time saves or loads.
        """
        if group is None:
            return cls(shares_folder=shares_folder)

        def send(peer: int, data: Tensor, what: str) -> None:
            group.link(peer, Purpose.FILES).send(data, what)

        def receive(peer: int, into: Tensor, what: str) -> None:
            group.link(peer, Purpose.FILES).receive(into, what)

        names = tuple(map(str, group.machines))
        return cls(group.rank, names, shares_folder, group.channel("saves").gather, send, receive)

    @property
    def size(self) -> int:
        """Return the number of machines."""
        return len(self.names)

    @property
    def is_alone(self) -> bool:
        """Whether there is no other machine."""
        return self.size == 1

    @property
    def keeps_folder(self) -> bool:
        """Whether this machine makes, publishes and deletes the checkpoints of its folder."""
        return self.rank == 0 or not self.shares_folder

    def says(self, rank: int, reason: str) -> str:
        """Return the reason with the name of its machine in front, if there are several."""
        return reason if self.is_alone else f"{self.names[rank]}: {reason}"

    def any(self, flag: bool, what: str) -> bool:
        """Return whether any machine has the flag, the same answer on all."""
        return any(self.gather(flag, what))
