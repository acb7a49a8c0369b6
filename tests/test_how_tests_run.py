"""How tests run: a test that hangs fails with all stacks and hangs no other, and property tests draw what is asked for."""

import os
import re
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
DRAWING = """
from hypothesis import given, strategies as st

@given(st.integers(0, 10**9))
def test_drawing(number):
    print("drawn", number)

def test_without_drawing():
    pass
"""


def run_tests(folder, text, *options):
    """Run tests of this text with the project's settings and nothing of the caller's, such as its report's file."""
    file = folder / "test_it.py"
    file.write_text(text)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), "-p", "no:cacheprovider"]
    caller = {"PYTEST_ADDOPTS", "CI"}
    return subprocess.run(
        [sys.executable, "-m", "pytest", *settings, *options, str(file)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name not in caller},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.parametrize("processes", ["0", "1"])
def test_a_hanging_test_ends_with_all_stacks_and_hangs_nothing(tmp_path, monkeypatch, processes):
    report = tmp_path / "of_the_caller.xml"
    monkeypatch.setenv("PYTEST_ADDOPTS", f"--junitxml={report}")
    done = run_tests(tmp_path, HANGING, "-n", processes, "-o", "faulthandler_timeout=2")
    assert done.returncode != 0 and not report.exists()
    # The stacks of both threads: the main one in the test, the other one in the function that it was started with.
    assert "Timeout" in done.stderr and "most recent call first" in done.stderr
    assert done.stderr.count("in wait_for_ever") == 2 and "in test_hangs" in done.stderr
    # Without further processes nothing can run the next test; with one, a new process takes it.
    if processes == "1":
        assert "test_hangs" in done.stdout and "1 failed, 1 passed" in done.stdout


def test_property_tests_draw_the_same_examples_unless_random_ones_are_asked_for(tmp_path):
    def drawn(*options):
        loaded = ("-p", "tests.conftest", "-p", "no:xdist", "-s", "-m", "hypothesis")
        done = run_tests(tmp_path, DRAWING, "-o", f"pythonpath={ROOT}", *loaded, *options)
        assert done.returncode == 0 and "1 passed, 1 deselected" in done.stdout, done.stdout
        return re.findall(r"drawn (\d+)", done.stdout)

    usual, random = drawn(), ("--hypothesis-profile=random", "--hypothesis-seed=1")
    assert len(usual) == 100 and drawn() == usual
    assert len(set(drawn(*random)) & set(usual)) < 50
