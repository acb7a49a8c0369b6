"""Compressed JSONL, parquet and datasets, against the same records in plain JSONL; archives that are damaged."""

import gzip
import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import Document
from torchround.data.formats import sources as sources_module
from torchround.data.formats.sources import Source
from torchround.data.formats.streams import open_source
from torchround.data.shuffling import EpochKey

Write = Callable[[Path, list[dict[str, Any]]], SourceTable]


def as_lines(records: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def write_gzip(folder: Path, records: list[dict[str, Any]]) -> SourceTable:
    (folder / "x.jsonl.gz").write_bytes(gzip.compress(as_lines(records)))
    return SourceTable(path=str(folder / "x.jsonl.gz"))


def write_zstd(folder: Path, records: list[dict[str, Any]]) -> SourceTable:
    """Write two frames, as tools that compress in parallel do."""
    half = len(records) // 2
    frames = [zstandard.compress(as_lines(part)) for part in (records[:half], records[half:])]
    (folder / "x.jsonl.zst").write_bytes(b"".join(frames))
    return SourceTable(path=str(folder / "x.jsonl.zst"))


def write_parquet(folder: Path, records: list[dict[str, Any]]) -> SourceTable:
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, folder / "x.parquet", row_group_size=7)
    return SourceTable(path=str(folder / "x.parquet"))


def write_dataset(folder: Path, records: list[dict[str, Any]]) -> SourceTable:
    """Write a folder of files, which is streamed as a dataset of the hub is."""
    (folder / "set").mkdir()
    for number in (0, 1):
        (folder / "set" / f"train-{number}.jsonl").write_bytes(as_lines(records[number::2]))
    return SourceTable(path=str(folder / "set"), format="dataset")


def write_saved_dataset(folder: Path, records: list[dict[str, Any]]) -> SourceTable:
    saved = datasets.DatasetDict({"held": datasets.Dataset.from_list(records)})
    saved.save_to_disk(str(folder / "saved"))
    return SourceTable(path=str(folder / "saved"), format="dataset", split="held")


WRITERS = [write_gzip, write_zstd, write_parquet, write_dataset, write_saved_dataset]
EACH_WRITER = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
RECORDS = [{"text": f"record {number}", "number": number} for number in range(40)]


