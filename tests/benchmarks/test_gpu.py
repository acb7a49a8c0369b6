"""The command for a machine with a GPU, on a machine without one and with the packages alone that its page names."""

import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.toml import EXTRAS, PROJECT

ROOT = Path(__file__).parents[2]
HIDE = """
from importlib.machinery import PathFinder

find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name in {hidden} else find(name, *rest))
"""
SMALL = [
    *("--devices", "cpu", "--flavor", "debug", "--seq-len", "32", "--micro-batch-size", "1"),
    *("--micro-batches", "2", "--steps", "1", "--device-memory-gib", "0.02", "--copy-mib", "1"),
]


@pytest.fixture
def bare(tmp_path):
    """Return an environment that hides the packages which docs/gpu_results.md does not name."""
    known = {re.split(r"[^\w-]", line)[0] for line in itertools.chain(PROJECT["dependencies"], *EXTRAS.values())}
    page = (ROOT / "docs" / "gpu_results.md").read_text()
    named = page.split("must be installed:")[1].split(".\n")[0]
    kept = {name for name in known if f"`{name}`" in named}
    assert {"torch", "xxhash"} <= kept
    hidden = known - kept - {"jinja2"}  # which PyTorch brings
    (tmp_path / "sitecustomize.py").write_text(HIDE.format(hidden=hidden))
    return {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@pytest.mark.nightly
def test_the_accelerators_tests_are_found_on_a_bare_machine(bare):
    command = ["-m", "pytest", "--collect-only", "-q", "-m", "accelerator", "tests/accelerator"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    assert "left out: test_generation.py, which needs transformers" in done.stdout
    assert "test_gpu_benchmark.py::" in done.stdout and "test_training.py::" in done.stdout


@pytest.mark.documented
def test_the_command_ends_with_the_table_where_there_is_no_gpu_too(tmp_path, bare):
    """The command must not take tests on the simulated accelerator for tests that passed on a GPU."""
    environment = {
        **bare,
        "PYTHON": sys.executable,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "BENCH_ARGUMENTS": " ".join([*SMALL, "--updates sync --workers 1"]),
    }
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), str(tmp_path / "figures.json")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and "no GPU" in done.stderr, done.stderr[-2000:]
    assert "plain, all on device" in done.stdout.splitlines()[-1]
    report = json.loads((tmp_path / "figures.json").read_text())
    assert report["machine"]["torch"] == torch.__version__ and "tests" not in report
