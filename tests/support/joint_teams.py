"""Machines that save and load together, as threads with a barrier in place of a network, and deaths on demand."""

import json
import threading

from torchround.checkpoint import MachineTeam

LIMIT_S = 120.0  # of a hang


class Killed(BaseException):
    """The death of a machine, which nothing catches."""


def together(num_machines, work, before_exchange=lambda rank: None):
    """Return what `work(team)` returns on each machine. Machine r is called `machine r`.

    `before_exchange(rank)` may raise `Killed`. The others then fail in their next exchange, as they do once a real
    machine is lost, and the result of a machine that did not finish is None. Any other error is raised here.
    """
    barrier = threading.Barrier(num_machines, timeout=LIMIT_S)
    values, errors, results = {}, [], [None] * num_machines
    names = [f"machine {number}" for number in range(num_machines)]

    def team_of(rank):
        def gather(value, what):
            before_exchange(rank)
            values[rank] = json.dumps(value)
            barrier.wait()
            found = [json.loads(values[other]) for other in range(num_machines)]
            barrier.wait()
            return found

        return MachineTeam(rank, names, gather)

    def run(rank):
        try:
            results[rank] = work(team_of(rank))
        except BaseException as error:  # noqa: BLE001  (raised on the main thread)
            if not isinstance(error, Killed | threading.BrokenBarrierError):
                errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=str(rank)) for rank in range(num_machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def run_agreeing(num_machines, function):
    return together(num_machines, lambda team: function(team.rank, lambda value: team.gather(value, "a value")))