def walk(source: Source, key: EpochKey | None = None) -> list[tuple[str, list[int], Document]]:
    """Return each document of a pass: its text, its cursor, and the document itself."""
    found = []
    cursor = source.first_cursor()
    while (here := source.locate(cursor, key)) is not None:
        text, rest = source.read(here[0], 0)
        assert isinstance(text, str) and rest is None
        found.append((text, cursor, here[0]))
        cursor = here[1]
    return found


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make blocks so small that 40 records have several."""
    monkeypatch.setattr(sources_module, "BLOCK_RECORDS", 6)


@EACH_WRITER
def test_every_record_is_read_once_in_each_pass_and_shuffled_by_key(tmp_path: Path, write: Write) -> None:
    source = open_source(write(tmp_path, RECORDS))
    expected = sorted(record["text"] for record in RECORDS)
    listed = [text for text, _, _ in walk(source)]
    passes = [[text for text, _, _ in walk(source, EpochKey(key))] for key in ("0/0/0", "0/0/1", "0/0/0")]
    assert all(sorted(texts) == expected for texts in [listed, *passes])
    assert passes[0] == passes[2]
    assert len({tuple(texts) for texts in [listed, *passes]}) == 3


@EACH_WRITER
@settings(max_examples=6, deadline=None)
@given(
    count=st.integers(2, 40),
    stop=st.integers(0, 39),
    key=st.sampled_from([None, EpochKey("7/0/0"), EpochKey("7/0/3", "7/0/0")]),
)
def test_a_fresh_process_continues_from_any_cursor(
    tmp_path_factory: pytest.TempPathFactory, write: Write, count: int, stop: int, key: EpochKey | None
) -> None:
    table = write(tmp_path_factory.mktemp("resume"), RECORDS[:count])
    whole = walk(open_source(table), key)
    resumed, cursor = open_source(table), whole[stop % count][1]
    rest = []
    while (found := resumed.locate(cursor, key)) is not None:
        rest.append(resumed.read(found[0], 0)[0])
        cursor = found[1]
    assert rest == [text for text, _, _ in whole[stop % count :]]


@EACH_WRITER
def test_a_record_without_its_field_is_named_by_file_and_number(tmp_path: Path, write: Write) -> None:
    table = write(tmp_path, RECORDS).model_copy(update={"field": "body"})
    with pytest.raises(DataError, match=r"(line|row) 1: no field 'body'; fields: number, text"):
        walk(open_source(table))


@pytest.mark.parametrize("write", [write_gzip, write_zstd, write_parquet, write_saved_dataset])
def test_documents_are_counted_without_being_read_into_memory(tmp_path: Path, write: Write) -> None:
    assert open_source(write(tmp_path, RECORDS)).count() == 40


def test_the_size_of_a_streamed_dataset_is_not_guessed(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r'streamed, so its number of .* not known; data.weight_by = "size"'):
        open_source(write_dataset(tmp_path, RECORDS)).count()


@pytest.mark.parametrize("write", [write_gzip, write_zstd])
@pytest.mark.parametrize("kept", [0.3, 0.98])
def test_a_truncated_archive_gives_the_records_before_the_cut_and_then_names_file_and_line(
    tmp_path: Path, write: Write, kept: float
) -> None:
    records = [{"text": f"{number} {number**9}"} for number in range(3000)]
    path = Path(write(tmp_path, records).path)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * kept)])
    source = open_source(SourceTable(path=str(path)))
    cursor, texts = source.first_cursor(), []
    with pytest.raises(DataError) as caught:
        while (found := source.locate(cursor, None)) is not None:
            texts.append(source.read(found[0], 0)[0])
            cursor = found[1]
    assert texts == [record["text"] for record in records[: len(texts)]]
    assert len(texts) < 3000
    assert f"{path}, line {len(texts) + 1}: " in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("x.jsonl.gz", "x.jsonl.gz, line 1: the archive is damaged or cut off: Not a gzipped file"),
        ("x.jsonl.zst", "x.jsonl.zst, line 1: the archive is damaged or cut off: "),
        ("x.parquet", "x.parquet: not a readable parquet file: "),
    ],
)
def test_a_file_that_is_no_archive_at_all_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).write_text("plain text\n")
    with pytest.raises(DataError, match=message):
        walk(open_source(SourceTable(path=str(tmp_path / name))))


def test_a_damaged_row_group_is_named_by_its_first_row(tmp_path: Path) -> None:
    records = [{"text": f"{number} " * 50} for number in range(40)]
    path = Path(write_parquet(tmp_path, records).path)
    data = bytearray(path.read_bytes())
    data[4:60] = b"\xff" * 56  # the first pages, behind the magic number
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"x.parquet, row \d+: the parquet file is damaged"):
        walk(open_source(SourceTable(path=str(path))))


@pytest.mark.parametrize("name", ["ArrowCapacityError", "ArrowSerializationError", "ArrowInvalid"])
def test_every_error_of_pyarrow_names_the_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Some of its errors are not subclasses of any error of Python."""
    path = Path(write_parquet(tmp_path, [{"text": "a"}]).path)

    def fail(*_: object, **__: object) -> None:
        raise getattr(pyarrow.lib, name)("too much")

    source = open_source(SourceTable(path=str(path)))
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(DataError, match="x.parquet, row 1: the parquet file is damaged: too much"):
        walk(source)


