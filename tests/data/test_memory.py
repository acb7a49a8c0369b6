"""Memory while many documents are read, in a process of its own; the same at full size by `benchmarks/data.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.data import write_records

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "data.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_memory_does_not_grow_with_the_documents_that_are_read(tmp_path: Path, name: str) -> None:
    """From 24 000 documents (three blocks of a stream) on to 60 000: keeping each shows as 7 MiB or more."""
    documents = 60_000
    write_records(tmp_path / name, documents)
    command = [sys.executable, str(SCRIPT), "--read", str(tmp_path / name), "--documents", str(documents)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    mib = json.loads(done.stdout)["mib_by_tenth"]
    assert len(mib) >= 10
    assert max(mib[4:]) - mib[4] < 4
