"""The package as a front door: what importing it loads, and how its commands begin and end, in processes."""

import os
import runpy
import subprocess
import sys
from importlib import import_module

import pytest

import torchround
from tests.support.processes import ROOT, run_program
from torchround import commands

ENTRIES = ["train.py", *(f"scripts/{name}.py" for name in commands.COMMANDS if name != "train")]


def test_each_name_that_the_package_offers_can_be_imported():
    assert len(torchround._MODULES) > 5 and all(hasattr(torchround, name) for name in torchround._MODULES)
    with pytest.raises(AttributeError, match="Trainer"):
        _ = torchround.Trainer


def test_importing_the_package_imports_neither_torch_nor_anything_else_of_it():
    code = (
        "import sys, torchround\n"
        "loaded = [name for name in sys.modules if name.split('.')[0] in ('torch', 'pydantic')]\n"
        "loaded += [name for name in sys.modules if name.startswith('torchround.')]\n"
        "assert not loaded, loaded\n"
        "sys.modules['torch'] = None\n"
        "print(torchround.Partition((1, 1), 1, (1, 1)).num_layers, torchround.make_plan.__name__)\n"
    )
    assert run_program("-c", code).stdout == "3 make_plan\n"


# What forked processes do.
def warm_up():
    """Import all commands, so that no child has to."""
    for module, _ in commands.COMMANDS.values():
        import_module(f".{module}", commands.__name__)


def starts(entry, *arguments):
    sys.argv = [entry, *arguments]
    sys.path.insert(0, str((ROOT / entry).parent))
    try:
        runpy.run_path(str(ROOT / entry), run_name="__main__")
    except SystemExit as end:
        return end.code


def is_left_early(words):
    """Write to a pipe whose reader is gone, as in `--help | head`."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.argv = ["torchround", *words]
    try:
        if words == ["benchmarks"]:
            del sys.argv[1:]
            runpy.run_module("benchmarks", run_name="__main__")
        commands.main()
    except SystemExit as end:
        return end.code


def test_each_command_has_an_entry_point_in_the_clone(processes, tmp_path):
    for entry in ENTRIES:
        child = processes.run("tests.commands.test_front_door:starts", entry, "--help", folder=tmp_path)
        assert child.wait() == 0 and "usage: " in child.text(), child.text()


@pytest.mark.parametrize("words", [[], ["plan", "--help"], pytest.param(["benchmarks"], marks=pytest.mark.nightly)])
def test_a_reader_that_leaves_early_ends_a_command_without_a_traceback(processes, tmp_path, words):
    child = processes.run("tests.commands.test_front_door:is_left_early", words, folder=tmp_path)
    assert child.wait() in (0, 141) and child.text() == "", (words, child.text())


@pytest.mark.parametrize(("redirection", "code", "said"), [(">/dev/full", 1, "cannot be written"), (">&-", 0, "")])
def test_output_that_cannot_be_written_is_one_message_and_output_that_was_closed_is_none(redirection, code, said):
    program = "from torchround.commands import run_command; run_command(lambda arguments: print('figures') or 0)"
    # Buffered, as Python is unless a variable says otherwise.
    command = ["env", "-u", "PYTHONUNBUFFERED", "sh", "-c", f'exec "$0" -c "$1" {redirection}', sys.executable, program]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert done.returncode == code and done.stderr.count("\n") == bool(said) and said in done.stderr


def test_the_dispatcher_lists_its_commands_and_refuses_others():
    program = "from torchround.commands import main; main()"
    listed, unknown = run_program("-c", program).stdout, run_program("-c", program, "trian", code=2)
    assert all(name in listed for name in commands.COMMANDS)
    assert "trian" in unknown.stderr and "try_model" in unknown.stderr and unknown.stdout == ""


def test_a_pipe_that_breaks_inside_a_command_is_not_taken_for_a_reader_that_leaves():
    def breaks(arguments):
        raise BrokenPipeError("a worker's pipe")

    with pytest.raises(BrokenPipeError, match="a worker's pipe"):
        commands.run_command(breaks)


@pytest.mark.parametrize("code", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_a_command_ends_with_its_code_although_a_thread_is_left_inside_a_library(code):
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
    said = "figures\n" + "written by a thread\n" * (code == 0) + "handlers have run\n"
    assert run_program("-c", start, code=code).stdout == said
