"""How tests run: a test that hangs fails with all stacks and hangs no other."""

import pytest

from tests.support.processes import ROOT, run_program

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


@pytest.mark.nightly
def test_a_hanging_test_ends_with_all_stacks_and_hangs_nothing(tmp_path):
    (tmp_path / "test_it.py").write_text(HANGING)
    settings = ["-c", ROOT / "pyproject.toml", "--rootdir", ROOT, "-p", "no:cacheprovider", "-n", "1"]
    limit = ["-o", "faulthandler_timeout=2"]
    done = run_program("-m", "pytest", *settings, *limit, "test_it.py", folder=tmp_path, code=1, PYTEST_ADDOPTS="")
    # The stacks of both threads: the main one in the test, the other one in the function that it was started with.
    assert done.stderr.count("in wait_for_ever") == 2 and "in test_hangs" in done.stderr
    assert "1 failed, 1 passed" in done.stdout  # a new process took the next test
