"""Several machines on this one: as threads of a test, or as real processes, with real gloo over the loopback."""

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from torch.distributed import TCPStore

from torchround.machines.errors import MachineError
from torchround.machines.group import MachineGroup

LOOPBACK = "127.0.0.1"
JOIN_S = 120.0  # far beyond what any test of threads takes
Result = TypeVar("Result")


def run_machines(
    num_machines: int, function: Callable[[MachineGroup], Result], **group_settings: Any
) -> list[Result]:
    """Run `function(group)` on a thread for each machine; return the results by rank.

    Machine r is called `node<r>`. The groups are closed once the function has returned on all. If it raises on one
    machine, that machine fails as a run does, which wakes the others. The error of the first cause is raised here:
    one that is no `MachineError`, if there is one.
    """
    master = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        group = None
        try:
            store = TCPStore(LOOPBACK, master.port, is_master=False)
            settings = {"host": f"node{rank}", "address": LOOPBACK, "timeout_s": 20.0, **group_settings}
            group = MachineGroup(store, rank, num_machines, **settings)
            results[rank] = function(group)
            group.close()
        except BaseException as error:  # noqa: BLE001  (it is raised on the main thread)
            errors.append(error)
            if group is not None:
                group.fail(f"{type(error).__name__}: {error}")
                group.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"node{rank}", daemon=True)
        for rank in range(num_machines)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(JOIN_S)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if errors:
        raise next((error for error in errors if not isinstance(error, MachineError)), errors[0])
    assert not stuck, f"{', '.join(stuck)} did not end within {JOIN_S:g} s"
    return [results[rank] for rank in range(num_machines)]
