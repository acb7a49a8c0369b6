"""The memory figure of reading weights, scaled down to a model of 33 M parameters."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "import_memory.py"


def test_reading_weights_takes_no_second_copy_of_the_model():
    command = [sys.executable, str(SCRIPT), "--parameters", "30e6"]
    figures = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert figures["peak_over_store"] < 1.15
    # Pieces of 8 MiB and what a process uses besides; a second copy would be the file's 66 MB.
    assert figures["beyond_store_bytes"] < 32e6 < figures["file_bytes"] / 2
