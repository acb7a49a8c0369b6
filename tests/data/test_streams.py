"""Compressed JSONL, parquet and datasets, against the same records in plain JSONL; archives that are damaged."""

import random
import re
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.batch_contents import reading_limits, texts_of
from tests.support.record_files import (
    as_lines,
    write_dataset,
    write_gzip,
    write_parquet,
    write_saved_dataset,
    write_zstd,
)
from torchround.config import SourceTable
from torchround.data import DataError
from torchround.data.document_types import DataFileError
from torchround.data.formats import sources
from torchround.data.formats.streams import _lines, _shard_rows, open_source
from torchround.data.shuffling import EpochKey

pytestmark = pytest.mark.usefixtures("small_blocks")  # so small that 40 records have several


WRITERS = [write_gzip, write_zstd, write_parquet, write_dataset, write_saved_dataset]
EACH_WRITER = pytest.mark.parametrize("write", WRITERS, ids=lambda write: write.__name__)
RECORDS = [{"text": f"record {number}", "number": number} for number in range(40)]


@EACH_WRITER
def test_every_record_is_read_once_in_each_pass_and_shuffled_by_key(tmp_path, write):
    source = open_source(write(tmp_path, RECORDS))
    listed, *passes = [texts_of(source, key and EpochKey(key)) for key in (None, "0/0/0", "0/0/1", "0/0/0")]
    assert all(sorted(texts) == sorted(record["text"] for record in RECORDS) for texts in [listed, *passes])
    assert passes[0] == passes[2]
    assert len({tuple(texts) for texts in [listed, *passes]}) == 3
    assert source.count() == (None if write is write_dataset else 40)


@EACH_WRITER
def test_a_record_without_its_field_is_named_by_file_and_number(tmp_path, write):
    table = write(tmp_path, RECORDS).model_copy(update={"field": "body"})
    with pytest.raises(DataError, match=r"(line|row) 1: no field 'body'; fields: number, text"):
        texts_of(open_source(table))


@pytest.mark.parametrize(("write", "kept"), [(write_gzip, 0.3), (write_zstd, 0.98), (write_zstd, 0.3)])
def test_a_truncated_archive_gives_the_blocks_before_the_cut_and_then_names_file_and_line(tmp_path, write, kept):
    records = [{"text": f"{number} {number**9}"} for number in range(3000)]
    table = write(tmp_path, records)
    data = (tmp_path / table.path).read_bytes()
    (tmp_path / table.path).write_bytes(data[: int(len(data) * kept)])
    source = open_source(table)
    cursor, texts = source.first_cursor(), []
    with pytest.raises(DataFileError, match=rf"{table.path}, line \d+: cannot be read from here on") as caught:
        while (found := source.locate(cursor, None)) is not None:
            texts.append(source.read(found[0], 0)[0])
            cursor = found[1]
    assert texts == [record["text"] for record in records[: len(texts)]]
    cut_line = int(re.search(r"line (\d+)", str(caught.value))[1])
    assert cut_line - sources.BLOCK_RECORDS <= len(texts) + 1 <= cut_line <= 3000


@pytest.mark.parametrize("name", ["ArrowCapacityError", "ArrowSerializationError", "ArrowInvalid"])
def test_every_error_of_pyarrow_names_the_row(tmp_path, monkeypatch, name):
    """Some of its errors are not subclasses of any error of Python."""

    def fail(*_, **__):
        raise getattr(pyarrow.lib, name)("too much")

    source = open_source(write_parquet(tmp_path, [{"text": "a"}]))
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(DataError, match="x.parquet, row 1: cannot be read from here on: Arrow.*: too much"):
        texts_of(source)


def test_one_of_several_subsets_of_a_dataset_is_read_by_its_name(tmp_path):
    """The head of README.md names the files of each subset, as on the hub."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.jsonl").write_bytes(as_lines([{"text": f"{name} {n}"} for n in range(5)]))
    files = "\n".join(f"- config_name: {name}\n  data_files: {name}.jsonl" for name in ("first", "second"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{files}\n---\n")
    source = open_source(SourceTable(path=str(tmp_path), format="dataset", subset="second"))
    assert texts_of(source) == [f"second {n}" for n in range(5)]
    with pytest.raises(DataError, match=r"'first', 'second'.* \(source keys: split, subset\)$"):
        open_source(SourceTable(path=str(tmp_path), format="dataset"))


def test_a_large_row_group_is_read_part_by_part(tmp_path):
    """Compare with pyarrow's own count of memory, for one row group of 8 MiB that does not compress."""
    generator = random.Random(0)
    table = pyarrow.Table.from_pylist([{"text": generator.randbytes(256).hex()} for _ in range(16384)])
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet", use_dictionary=False, compression="none")
    del table
    source = open_source(SourceTable(path=str(tmp_path / "x.parquet")))
    before, most, cursor = pyarrow.total_allocated_bytes(), 0, source.first_cursor()
    while (found := source.locate(cursor, None)) is not None:
        most, cursor = max(most, pyarrow.total_allocated_bytes() - before), found[1]
    assert (tmp_path / "x.parquet").stat().st_size > 8 * 2**20
    assert 0 < most < 5 * 2**20


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"path": "no", "format": "dataset"}, "dataset '.*/no', split 'train': "),
        ({"path": "set", "format": "dataset", "split": "test"}, "split 'test': ValueError: "),
        ({"path": "a.txt", "content": "messages"}, "a.txt is a file of text, which cannot hold 'messages'"),
        ({"path": "b.json", "content": "alpaca"}, "none of its 1 files holds a record"),
    ],
)
def test_a_contradictory_source_is_named_when_it_is_opened(tmp_path, table, message):
    write_dataset(tmp_path, RECORDS)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b.json").write_text("[]")
    with pytest.raises(DataError, match=message):
        open_source(SourceTable(**{**table, "path": str(tmp_path / table["path"])}))


@pytest.mark.parametrize(
    ("package", "write", "installed_as"),
    [("zstandard", write_zstd, "zstandard"), ("pyarrow.parquet", write_parquet, "pyarrow")],
)
def test_a_package_that_is_not_installed_is_asked_for_by_its_name_on_the_index(
    tmp_path, monkeypatch, package, write, installed_as
):
    table = write(tmp_path, RECORDS)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=f"pip install {installed_as} "):
        texts_of(open_source(table))


@settings(max_examples=80, deadline=None)
@given(data=st.binary(max_size=60).map(lambda text: text.replace(b"a", b"\n")), size=st.integers(1, 9))
def test_lines_do_not_depend_on_the_chunks_that_they_come_in(data, size):
    chunks = [data[start : start + size] for start in range(0, len(data), size)]
    expected = data.split(b"\n")
    if not expected[-1]:  # an end of line at the end of the data begins no further line
        expected.pop()
    assert list(_lines(iter(chunks))) == expected


def test_a_line_of_an_archive_beyond_the_limit_is_named(tmp_path):
    source = open_source(write_gzip(tmp_path, [{"text": "a"}, {"text": "b" * 2**20}]))
    with reading_limits(MOST_LINE_BYTES=2**18), pytest.raises(DataError, match="line 2: .*longer than"):
        texts_of(source)


def test_damaged_zstd_of_a_streamed_dataset_is_a_fault_of_its_file():
    class Shard:
        def __iter__(self):
            raise zstandard.ZstdError("Unknown frame descriptor")

    with pytest.raises(DataFileError, match="data, shard 0, row 1: cannot be read from here on: ZstdError"):
        list(_shard_rows("data, shard 0", Shard(), 0))
