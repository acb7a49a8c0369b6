"""The machines that do a step of a run together: enter its folder, save or load a checkpoint.

After each step the machines exchange how it went, so that all of them continue or all of them fail. One machine is a team
of one, which exchanges nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torchround.machines.group import LaunchError, MachineGroup


@dataclass(frozen=True)
class MachineTeam:
    """The machines of a run as a checkpoint sees them. All work in one folder, where machine 0 makes and deletes checkpoints.

    `gather(value, what)` returns every machine's JSON value in the order of their ranks, and blocks until all have
    come; `what` is for messages.
    """

    rank: int = 0
    names: Sequence[str] = ("this machine",)
    gather: Callable[[Any, str], list[Any]] = lambda value, what: [value]

    @classmethod
    def of(cls, group: MachineGroup | None, channel: str = "saves") -> "MachineTeam":
        """Make the team of a run's machines; a team of one for None. One thread at a time may use it."""
        if group is None:
            return cls()
        return cls(group.rank, tuple(map(str, group.machines)), group.channel(channel).gather)

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def is_alone(self) -> bool:
        return self.size == 1

    def together(
        self,
        work: Callable[[], Any],
        what: str,
        mistakes: tuple[type[Exception], ...],
        failed: Callable[[Any, str], Exception] | None = None,
    ) -> list[Any]:
        """Do `work` on all machines, and return the JSON value that it returned on each. All raise if it raises on any.

        `mistakes` are the errors that are exchanged. All raise `failed(type, reason)` of the first machine's, where the
        type is the first of `mistakes` that fits. Without `failed` one machine raises its own error, and several a
        `LaunchError` with every machine's. `what` names the exchange in messages.
        """
        value, failure, cause = None, None, None
        try:
            value = work()
        except mistakes as error:
            kind = next(index for index, kind in enumerate(mistakes) if isinstance(error, kind))
            reason = getattr(error, "reason", str(error)) if failed else str(error)
            cause, failure = error, [kind, reason]
        outcomes = self.gather([value, failure], what)
        names_by_reason: dict[str, list[str]] = {}
        kinds = []
        for name, (_, found) in zip(self.names, outcomes, strict=True):
            if found is not None:
                kinds.append(mistakes[found[0]])
                names_by_reason.setdefault(found[1], []).append(name)
        if not kinds:
            return [value for value, _ in outcomes]
        if cause is not None and self.is_alone and failed is None:
            raise cause
        # The same mistake everywhere reads as with one machine.
        lines = [
            reason if len(names) == self.size else f"{', '.join(names)}: {reason}"
            for reason, names in names_by_reason.items()
        ]
        raise (failed(kinds[0], lines[0]) if failed else LaunchError("\n".join(lines))) from cause
