"""The one way to start a process in tests: a function in a forked process, or a fresh Python.

Each Python takes seconds to import torch. So a server imports it once and forks a process for each call of a function.
These are real processes: they can be killed, have their own signals and limits, and leave their files behind. The fixture
`processes` of `tests/conftest.py` is the server that all tests share. `run_program` is for what only a fresh Python shows:
imports, warnings, flags of the interpreter, a launcher.

Run as a program, this file is the server.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 300.0  # far beyond what any process of a test takes, on a loaded machine too


class Child:
    def __init__(self, processes, pid, output, name):
        self.pid, self.output, self.name = pid, output, name
        self.returncode = None
        self._processes = processes

    def send(self, number):
        """Send a signal unless `wait` has returned: the process id stays taken until then."""
        if self.returncode is None:
            os.kill(self.pid, number)

    def wait(self, limit_s=LIMIT_S):
        """Wait for the end. Returns the exit code, or minus the number of the signal that killed the process."""
        if self.returncode is None:
            code = self._processes.ask({"wait": self.pid, "limit_s": limit_s})
            assert code is not None, f"{self.name} did not end within {limit_s:g} s: {self.text()}"
            self.returncode = code
        return self.returncode

    def text(self):
        return self.output.read_text(errors="replace")

    def wait_until(self, condition, limit_s=LIMIT_S):
        end_s = time.monotonic() + limit_s
        while is_running(self.pid) and not condition(self.text()):
            assert time.monotonic() < end_s, f"{self.name} did not come so far: {self.text()}"
            time.sleep(0.002)

    def wait_until_printed(self, text):
        self.wait_until(lambda printed: text in printed)
        assert text in self.text(), f"{self.name} ended without printing {text!r}: {self.text()}"


class Processes:
    """A process that has imported torch and forks a child for each call."""

    def __init__(self, folder):
        self._folder = folder
        self._children = []
        self._errors = folder / "server.txt"
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd=folder,
            env=environment_of(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors.open("w"),
            text=True,
            bufsize=1,
        )

    def start(self, function, *arguments, folder, environment=None):
        """Call "module:name" in `folder`, after its module's `warm_up` in the server. The result is the exit code."""
        output = self._folder / f"child-{len(self._children)}.txt"
        output.touch()
        request = {"function": function, "arguments": arguments, "environment": environment or {}}
        pid = self.ask({**request, "folder": str(folder), "output": str(output)})
        self._children.append(Child(self, pid, output, f"process {pid} of {function}"))
        return self._children[-1]

    def run(self, function, *arguments, folder, environment=None):
        child = self.start(function, *arguments, folder=folder, environment=environment)
        child.wait()
        return child

    def ask(self, request):
        self._process.stdin.write(json.dumps(request) + "\n")
        answer = self._process.stdout.readline()
        assert answer, f"the server has ended: {self._errors.read_text()}"
        return json.loads(answer)

    def close(self):
        for child in self._children:
            if child.returncode is None:
                child.send(signal.SIGKILL)
                child.wait()
        self._process.stdin.close()
        self._process.wait()


def run_program(*arguments, folder=ROOT, code=0, **environment):
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=folder, env=environment_of(**environment), capture_output=True, text=True, check=False
    )
    assert code in (None, done.returncode), f"{command}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def start_program(*arguments, folder=ROOT, **environment):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, cwd=folder, env=environment_of(**environment), text=True, **pipes)


def environment_of(**changes):
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **changes}


def is_running(pid):
    """Return whether a process exists and is no zombie."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def serve():
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answers.write(json.dumps(code_of(**request) if "wait" in request else fork(request)) + "\n")


def fork(request):
    module, _, name = request["function"].partition(":")
    is_new = module not in sys.modules
    imported = import_module(module)
    if is_new and hasattr(imported, "warm_up"):
        imported.warm_up()
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"a process with {len(threads)} threads cannot be forked safely"
    child = os.fork()
    if child == 0:
        become(request, getattr(imported, name))
    return child


def become(request, function):
    code = 99
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        output = os.open(request["output"], os.O_WRONLY | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.chdir(request["folder"])
        os.environ.update(request["environment"])
        code = function(*request["arguments"]) or 0
    except BaseException:  # noqa: BLE001  (a child must end here after any error)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def code_of(wait, limit_s):
    end_s = time.monotonic() + limit_s
    while time.monotonic() < end_s:
        ended, status = os.waitpid(wait, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    return None


if __name__ == "__main__":
    serve()
    os._exit(0)  # Python would take seconds to give everything back
