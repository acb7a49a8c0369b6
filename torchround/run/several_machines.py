"""The machines of a run, as its loop sees them. On one machine an exchange returns its own value.

The machine of rank 0 prints, logs and writes what describes the run. The others are quiet unless they fail.
"""

import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

from torchround.checkpoint import MachineTeam
from torchround.config import Config
from torchround.machines.group import HostShare, LaunchError, MachineError, MachineGroup
from torchround.machines.launch import differences, join
from torchround.observe.record import MachineTimes, StepRecord

T = TypeVar("T")


@contextmanager
def joined_machines(environment: Mapping[str, str], config: Config) -> Iterator["RunMachines"]:
    """Connect to the other machines for the block, which ends in order or by a fault's message. Raises `LaunchError`."""
    machines = RunMachines(join(environment, config))
    group = machines.group
    if group is None:
        yield machines
        return
    try:
        yield machines
        machines.agree("start", None, "the end of the run on all machines")
    except LaunchError:
        group.close()  # all raise it: the last one must have read it before a connection ends
        raise
    except BaseException as error:
        if not isinstance(error, MachineError):  # the others know of that
            # The first line: a message of several lines names its subject there. All of it is on this machine's console.
            group.fail("".join(traceback.format_exception_only(error)).strip().splitlines()[0])
        group.abort()
        raise
    group.close()


class RunMachines:
    """The machines of one run. A run on one machine has no `group`."""

    def __init__(self, group: MachineGroup | None = None) -> None:
        self.group = group
        self._team = team = MachineTeam.of(group, channel="start")
        self.rank, self.size, self.names = team.rank, team.size, team.names

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def agree(self, channel: str, value: Any, what: str) -> list[Any]:
        """Return each machine's `value`, by rank. Blocks until all have given theirs. Raises `MachineError`.

        `what` names the value in messages. `channel` is one of `CHANNELS`; each is for one thread.
        """
        return [value] if self.group is None else self.group.channel(channel).gather(value, what)

    def same_mistakes(self, make: Callable[[], T], mistakes: tuple[type[Exception], ...], what: str) -> T:
        """Call `make` on all machines, and return its value here. If it raises one of `mistakes` on some, all raise.

        One machine raises its own error. Several raise a `LaunchError` with the same text on each, which names the
        machines. `what` names the calls in messages.
        """
        made: list[T] = []
        self._team.together(lambda: made.append(make()), what, mistakes)
        return made[0]

    def require_same(self, identity: Callable[[], Mapping[str, Any]]) -> None:
        """Raise the same `LaunchError` on all machines if `identity` (name to fingerprint) differs. One machine skips it."""
        if self.group is None:
            return
        found = self.agree("start", dict(identity()), "what it has opened")
        if text := differences(self.group.machines, found):
            raise LaunchError(text)

    # What a run is made of.

    @property
    def host_share(self) -> HostShare | None:
        """This process's share of its host, which processes of one host divide; None on one machine."""
        return None if self.group is None else self.group.machines[self.rank].share

    def merged(self, record: StepRecord) -> StepRecord:
        """Put the times of all machines into a record. All machines call this for the same steps."""
        if self.group is None:
            return record
        own = asdict(record.machine_times(self.names[self.rank]))
        times = self.agree("metrics", own, f"the times of all machines up to step {record.step}")
        return replace(record, machines=tuple(MachineTimes(**values) for values in times))