def test_one_of_several_subsets_of_a_dataset_is_read_by_its_name(tmp_path: Path) -> None:
    """The head of README.md names the files of each subset, as on the hub."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines([{"text": f"{name} {n}"} for n in range(5)]))
    files = "\n".join(f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("first", "second"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n")
    source = open_source(SourceTable(path=str(tmp_path), format="dataset", subset="second"))
    assert [text for text, _, _ in walk(source)] == [f"second {n}" for n in range(5)]
    with pytest.raises(
        DataError, match=r"dataset '.*', split 'train': .*'first', 'second'.* \(source keys: split, subset\)$"
    ):
        open_source(SourceTable(path=str(tmp_path), format="dataset"))


def read_and_wrong(source: Source) -> tuple[list[str], list[str]]:
    """Return the texts of the readable documents, and the messages of the others."""
    cursor, read, wrong = source.first_cursor(), [], []
    while (found := source.locate(cursor, None)) is not None:
        try:
            read.append(source.read(found[0], 0)[0])
        except DataError as error:
            wrong.append(str(error))
        cursor = found[1]
    return read, wrong


def test_each_row_that_is_not_utf8_is_named_and_costs_no_other_row(tmp_path: Path) -> None:
    """The rows hold bytes that are written as strings unchecked; 2500 rows come in three parts."""
    texts = [b"row %d" % number for number in range(2500)]
    texts[30], texts[1500] = b"a\xff", b"\xfe"
    raw = pyarrow.array(texts, pyarrow.binary()).buffers()
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), len(texts), raw)})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", row_group_size=2000)
    source = open_source(SourceTable(path=str(tmp_path / "x.parquet")))
    read, wrong = read_and_wrong(source)
    assert [text.encode() for text in read] == [text for text in texts if text.startswith(b"row")]
    assert [message.partition("x.parquet, ")[2] for message in wrong] == [
        "row 31: not valid UTF-8 (byte 0xff: invalid start byte)",
        "row 1501: not valid UTF-8 (byte 0xfe: invalid start byte)",
    ]


@pytest.mark.parametrize("bad", [[0], [5, 6, 1500], [1023, 1024, 2499]])
def test_a_row_of_a_saved_dataset_that_cannot_be_read_is_named_and_costs_no_other(
    tmp_path: Path, bad: list[int]
) -> None:
    """The rows hold dates of years that Python cannot represent; 2500 rows come in three parts."""
    days = [2**30 if number in bad else number for number in range(2500)]
    texts = [f"row {number}" for number in range(2500)]
    table = pyarrow.table({"text": texts, "day": pyarrow.array(days, pyarrow.date32())})
    datasets.Dataset(table).save_to_disk(str(tmp_path / "saved"))
    source = open_source(SourceTable(path=str(tmp_path / "saved"), format="dataset"))
    read, wrong = read_and_wrong(source)
    assert read == [text for number, text in enumerate(texts) if number not in bad]
    assert [message.partition("saved, ")[2].partition(": Overflow")[0] for message in wrong] == [
        f"row {number + 1}: cannot be read" for number in bad
    ]


def test_a_large_row_group_is_read_part_by_part(tmp_path: Path) -> None:
    """Compare with pyarrow's own count of memory, for one row group of 8 MiB that does not compress."""
    generator = random.Random(0)
    rows = [{"text": generator.randbytes(256).hex()} for _ in range(16384)]
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    del table
    source = open_source(SourceTable(path=str(tmp_path / "x.parquet")))
    before, most, cursor = pyarrow.total_allocated_bytes(), 0, source.first_cursor()
    while (found := source.locate(cursor, None)) is not None:
        most, cursor = max(most, pyarrow.total_allocated_bytes() - before), found[1]
    assert (tmp_path / "x.parquet").stat().st_size > 8 * 2**20
    assert 0 < most < 5 * 2**20


def test_one_glob_may_mix_plain_compressed_and_columnar_files(tmp_path: Path) -> None:
    write_gzip(tmp_path, RECORDS[:10])
    write_parquet(tmp_path, RECORDS[10:20])
    (tmp_path / "y.jsonl").write_bytes(as_lines(RECORDS[20:30]))
    (tmp_path / "z.txt").write_text("record 30")
    source = open_source(SourceTable(path=str(tmp_path / "*")))
    assert sorted(text for text, _, _ in walk(source, EpochKey("k"))) == sorted(f"record {n}" for n in range(31))
    assert source.count() == 31


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"path": "{folder}/no", "format": "dataset"}, "dataset '.*/no', split 'train': "),
        ({"path": "{folder}/set", "format": "dataset", "split": "test"}, r"split 'test': ValueError: "),
        ({"path": "{folder}/a.txt", "content": "messages"}, "a.txt is a file of text, which cannot hold 'messages'"),
        ({"path": "{folder}/b.json", "content": "alpaca"}, "none of its 1 files holds a record"),
    ],
)
def test_a_contradictory_source_is_named_when_it_is_opened(tmp_path: Path, table: dict[str, Any], message: str) -> None:
    write_dataset(tmp_path, RECORDS)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.json").write_text("[]")
    path = table["path"].format(folder=tmp_path)
    with pytest.raises(DataError, match=message):
        open_source(SourceTable(**{**table, "path": path}))


@pytest.mark.parametrize(
    ("package", "write", "installed_as"),
    [("zstandard", write_zstd, "zstandard"), ("pyarrow.parquet", write_parquet, "pyarrow")],
)
def test_a_package_that_is_not_installed_is_asked_for_by_its_name_on_the_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, write: Write, installed_as: str
) -> None:
    table = write(tmp_path, RECORDS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"pip install {installed_as} "):
        walk(open_source(table))
