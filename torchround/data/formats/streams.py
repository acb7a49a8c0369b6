"""Opens the source that a config table describes, and reads the formats that only come in sequence.

Those formats are compressed JSONL, parquet, and datasets of the package datasets. If the content of a part is damaged, it
yields the documents before that point and then one document that carries the error. The reader decides whether a damaged
record stops the run. If the system cannot read a file, or if its size has changed, a part raises `DataFileError`: that is
no fault of a record.
"""

import gzip
import os
import zlib
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchround.config import SourceTable
from torchround.data.document_types import Document, Record
from torchround.data.errors import DataError, DataFileError, cannot_be_read
from torchround.data.formats.content import RecordReader
from torchround.data.formats.file_index import FileIndex, index_file
from torchround.data.formats.source_files import (
    find_files,
    is_compressed,
    kind_of,
    refuse_changed,
    size_bytes,
)
from torchround.data.formats.sources import IndexedFiles, RecordStream, Source, StreamPart
from torchround.untrusted.data_limits import split_bounded_lines

CHUNK_BYTES = 1 << 18
FEED_BYTES = 1 << 10  # handed to zstd at once: each byte may unpack to 32 KiB
ROWS_AT_ONCE = 1024
DATASET_PART_ROWS = 8192
# pyarrow raises these, besides its own errors, for damaged files, for files of a kind that it cannot read, and for
# values that Python cannot represent.
UNREADABLE = (OSError, ValueError, MemoryError, RuntimeError, TypeError, LookupError, OverflowError)
# What a record or a row can be at fault for. Every other error of a streamed dataset is one of the network or of a file.
FAULTS_OF_RECORDS = (ValueError, TypeError, LookupError, OverflowError, EOFError, zlib.error)
Documents = Generator[Document, None, None]


def open_source(table: SourceTable, records: RecordReader | None = None) -> Source:
    """Open the source that a table describes. Raises `DataError` if it is missing, empty or contradicts itself."""
    records = records or RecordReader(table)
    if table.format == "dataset":
        return RecordStream(table, records, _dataset_parts(table))
    paths = find_files(table.path)
    kinds = {path: kind_of(path, table.format) for path in paths}
    if table.content != "text":
        _refuse_text_files(table, kinds)
    _refuse_packed_tables(table, kinds)
    # One file that cannot be indexed makes the whole source a stream, so that its shuffled order mixes all files.
    if not any(
        kind == "parquet" or (kind == "jsonl" and is_compressed(path)) for path, kind in kinds.items()
    ):
        return IndexedFiles(table, records, paths)
    if not any(size_bytes(path) for path in paths):
        raise DataError(f"source {table.path!r}: all of its {len(paths)} files are empty")
    return RecordStream(
        table, records, [part for path in paths for part in _file_parts(path, kinds[path], records)]
    )


def _refuse_text_files(table: SourceTable, kinds: dict[Path, str]) -> None:
    example = next((path for path, kind in kinds.items() if kind == "text"), None)
    if example is None:
        return
    raise DataError(
        f"source {table.path!r}: {example} is a file of text, which cannot hold {table.content!r}; "
        "legal for that: JSON, JSONL, CSV, parquet or a dataset (source key format)"
    )


def _refuse_packed_tables(table: SourceTable, kinds: dict[Path, str]) -> None:
    """Raise `DataError` for formats that are not read compressed, although the key `format` asks for it."""
    for path, kind in kinds.items():
        if kind in ("json", "csv", "tsv") and is_compressed(path):
            raise DataError(f"source {table.path!r}: {path}: {kind} is not read compressed; unpack the file")


def _file_parts(path: Path, kind: str, records: RecordReader) -> list[StreamPart]:
    if kind == "parquet":
        return _parquet_parts(path, records)
    file_bytes = size_bytes(path)
    if kind == "jsonl" and is_compressed(path):
        lines = partial(_unpacked_lines, path, file_bytes)
        return [StreamPart(lines, lambda: sum(1 for _ in lines(0)), file_bytes)]
    index = index_file(path, records.table.format)
    return [StreamPart(partial(_indexed, index), partial(len, index), file_bytes)]


# Lines.


def _indexed(index: FileIndex, start: int) -> Documents:
    for number in range(start, len(index)):
        document = index.document(number)
        # Read now, while its neighbours are read; a text is not held in memory.
        is_text = document.record is None
        yield document if is_text else replace(document, record=_record_or_error(index, number))


def _record_or_error(index: FileIndex, number: int) -> Record:
    try:
        return index.read(number)
    except DataFileError:
        raise
    except DataError as error:
        return error


