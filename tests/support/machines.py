"""Several machines on this one: as threads of a test, or as real processes, with real gloo over the loopback."""

import os
import socket
import threading

from torch.distributed import TCPStore

from torchround.machines.group import Machine, MachineError, MachineGroup

LOOPBACK = "127.0.0.1"
SETTINGS = {"address": LOOPBACK, "timeout_s": 20.0}
JOIN_S = 600.0  # compiling the layers of two machines took 150 s on a loaded one


def run_machines(num_machines, function, **group_settings):
    """Run `function(group)` on a thread for each machine; return the results by rank.

    Machine r is called `node<r>`. A setting may be a function of the rank. The groups are closed once the function has
    returned on all. If it raises on one machine, that machine fails as a run does, which wakes the others. The error of
    the first cause is raised here: one that is no `MachineError`, if there is one.
    """
    master = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
    results = {}
    errors = []

    def run(rank):
        group = None
        try:
            store = TCPStore(LOOPBACK, master.port, is_master=False)
            own = {key: value(rank) if callable(value) else value for key, value in group_settings.items()}
            group = MachineGroup(store, rank, named(num_machines), **{**SETTINGS, **own})
            results[rank] = function(group)
            group.close()
        except BaseException as error:  # noqa: BLE001  (it is raised on the main thread)
            errors.append(error)
            if group is not None:
                group.fail(f"{type(error).__name__}: {error}")
                group.close()

    threads = [
        threading.Thread(target=run, args=(rank,), name=f"node{rank}", daemon=True) for rank in range(num_machines)
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


def start_machines(processes, num_machines, function, *arguments, first_holds_store=False, folder):
    """Start a process for each machine, which calls `function` ("module:name") in `folder` and exits with its result.

    Each has the environment that torchrun gives. The store is in this process, as torchrun's agents keep it, unless
    machine 0 is to hold it.
    """
    if first_holds_store:
        with socket.socket() as probe:
            probe.bind((LOOPBACK, 0))
            port = probe.getsockname()[1]
    else:
        _STORES.append(TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False))
        port = _STORES[-1].port
    machines = []
    for rank in range(num_machines):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_machines),
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": str(not first_holds_store),
        }
        machines.append(processes.start(function, *arguments, folder=folder, environment=environment))
        machines[-1].rank = rank
    return machines


_STORES = []  # open until this process ends


def group_of_environment(store_host=LOOPBACK, **group_settings):
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(store_host, port, is_master=is_master, wait_for_workers=False)
    return MachineGroup(store, rank, named(size), **{**SETTINGS, **group_settings})


def named(num_machines):
    return [Machine(rank, f"node{rank}") for rank in range(num_machines)]


def on_threads(calls):
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
