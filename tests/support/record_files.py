"""Writers of records in each kind of file and dataset that sources are read from."""

import gzip
import json

import datasets
import pyarrow
import pyarrow.parquet
import zstandard

from torchround.config import SourceTable


def as_lines(records):
    lines = (record if isinstance(record, str) else json.dumps(record) for record in records)
    return "".join(line + "\n" for line in lines).encode()


def write_plain(folder, records, name="x"):
    (folder / f"{name}.jsonl").write_bytes(as_lines(records))
    return SourceTable(path=str(folder / f"{name}.jsonl"))


def write_gzip(folder, records, name="x"):
    (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress(as_lines(records)))
    return SourceTable(path=str(folder / f"{name}.jsonl.gz"))


def write_zstd(folder, records, name="x"):
    """Write two frames, as tools that compress in parallel do."""
    half = len(records) // 2
    frames = [zstandard.compress(as_lines(part)) for part in (records[:half], records[half:])]
    (folder / f"{name}.jsonl.zst").write_bytes(b"".join(frames))
    return SourceTable(path=str(folder / f"{name}.jsonl.zst"))


def write_parquet(folder, records, name="x"):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), folder / f"{name}.parquet", row_group_size=7)
    return SourceTable(path=str(folder / f"{name}.parquet"))


def write_dataset(folder, records):
    (folder / "set").mkdir()
    for number in (0, 1):
        (folder / "set" / f"train-{number}.jsonl").write_bytes(as_lines(records[number::2]))
    return SourceTable(path=str(folder / "set"), format="dataset")


def write_saved_dataset(folder, records):
    datasets.DatasetDict({"held": datasets.Dataset.from_list(records)}).save_to_disk(str(folder / "saved"))
    return SourceTable(path=str(folder / "saved"), format="dataset", split="held")