def _refuse_lost(path: Path, file_bytes: int, error: Exception) -> None:
    """Raise `DataFileError` if an error came from the system, or from a file whose size has changed."""
    if isinstance(error, OSError) and error.errno is not None:
        raise cannot_be_read(path, error) from error
    refuse_changed(path, size_bytes(path), file_bytes)


def _unpacked_lines(path: Path, file_bytes: int, start: int) -> Documents:
    number = 0
    refuse_changed(path, size_bytes(path), file_bytes)
    try:
        for number, line in enumerate(split_bounded_lines(_decompressed(path)), start=1):
            if number > start:
                yield Document(path, 0, number, record=line)
    except (ValueError, OSError, EOFError, zlib.error, _zstd_error()) as error:
        _refuse_lost(path, file_bytes, error)
        # A limit, or a missing package, says itself what is wrong; the other errors come from the unpacking.
        reason = error if isinstance(error, ValueError) else f"the archive is damaged or cut off: {error}"
        broken = Document(path, 0, number + 1)
        if number + 1 > start:
            yield replace(broken, record=DataError(f"{broken}: {reason}"))


def _decompressed(path: Path) -> Iterator[bytes]:
    if path.suffix.lower() == ".gz":
        with gzip.open(path, "rb") as file:
            while chunk := file.read1(CHUNK_BYTES):  # `read` would lose the data just before a cut
                yield chunk
        return
    zstandard = _optional("zstandard", path)
    with path.open("rb", buffering=CHUNK_BYTES) as file:
        frame = None
        while data := file.read(FEED_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    if frame is not None:  # the package's own reader takes a file that is cut off for a complete one
        raise EOFError("the file ends inside a zstd frame")


def _zstd_error() -> type[Exception]:
    """Return the error class of zstandard, or `EOFError` if the package is missing and so never used."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return EOFError
    error: type[Exception] = ZstdError
    return error


# Rows of parquet files.


def _parquet_parts(path: Path, records: RecordReader) -> list[StreamPart]:
    """Return one part per row group, so that the records of a large file come in another order than its own."""
    parquet = _optional("pyarrow.parquet", path)
    unreadable = (*UNREADABLE, _optional("pyarrow", path).ArrowException)
    file_bytes = size_bytes(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except unreadable as error:
        _refuse_lost(path, file_bytes, error)
        broken = Document(path, record=DataError(f"{path}: not a readable parquet file: {error}"), number=1)
        return [StreamPart(partial(_only, broken), lambda: 1, file_bytes)]
    columns = records.columns(names)
    rows_before = [sum(counts[:index]) for index in range(len(counts))]
    return [
        StreamPart(
            partial(_rows, parquet, unreadable, path, file_bytes, group, rows_before[group], columns),
            partial(int, count),
            count,
        )
        for group, count in enumerate(counts)
    ]


def _only(document: Document, start: int) -> Documents:
    yield from [document][start:]


def _rows(
    parquet: Any,
    unreadable: tuple[type[Exception], ...],
    path: Path,
    file_bytes: int,
    group: int,
    rows_before: int,
    columns: list[str],
    start: int,
) -> Documents:
    """Yield the rows of a row group from the `start`-th on. The file has `rows_before` rows in earlier groups."""
    number = 0
    refuse_changed(path, size_bytes(path), file_bytes)
    try:
        # Columns are read through a buffer and in this thread. The default reads a whole row group ahead, and a row
        # group may be as large as the file.
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
            batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False)
            for batch in batches:
                if number + len(batch) > start:
                    for row, record in enumerate(_records(batch), start=number + 1):
                        if row > start:
                            yield _row(path, rows_before + row, record)
                number += len(batch)
    except unreadable as error:
        _refuse_lost(path, file_bytes, error)
        broken = Document(path, 0, rows_before + number + 1, "row")
        reason = "takes more memory than there is" if isinstance(error, MemoryError) else "is damaged"
        if number + 1 > start:
            yield replace(broken, record=DataError(f"{broken}: the parquet file {reason}: {error}"))


def _records(batch: Any) -> list[Record]:
    """Return the fields of each row. Text that is not UTF-8 makes only its own row an error."""
    try:
        records: list[Record] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:  # only now row by row, which takes 40 times as long
            return [record for index in range(len(batch)) for record in _records(batch.slice(index, 1))]
        bad = error.object[error.start]
        return [DataError(f"not valid UTF-8 (byte 0x{bad:02x}: {error.reason})")]
    return records


def _row(path: Path, number: int, record: Record) -> Document:
    document = Document(path, 0, number, "row", record)
    if isinstance(record, DataError):
        return replace(document, record=DataError(f"{document}: {record}"))
    return document


# The package datasets.


def _dataset_parts(table: SourceTable) -> list[StreamPart]:
    """Return row ranges of a dataset in memory or on disk, or the shards of a streamed one."""
    package = _optional("datasets", table.path)
    try:
        loaded = _load_dataset(package, table)
    except Exception as error:  # the package raises many kinds; each means that it could not load the dataset
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        reason = f"{kind}{' '.join(str(error).split())}"
        raise DataError(
            f"dataset {table.path!r}, split {table.split!r}: {reason} (source keys: split, subset)"
        ) from error
    if hasattr(loaded, "__len__"):
        if not len(loaded):
            raise DataError(f"dataset {table.path!r}, split {table.split!r}: it has no rows")
        starts = range(0, len(loaded), DATASET_PART_ROWS)
        ranges = [range(low, min(low + DATASET_PART_ROWS, len(loaded))) for low in starts]
        return [
            StreamPart(partial(_dataset_rows, table.path, loaded, rows), partial(len, rows), len(rows))
            for rows in ranges
        ]
    # The sizes of streamed shards are unknown, so the fingerprint holds the dataset's name.
    name = f"{table.path} {table.subset} {table.split}"
    count = max(1, loaded.num_shards)
    shards = [loaded.shard(num_shards=count, index=index) if count > 1 else loaded for index in range(count)]
    return [
        StreamPart(partial(_dataset_stream, table.path, shard, index), partial(_refuse_to_count, table), name)
        for index, shard in enumerate(shards)
    ]


def _load_dataset(package: Any, table: SourceTable) -> Any:
    folder = Path(os.path.expanduser(table.path))
    if (folder / "dataset_dict.json").is_file():
        splits = package.load_from_disk(str(folder))
        if table.split not in splits:
            raise DataError(f"it has no such split, only {', '.join(splits)}")
        return splits[table.split]
    if (folder / "state.json").is_file():
        return package.load_from_disk(str(folder))
    name = str(folder) if folder.exists() else table.path
    return package.load_dataset(name, table.subset, split=table.split, streaming=True)


def _dataset_rows(name: str, dataset: Any, rows: range, start: int) -> Documents:
    """Yield one document per row. A row that cannot be read becomes an error and costs no other row."""
    for low in range(rows.start + start, rows.stop, ROWS_AT_ONCE):
        number, high = low, min(low + ROWS_AT_ONCE, rows.stop)
        try:
            for record in dataset.select(range(low, high)):
                yield Document(name, 0, number + 1, "row", dict(record))
                number += 1
        except Exception:  # noqa: BLE001 (the package raises many kinds, before it reaches the faulty row)
            yield from (_dataset_row(name, dataset, index) for index in range(number, high))


def _dataset_row(name: str, dataset: Any, index: int) -> Document:
    try:
        return Document(name, 0, index + 1, "row", dict(dataset[index]))
    except Exception as error:  # noqa: BLE001 (the package raises many kinds)
        return _unreadable(name, index + 1, error, is_lost=isinstance(error, OSError))


def _unreadable(where: str, number: int, error: Exception, is_lost: bool) -> Document:
    """Return a document that carries the error. Raises `DataFileError` if the data, and not the record, `is_lost`."""
    here = Document(where, 0, number, "row")
    if is_lost:
        raise DataFileError(f"{here}: cannot be read: {type(error).__name__}: {error}") from error
    return replace(here, record=DataError(f"{here}: cannot be read: {type(error).__name__}: {error}"))


def _dataset_stream(name: str, dataset: Any, shard: int, start: int) -> Documents:
    number = start
    where = f"{name}, shard {shard}"
    try:
        for record in dataset.skip(start) if start else dataset:
            number += 1
            yield Document(where, 0, number, "row", dict(record))
    except Exception as error:  # noqa: BLE001 (the package and its readers raise many kinds)
        yield _unreadable(where, number + 1, error, is_lost=not _is_of_a_record(error))


def _is_of_a_record(error: BaseException) -> bool:
    """Say whether an error is of the kind that a damaged record or archive gives. An error that led to it counts too."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    archives = (gzip.BadGzipFile, _zstd_error())
    # An error of the network may come wrapped in an error of the format.
    if any(isinstance(link, OSError) and not isinstance(link, archives) for link in chain):
        return False
    return any(isinstance(link, (*FAULTS_OF_RECORDS, *archives)) for link in chain)


def _refuse_to_count(table: SourceTable) -> int:
    raise DataError(
        f"dataset {table.path!r} is streamed, so its number of documents is not known; "
        'data.weight_by = "size" needs it'
    )


def _optional(module: str, where: Path | str) -> Any:
    """Import a package that only some sources need. Raises a `DataError` that says how to install it."""
    package = module.split(".")[0]  # also its name on the package index
    try:
        return __import__(module, fromlist=["*"])
    except ImportError as error:
        raise DataError(f"{where} needs the package {package}: pip install {package} ({error})") from error
