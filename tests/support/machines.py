"""Several machines on this one: as threads of a test, or as real processes, with real gloo over the loopback.

Run as a program, this file is the process that forks machines for `MachineStarter`.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import TCPStore

from torchround.machines.errors import MachineError
from torchround.machines.group import MachineGroup

ROOT = Path(__file__).parents[2]
LOOPBACK = "127.0.0.1"
JOIN_S = 120.0  # far beyond what any test of threads takes
Result = TypeVar("Result")


def run_machines(num_machines: int, function: Callable[[MachineGroup], Result], **group_settings: Any) -> list[Result]:
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


class MachineProcess:
    """One machine as a process. What it prints is in `output`."""

    def __init__(self, starter: "MachineStarter", rank: int, pid: int, output: Path) -> None:
        self.rank, self.pid, self.output = rank, pid, output
        self._starter = starter
        self._returncode: int | None = None

    def send(self, number: int) -> None:
        """Send a signal. The process id stays taken until `wait` has returned."""
        assert self._returncode is None, "the process has ended"
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end; return the exit code, or minus the number of the signal that killed it."""
        if self._returncode is None:
            self._returncode = int(self._starter.ask({"wait": self.pid}))
        return self._returncode

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until_printed(self, text: str) -> None:
        """Wait until the process has printed the text. Fails if it does not within `JOIN_S`."""
        end_s = time.monotonic() + JOIN_S
        while text not in self.text():
            assert time.monotonic() < end_s, f"machine {self.rank} never printed {text!r}: {self.text()}"
            time.sleep(0.01)


class MachineStarter:
    """A process that has imported torch, and forks the machines of each request."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._stores: list[TCPStore] = []
        self._running: list[MachineProcess] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(
        self, num_machines: int, function: str, *arguments: Any, first_holds_store: bool = False, folder: Path
    ) -> list[MachineProcess]:
        """Start a process for each machine, which calls `function` ("module:name") in `folder` and exits with its result.

        Each has the environment that torchrun gives. The store is in this process, as torchrun's agents keep it, unless
        machine 0 is to hold it.
        """
        self._number += 1
        if first_holds_store:
            with socket.socket() as probe:
                probe.bind((LOOPBACK, 0))
                port = probe.getsockname()[1]
        else:
            self._stores.append(TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False))
            port = self._stores[-1].port
        machines = []
        for rank in range(num_machines):
            output = self._folder / f"machine-{self._number}-{rank}.txt"
            output.touch()
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(num_machines),
                "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1",
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                "TORCHELASTIC_USE_AGENT_STORE": str(not first_holds_store),
            }
            request = {
                "function": function,
                "arguments": arguments,
                "environment": environment,
                "folder": str(folder),
                "output": str(output),
            }
            machines.append(MachineProcess(self, rank, int(self.ask(request)), output))
        self._running += machines
        return machines

    def ask(self, request: dict[str, Any]) -> str:
        assert self._process.stdin is not None, "the starter has a pipe to it"
        assert self._process.stdout is not None, "the starter has a pipe from it"
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline().strip()
        assert answer, "the starter has ended"
        return answer

    def close(self) -> None:
        """Kill what still runs, and end."""
        for machine in self._running:
            if machine._returncode is None:
                machine.send(signal.SIGKILL)
                machine.wait()
        assert self._process.stdin is not None, "the starter has a pipe to it"
        self._process.stdin.close()
        self._process.wait()


def run_processes(num_machines: int, function: str, *arguments: Any, folder: Path) -> list[MachineProcess]:
    """Run `function` ("module:name") on processes of their own, to the end of all. See `MachineStarter.start`."""
    starter = MachineStarter(folder)
    try:
        machines = starter.start(num_machines, function, *arguments, folder=folder)
        for machine in machines:
            machine.wait()
    finally:
        starter.close()
    return machines


def group_of_environment(**group_settings: Any) -> MachineGroup:
    """Join the group that the environment of `MachineStarter` names. Machine r is called `node<r>`."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_master = rank == 0 and os.environ["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    port = int(os.environ["MASTER_PORT"])
    store = TCPStore(LOOPBACK, port, is_master=is_master, wait_for_workers=False)
    settings = {"host": f"node{rank}", "address": LOOPBACK, "timeout_s": 20.0, **group_settings}
    return MachineGroup(store, rank, size, **settings)


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            answers.write(f"{_wait_for(request['wait'])}\n")
            continue
        # Imported here, so that the machines of the next requests do not import it again.
        module, _, name = request["function"].partition(":")
        function = getattr(import_module(module), name)
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
        child = os.fork()
        if child == 0:
            _become(request, function)
        answers.write(f"{child}\n")


def _wait_for(pid: int) -> int:
    end_s = time.monotonic() + JOIN_S
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > end_s:
            return 98  # it hangs: no test expects this code
        time.sleep(0.005)


def _become(request: dict[str, Any], function: Callable[..., int | None]) -> None:
    """Be the machine of a request in this forked process. Never returns."""
    code = 99
    try:
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        code = function(*request["arguments"]) or 0
    except BaseException:  # noqa: BLE001  (a machine must end here after any error)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
