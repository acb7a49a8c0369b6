"""Hand-overs are typed, wake only the threads that wait for them, and are forgotten by kind and age."""

import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from torchround.engine import ordering
from torchround.engine.board import Board, HandOver
from torchround.engine.errors import Stopped

ROOT = Path(__file__).parents[2]
COUNT, NAME, DONE = HandOver[int]("count {0}"), HandOver[str]("name {1} of {0}"), HandOver[None]("end")

MISTAKES = """
from torchround.engine import ordering
from torchround.engine.board import Board, HandOver

COUNT, DONE = HandOver[int]("count {0}"), HandOver[None]("end")
board = Board()
board.post(COUNT(0), 1)
board.signal(DONE(0))
number: int = board.wait(COUNT(0))
board.post(COUNT(0), "one")  # mistake
board.signal(COUNT(0))  # mistake
text: str = board.wait(COUNT(0))  # mistake
"""


def test_a_value_of_another_type_is_found_by_mypy(tmp_path):
    """Mypy skips what the board imports, torch above all, which would take a minute."""
    snippet = tmp_path / "snippet.py"
    snippet.write_text(MISTAKES)
    board = ROOT / "torchround" / "engine" / "board.py"
    mypy = [sys.executable, "-m", "mypy", "--follow-imports=skip", "--allow-any-generics", "--no-error-summary"]
    found = subprocess.run(
        [*mypy, f"--cache-dir={tmp_path / 'cache'}", str(snippet), str(board)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    lines = [int(line.split(":")[1]) for line in found.splitlines() if "snippet.py" in line and "error" in line]
    assert lines == [n for n, line in enumerate(MISTAKES.split("\n"), 1) if "# mistake" in line], found


def test_the_table_of_kinds_lists_each_one_with_the_module_that_defines_it():
    listed = set(re.findall(r"^\| `([A-Z_]+)` \| (?:`([\w/]+)\.py`|here)", ordering.__doc__, re.MULTILINE))
    folder = ROOT / "torchround" / "engine"
    defined = {
        (name, "" if path.stem == "ordering" else path.relative_to(folder).with_suffix("").as_posix())
        for path in folder.rglob("*.py")
        for name in re.findall(r"^([A-Z_]+) = HandOver\[", path.read_text(), re.MULTILINE)
    }
    assert listed == defined and len(defined) == 39


def test_a_waiting_thread_gets_the_value_and_others_sleep_on():
    board, got = Board(), []
    threads = {
        key: threading.Thread(target=lambda key=key: got.append(board.wait(key)), name=str(key))
        for key in (COUNT(1), NAME(1, 2))
    }
    for thread in threads.values():
        thread.start()
    while len(board.waiting()) < 2:
        time.sleep(0.001)
    board.post(NAME(1, 2), "second")
    threads[NAME(1, 2)].join(60)
    assert got == ["second"] and board.waiting() == {"count 1": "waits for count 1"}
    board.post(COUNT(1), 7)
    threads[COUNT(1)].join(60)
    assert got == ["second", 7] and board.waiting() == {}


def test_only_older_hand_overs_of_the_same_kind_are_retired():
    board = Board()
    for epoch in range(3):
        board.post(COUNT(epoch), epoch)
        board.post(NAME(epoch, 0), "name")
    board.retire(COUNT, below=2)
    assert len(board) == 4
    assert [board.ready(COUNT(epoch)) for epoch in range(3)] == [False, False, True]
    board.forget(COUNT(2))
    assert len(board) == 3 and all(board.ready(NAME(epoch, 0)) for epoch in range(3))


def test_after_a_stop_posted_values_can_be_had_and_every_other_wait_ends():
    board = Board()
    board.post(COUNT(0), 5)
    board.stop()
    assert board.wait(COUNT(0)) == 5
    with pytest.raises(Stopped):
        board.wait(DONE(0))
    with pytest.raises(Stopped):
        board.raise_if_stopped()
