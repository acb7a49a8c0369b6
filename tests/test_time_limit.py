"""The time limit per test: a test that hangs fails with the stacks of all threads, and the tests after it still run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HANGING = """
import threading

def wait_for_ever():
    threading.Event().wait()

def test_hangs():
    threading.Thread(target=wait_for_ever, name="a hung worker").start()
    wait_for_ever()

def test_after_it():
    pass
"""


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_hanging_test_ends_with_all_stacks_and_hangs_nothing(tmp_path: Path, processes: str) -> None:
    file = tmp_path / "test_hanging.py"
    file.write_text(HANGING)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            *settings,
            "-n",
            processes,
            "-o",
            "faulthandler_timeout=2",
            str(file),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode != 0
    # The stacks of both threads: the main one in the test, the other one in the function that it was started with.
    assert "Timeout" in done.stderr and "most recent call first" in done.stderr
    assert done.stderr.count("in wait_for_ever") == 2 and "in test_hangs" in done.stderr
    # Without further processes nothing can run the next test; with one, a new process takes it.
    if processes == "1":
        assert "test_hangs" in done.stdout and "1 failed, 1 passed" in done.stdout
