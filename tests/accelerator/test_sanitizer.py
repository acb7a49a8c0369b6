"""PyTorch's stream sanitizer finds no unordered access to device memory, and finds one that is planted.

It compares start addresses only; `test_race_checker.py` is the exact check, and needs no GPU.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("card")

SCRIPT = Path(__file__).parents[1] / "support" / "sanitized_run.py"


def sanitized(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("update", ["sync", "async"])
def test_no_stream_touches_what_another_one_still_uses(update, workers):
    done = sanitized(update, workers)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_missing_wait_is_found():
    done = sanitized("sync", "1", "planted")
    assert done.returncode == 9 and "race" in done.stderr.lower(), done.stderr[-4000:]
