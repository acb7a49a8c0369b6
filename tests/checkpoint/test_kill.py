"""SIGKILL at any moment of a save: every listed checkpoint is complete, and the newest complete one is never lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests" / "support" / "killed_saves.py"


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("scenario", "at_least_kills"), [("new step", 15), ("same step", 15), ("writes", 8), ("random times", 10)]
)
def test_a_kill_in_a_save_leaves_only_whole_checkpoints_and_loses_none(tmp_path, scenario, at_least_kills):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path / "run"), scenario],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= at_least_kills
