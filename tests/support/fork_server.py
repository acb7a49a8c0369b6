"""Real processes that train, without the seconds that each Python takes to import torch.

A fork server imports everything once, trains a little so that all of it is warm, and then forks a child for each
scenario. Children are real processes: they can be killed, have their own signals and limits, and leave their files
behind. Run as a program, this file is the fork server. It reads one request per line, and answers with the child's
process id and, when the child has ended, its status.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class Child:
    """A scenario in progress or ended. Its output is in the file `output`."""

    def __init__(self, fork_server: "ForkServer", pid: int, output: Path) -> None:
        self.pid = pid
        self.output = output
        self._fork_server = fork_server
        self._returncode: int | None = None

    def send(self, number: int) -> None:
        """Send a signal unless the child has ended. The system does not reuse its process id before the next child."""
        if _is_running(self.pid):
            os.kill(self.pid, number)

    def wait(self) -> int:
        """Wait for the end. Returns the exit code, or minus the number of the signal that killed the child."""
        if self._returncode is None:
            self._returncode = int(self._fork_server.answer())
        return self._returncode

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_until(self, condition: Callable[[str], bool]) -> None:
        """Wait until the printed text satisfies the condition, or the child has ended."""
        while not condition(self.text()) and _is_running(self.pid):
            time.sleep(0.002)


class ForkServer:
    """The process that forks children to run functions of `tests/support/scenarios.py`, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._number = 0
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(folder / "fork_server.txt").open("w"),
            text=True,
            bufsize=1,
        )
        ready = self.answer()
        assert ready == "ready", ready

    def start(self, scenario: str, *arguments: Any, folder: Path) -> Child:
        """Fork a child that runs `scenarios.<scenario>(*arguments)` in `folder`."""
        self._number += 1
        output = self._folder / f"child-{self._number}.txt"
        output.touch()
        request = {"scenario": scenario, "arguments": arguments, "folder": str(folder), "output": str(output)}
        assert self._process.stdin is not None, "the fork server has a pipe to it"
        self._process.stdin.write(json.dumps(request) + "\n")
        return Child(self, int(self.answer()), output)

    def run(self, scenario: str, *arguments: Any, folder: Path) -> Child:
        """Run a scenario to its end."""
        child = self.start(scenario, *arguments, folder=folder)
        child.wait()
        return child

    def answer(self) -> str:
        assert self._process.stdout is not None, "the fork server has a pipe from it"
        line = self._process.stdout.readline()
        assert line, f"the fork server has ended: {(self._folder / 'fork_server.txt').read_text()}"
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None, "the fork server has a pipe to it"
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def fork_server_in(folder: Path) -> Iterator[ForkServer]:
    fork_server = ForkServer(folder)
    try:
        yield fork_server
    finally:
        fork_server.close()


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _serve() -> None:
    from tests.support import scenarios

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    scenarios.warm_up()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
    answers.write("ready\n")
    child = 0
    for line in sys.stdin:
        if child:
            os.waitpid(child, 0)
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            _become(request, scenarios)
        answers.write(f"{child}\n")
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert ended is not None, "waitid without WNOHANG waits"
        code = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        answers.write(f"{code}\n")


def _become(request: dict[str, Any], scenarios: Any) -> None:
    """Run the request in the child process. Never returns."""
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.chdir(request["folder"])
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        code = getattr(scenarios, request["scenario"])(*request["arguments"])
    except BaseException:  # noqa: BLE001  (a child must end here after any error)
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
