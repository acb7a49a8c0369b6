"""A machine, or all, die at any moment of a joint save: the others stop, and one whole checkpoint is there for all."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import joint_kills

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("shared", [True, False], ids=["shared folder", "own disks"])
def test_a_death_before_any_exchange_of_a_joint_save_leaves_one_whole_checkpoint_for_all(tmp_path, shared):
    assert joint_kills.kill_everywhere(tmp_path, shared) >= 24


@pytest.mark.nightly
@pytest.mark.parametrize("folders", ["shared", "own"])
def test_a_death_before_any_operation_of_the_file_system_leaves_one_whole_checkpoint_for_all(tmp_path, folders):
    result = subprocess.run(
        [sys.executable, joint_kills.__file__, str(tmp_path), folders],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) >= 80
