"""Hostile input: many cases, asked one after the other in one limited child. Each must be one message in plain text.

The child prints every file opened for writing, every folder made, every rename and removal outside the folder that the
command may write, every class that a pickle looks up, and every program that is started.
"""

import json
import os
import pickle
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from tests.support.scenarios import trains, warm_up
from tests.support.small_run import SmallRuns
from torchround.commands import export_hf

__all__ = ["warm_up"]  # called before the first child

MEMORY_BYTES = 500 << 20  # on top of what the process has mapped when a case begins
CPU_S = 10
WAIT_S = 300  # for what waits instead of computing, also on a loaded machine
COMPARED_BYTES = 1 << 24  # larger files are holes
TOUCHED = "TOUCHED"
TITLE = "\x1b]0;pwned\x07"  # a terminal would change its title
ESCAPED = r"\\x1b\]0;pwned"  # as a message shows it
DEEP = b'{"a":' * 100_000

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "os.chmod", "os.chown"),
    *("os.truncate", "shutil.rmtree", "shutil.copyfile", "shutil.move"),
}
_NAMES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "shutil.rmtree"}  # follow no link
_RUNS = {"pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect"}


class Bomb:
    def __reduce__(self):
        return os.system, ("touch pwned",)


BOMB = pickle.dumps(Bomb())


@dataclass(frozen=True)
class Case:
    """One hostile input: `harm` puts it into a prepared folder, and the message must match the pattern `says`."""

    harm: Callable[[Path], object]
    says: str
    arguments: tuple[str, ...] = ()
    code: int = 2


def judge(cases, processes, folder, prepare=SmallRuns, writable="outputs"):
    """Ask all cases in one child. `writable` is the folder that the command may write: it tells which command it is."""
    folders = {name: folder / f"case-{number}" for number, name in enumerate(cases)}
    before = {}
    for name, case in cases.items():
        folders[name].mkdir()
        prepare(folders[name])
        case.harm(folders[name])
        before[name] = contents(folders[name], writable)
    requests = [[str(folders[name]), *case.arguments] for name, case in cases.items()]
    printed = processes.run("tests.support.hostile_cases:ask_all", requests, writable, folder=folder).text()
    wrong = {}
    for name, case in cases.items():
        said = Path(f"{folders[name]}.json")
        if not said.exists():
            words = Path(f"{folders[name]}.txt")
            wrong[name] = f"no answer: {words.read_text(errors='replace') if words.exists() else printed[-2000:]}"
            break  # it has ended the child
        problem = judge_words(case, *json.loads(said.read_text()))
        if problem or contents(folders[name], writable) != before[name]:
            wrong[name] = problem or "its folder has changed"
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong.items())
    return folders


def judge_words(case, code, text):
    unwanted = rf"Traceback|{TOUCHED}|KeyError|(?<!template.jinja: )(?<!chat template: )TypeError"
    if re.search(unwanted, text) or code != case.code or not re.search(case.says, text):
        return f"exit code {code} instead of {case.code}, wanted {case.says!r}\n{text}"
    if re.search(r"[\x00-\x08\x0b-\x1f\x7f]", text):
        return f"a terminal would obey {text!r}"
    return ""


def contents(folder, writable):
    found = {}
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if f"{name}/".startswith(f"{writable}/"):
            continue
        if path.is_symlink():
            found[name] = os.readlink(path)
        elif path.is_file():
            size_bytes = path.stat().st_size
            found[name] = path.read_bytes() if size_bytes <= COMPARED_BYTES else f"{size_bytes} bytes"
        else:
            found[name] = "not a file"
    return found


def ask_all(requests, writable):
    """Be the child: answer each request, (folder, arguments), with limits. Words go to `FOLDER.txt`, then the answer."""
    main = trains if writable == "outputs" else export_hf.main
    watched = be_watched()
    for folder, *arguments in requests:
        os.chdir(folder)
        output = os.open(f"{folder}.txt", os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        watched.append(os.path.realpath(writable))
        be_limited()
        try:
            code = main(arguments)
        except BaseException:  # noqa: BLE001  (the test shows it)
            traceback.print_exc()
            code = 1
        sys.stdout.flush()
        sys.stderr.flush()
        watched.clear()
        Path(f"{folder}.json").write_text(json.dumps([code, Path(f"{folder}.txt").read_text(errors="replace")]))
    return 0


def be_limited():
    [mapped_kib] = re.findall(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    for limit, value in (
        (resource.RLIMIT_AS, int(mapped_kib) * 1024 + MEMORY_BYTES),
        (resource.RLIMIT_CPU, int(time.process_time()) + 1 + CPU_S),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))
    signal.alarm(WAIT_S)


def be_watched():
    """Print every change that this process makes outside the folder in the returned list, while there is one."""
    watched = []
    sys.dont_write_bytecode = True  # a module that is first imported here would be written beside its source

    def witness(event, details):
        # The one program that Python's standard library starts.
        is_known = event == "subprocess.Popen" and "/sbin/ldconfig" in details[1]
        if not watched or is_known:
            return
        if event in _RUNS:
            tell(event, details)
        elif event in _CHANGES or (event == "open" and isinstance(details[2], int) and details[2] & _WRITES):
            if not isinstance(details[0], (str, bytes, os.PathLike)):
                return
            path = _meant(event, os.fsdecode(details[0]))
            by_descriptor = event in ("os.remove", "os.rmdir") and details[-1] not in (-1, None)
            if not (path + "/").startswith(watched[0] + "/") and path != os.devnull and not by_descriptor:
                tell(event, details)

    def tell(event, details):
        os.write(2, f"{TOUCHED}: {event} {details!r}\n".encode(errors="replace"))

    sys.addaudithook(witness)
    return watched


def _meant(event, path):
    """Return the path that an operation on names changes: a link itself, not the file that it leads to."""
    folder, name = os.path.split(os.path.abspath(path))
    return os.path.join(os.path.realpath(folder), name) if event in _NAMES else os.path.realpath(path)


def forge_header(content, change, length=None):
    """Return a tensor file with another header: what `change(entries)` returns, or the entries that it has changed."""
    end = 8 + int.from_bytes(content[:8], "little")
    entries = json.loads(content[8:end])
    changed = change(entries)
    text = changed if isinstance(changed, bytes) else json.dumps(entries).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + content[end:]


def first(**changes):
    return lambda entries: next(entry for name, entry in entries.items() if name != "__metadata__").update(changes)


def renamed_to(name):
    def rename(entries):
        old = next(name for name in entries if name != "__metadata__")
        return json.dumps({name if key == old else key: entry for key, entry in entries.items()}).encode()

    return rename


# Forged checkpoints, with checksums that fit.
def forge_manifest(path, change):
    content = json.loads((path / "manifest.json").read_text())
    del content["xxh3_128"]
    change(content)
    content["xxh3_128"] = xxhash.xxh3_128_hexdigest(json.dumps(content).encode())
    (path / "manifest.json").write_text(json.dumps(content, indent=1))


def forge_file(path, content):
    path.write_bytes(content)
    record = {"size_bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}
    forge_manifest(path.parent, lambda manifest: manifest["files"].update({path.name: record}))
