"""Hostile input for runs, and the judgement of each run's reaction.

Each case runs `train.py`'s main function in a process of its own, or an export in one process for all, with limits on
memory and time. The process prints every file opened for writing, every folder made, every rename and removal outside `outputs/`, every class that a pickle
looks up, and every program that is started.
"""

import os
import re
import resource
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.support.fork_server import ForkServer
from torchround.untrusted import template_process

MEMORY_BYTES = 500 << 20  # on top of what the process has mapped before
CPU_S = 10
HANG_S = 300  # of the clock; a loaded machine may need a minute for what computes 4 s
COMPARED_BYTES = 1 << 24  # larger files are holes
TOUCHED = "TOUCHED"

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.chown"),
    *("os.truncate", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_NAMES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}  # follow no link
_RUNS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"}


@dataclass(frozen=True)
class Case:
    """One hostile input. `prepare` puts it into a folder with `small.toml`; the message must match the pattern `says`."""

    prepare: Callable[[Path], object]
    says: str
    overrides: tuple[str, ...] = ()
    code: int = 2


def judge(case: Case, fork_server: ForkServer, folder: Path) -> None:
    """Run the case. Require a message in plain text, the exit code, and an untouched folder."""
    case.prepare(folder)
    before = contents(folder)
    child = fork_server.run("meets_harm", list(case.overrides), folder=folder)
    judge_words(case, child.wait(), child.text())
    assert contents(folder) == before, child.text()


def judge_words(case: Case, code: int, text: str) -> None:
    """Require the exit code, and a message in plain text."""
    assert not re.search(rf"Traceback|{TOUCHED}|KeyError|(?<!template.jinja: )(?<!chat template: )TypeError", text), (
        text
    )
    assert code == case.code, f"exit code {code}\n{text}"
    assert re.search(case.says, text), text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text), f"a terminal would obey {text!r}"


def contents(folder: Path) -> dict[str, bytes | str]:
    """Return every file and link below a folder, except `outputs/`, which a run may write."""
    found: dict[str, bytes | str] = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if name.startswith("outputs/"):
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            size_bytes = path.stat().st_size
            found[name] = path.read_bytes() if size_bytes <= COMPARED_BYTES else f"{size_bytes} bytes"
        else:
            found[name] = "not a file"
    found.pop("outputs", None)
    return found


def be_limited() -> None:
    """Limit the child process to the memory and time that harmless runs need."""
    [mapped_kib] = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    most_bytes = int(mapped_kib) * 1024 + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(HANG_S)  # for what waits instead of computing


def be_watched(writable: Path) -> None:
    """Print every change that this child process makes outside `writable`."""
    allowed = os.path.realpath(writable)

    def witness(event: str, details: tuple[object, ...]) -> None:
        if event == "subprocess.Popen" and template_process.__file__ in str(details[1]):
            return  # the one program of this repository that runs may start
        if event in _RUNS:
            tell(event, details)
        elif event in _CHANGES or (event == "open" and isinstance(details[2], int) and details[2] & _WRITES):
            if not isinstance(details[0], (str, bytes, os.PathLike)):
                return
            path = _meant(event, os.fsdecode(details[0]))
            by_descriptor = event in ("os.remove", "os.rmdir") and details[-1] not in (-1, None)
            if not (path + "/").startswith(allowed + "/") and path != os.devnull and not by_descriptor:
                tell(event, details)

    def tell(event: str, details: tuple[object, ...]) -> None:
        os.write(2, f"{TOUCHED}: {event} {details!r}\n".encode(errors="replace"))

    sys.addaudithook(witness)


def _meant(event: str, path: str) -> str:
    """Return the path that an operation on names changes: a link itself, not the file that it leads to."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name) if event in _NAMES else os.path.realpath(path)
