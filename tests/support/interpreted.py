"""Runs checks of Triton kernels in Triton's interpreter, in a process of its own.

The interpreter is chosen when Triton is imported, and the other tests of a session must not meet it. A file of checks
defines functions named `check_...`; `main(globals())` runs all of them and lists those that fail.
"""

import importlib.util
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping
from typing import Any

import pytest

from tests.support.source_files import ROOT


def run_checks(module: str) -> None:
    """Run a file of checks, named as a module, and fail with its output if a check fails. Skip without Triton."""
    if importlib.util.find_spec("triton") is None:
        pytest.skip("the package triton is not installed (it is for Linux)")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    ran = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " checks passed" in ran.stdout, "the file has run its checks"


def main(names: Mapping[str, Any]) -> None:
    """Run each check in the order in which the file defines them."""
    checks = [value for name, value in names.items() if name.startswith("check_")]
    failed = 0
    for check in checks:
        try:
            check()
        except Exception:  # noqa: BLE001  (each failure is printed, and the others still run)
            failed += 1
            print(f"{check.__name__} failed:\n{traceback.format_exc()}")
    assert checks, "a file of checks has at least one"
    if failed:
        sys.exit(1)
    print(f"{len(checks)} checks passed")
