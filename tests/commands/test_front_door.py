"""What a user starts and what a program imports: the commands, their entry points, and the names of `torchround`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchround
from torchround import commands

ROOT = Path(__file__).parents[2]
ENTRIES = ["train.py", *(f"scripts/{name}.py" for name in commands.COMMANDS if name != "train")]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_every_name_that_the_package_offers_is_known_to_editors_and_can_be_imported() -> None:
    tree = ast.parse(Path(torchround.__file__).read_text())
    declared = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchround.")
        for alias in node.names
    }
    assert declared == torchround._MODULES
    assert set(declared) <= set(dir(torchround))
    for name, module in declared.items():
        assert getattr(torchround, name) is getattr(sys.modules[module], name)
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = torchround.Trainer


def test_importing_the_package_imports_neither_torch_nor_anything_else_of_it() -> None:
    code = (
        "import sys, torchround\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('torch', 'pydantic')]\n"
        "loaded += [name for name in sys.modules if name.startswith('torchround.')]\n"
        "assert not loaded, loaded\n"
        "sys.modules['torch'] = None\n"
        "print(torchround.Partition((1, 1), 1, (1, 1)).num_layers, torchround.make_plan.__name__)\n"
    )
    done = python("-c", code)
    assert done.stdout == "3 make_plan\n", done.stderr


def test_each_command_has_a_thin_entry_point_in_the_clone() -> None:
    for entry in ENTRIES:
        lines = (ROOT / entry).read_text().splitlines()
        assert len(lines) < 15 and "    run_command(main)" in lines, entry
    found = {path.stem for path in (ROOT / "scripts").glob("*.py")}
    assert set(commands.COMMANDS) - {"train"} <= found


@pytest.mark.parametrize("words", [[], *([name] for name in commands.COMMANDS)], ids=str)
def test_a_reader_that_leaves_early_ends_a_command_without_a_traceback(words: list[str]) -> None:
    """`--help | head`: the pipe's reader is gone before the command writes."""
    code = (
        "import os, sys\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        f"sys.argv = ['torchround', *{words!r}, '--help']\n"
        "from torchround.commands import main\n"
        "main()\n"
    )
    done = python("-c", code)
    assert done.stderr == "" and done.returncode in (0, 141), done.stderr


def test_a_reader_that_leaves_the_list_of_benchmarks_early_gets_no_traceback() -> None:
    code = (
        "import os, runpy\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader)\n"
        "os.dup2(writer, 1)\n"
        "runpy.run_module('benchmarks', run_name='__main__')\n"
    )
    done = python("-c", code)
    assert done.stderr == "" and done.returncode in (0, 141), done.stderr


def test_output_that_cannot_be_written_is_one_message_and_output_that_was_closed_is_none() -> None:
    code = (
        "import os, sys\n"
        "from torchround.commands import run_command\n"
        "run_command(lambda arguments: print('figures') or 0)\n"
    )
    for redirection, expected, said in (
        (">/dev/full", 1, "standard output cannot be written: [Errno 28] No space left on device\n"),
        (">&-", 0, ""),
    ):
        done = subprocess.run(
            # Buffered, as Python is unless a variable says otherwise.
            ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, code],
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            check=False,
        )
        assert (done.returncode, done.stderr) == (expected, said)


def test_the_dispatcher_lists_its_commands_and_refuses_others() -> None:
    start = "import sys; from torchround.commands import main; sys.argv[0] = 'torchround'; main()"
    listed, unknown, plan = python("-c", start), python("-c", start, "trian"), python("-c", start, "plan")
    assert listed.returncode == 0 and all(name in listed.stdout for name in commands.COMMANDS)
    assert unknown.returncode == 2 and "no command trian" in unknown.stderr and unknown.stdout == ""
    assert "try_model" in unknown.stderr
    assert plan.returncode == 2 and plan.stderr.startswith("usage: torchround plan")


def test_a_pipe_that_breaks_inside_a_command_is_not_taken_for_a_reader_that_leaves() -> None:
    def breaks(arguments: list[str]) -> int:
        raise BrokenPipeError("a worker's pipe")

    with pytest.raises(BrokenPipeError, match="a worker's pipe"):
        commands.run_command(breaks)


@pytest.mark.parametrize("code", [0, 1])
def test_a_command_ends_with_its_code_although_a_thread_is_left_inside_a_library(code: int) -> None:
    """Python's own end wakes the thread while modules are cleared, and its C++ frames abort the process."""
    start = (
        "import atexit, sys, threading, time\n"
        "from contextlib import suppress\n"
        "from datetime import timedelta\n"
        "from torch.distributed import TCPStore\n"
        "from torchround.commands import run_command\n"
        "store = TCPStore('localhost', 0, 1, True)\n"
        "def left():\n"
        "    while True:\n"
        "        with suppress(RuntimeError):\n"
        "            store.wait(['never'], timedelta(milliseconds=20))\n"
        "class Slow:\n"
        "    def __del__(self, sleep=time.sleep):\n"
        "        sleep(0.5)\n"
        "slow = Slow()\n"
        "atexit.register(print, 'handlers have run')\n"
        "threading.Thread(target=left, daemon=True).start()\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('written by a thread'))).start()\n"
        f"run_command(lambda arguments: print('figures') or {code})\n"
    )
    done = python("-c", start)
    said = "figures\n" + "written by a thread\n" * (code == 0) + "handlers have run\n"
    assert (done.returncode, done.stdout) == (code, said)
