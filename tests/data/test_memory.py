"""Memory while many documents are read, in a process of its own; the same at full size by `python -m benchmarks data-memory`."""

from pathlib import Path

import pytest

from benchmarks.data import memory_while_reading, write_records
from benchmarks.frame import in_fresh_process


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_memory_does_not_grow_with_the_documents_that_are_read(tmp_path: Path, name: str) -> None:
    """Memory is compared from 24 000 documents (three blocks of a stream) to 60 000; keeping each would add 7 MiB or more."""
    documents = 60_000
    write_records(tmp_path / name, documents)
    mib = in_fresh_process(memory_while_reading, str(tmp_path / name), documents, 0)["mib_by_tenth"]
    assert len(mib) >= 10
    assert max(mib[4:]) - mib[4] < 4
