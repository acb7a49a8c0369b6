"""Opens the source that a config table describes, and reads the formats that only come in sequence.

Those formats are compressed JSONL, parquet, and datasets of the package datasets. If the content of a part is damaged,
its documents before that point are read, and then one document carries the error, with path and line or row. The reader
decides whether that stops the run. If the system cannot read a file, or if its size has changed, a part raises
`DataFileError`: that is no fault of a record.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torchround.config import SourceTable, users_module
from torchround.data.document_types import DataError, DataFileError, Document, Record, cannot_be_read
from torchround.data.formats.content import RecordReader
from torchround.data.formats.files import (
    MOST_LINE_BYTES,
    TOO_LONG,
    FileIndex,
    find_files,
    index_file,
    is_compressed,
    is_saved_dataset,
    kind_of,
    refuse_changed,
    size_bytes,
)
from torchround.data.formats.sources import IndexedFiles, RecordStream, Source, StreamPart

CHUNK_BYTES = 1 << 18
FEED_BYTES = 1 << 10  # handed to zstd at once: each byte may unpack to 32 KiB
MOST_BLANK_LINES = 100_000  # in a row: a small archive can unpack to any number of them
ROWS_AT_ONCE = 1024
DATASET_PART_ROWS = 8192
# What a record of a dataset can be at fault for. Every other error is one of the network or of a file.
FAULTS_OF_RECORDS = (
    ValueError,
    TypeError,
    LookupError,
    OverflowError,
    EOFError,
    zlib.error,
    gzip.BadGzipFile,
)
Documents = Generator[Document, None, None]


def open_source(table: SourceTable, records: RecordReader | None = None) -> Source:
    """Open the source that a table describes. Raises `DataError` if it is missing, empty or contradicts itself."""
    records = records or RecordReader(table)
    if table.format == "dataset":
        return RecordStream(table, records, _dataset_parts(table))
    paths = find_files(table.path)
    if table.module is not None:
        return RecordStream(table, records, [_users_part(table.module, path) for path in paths])
    kinds = {path: kind_of(path, table.format) for path in paths}
    for path, kind in kinds.items():
        if kind == "text" and table.content != "text":
            raise DataError(
                f"source {table.path!r}: {path} is a file of text, which cannot hold {table.content!r}; "
                "legal for that: JSON, JSONL, CSV, parquet or a dataset (source key format)"
            )
        if kind in ("json", "csv", "tsv") and is_compressed(path):
            raise DataError(f"source {table.path!r}: {path}: {kind} is not read compressed; unpack the file")
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


def _users_part(module: str, path: Path) -> StreamPart:
    """Return a part whose records the user's module reads: `read(path)` yields a mapping for each."""
    try:
        read = users_module(module).read
    except (ImportError, AttributeError) as error:
        raise DataError(
            f"source module {module}: it gives no read(path) ({type(error).__name__}: {error})"
        ) from error
    file_bytes = size_bytes(path)
    documents = partial(_documents, path, partial(read, path), "record", 0, file_bytes)
    return StreamPart(documents, lambda: sum(1 for _ in documents(0)), file_bytes)


def _file_parts(path: Path, kind: str, records: RecordReader) -> list[StreamPart]:
    if kind == "parquet":
        return _parquet_parts(path, records)
    file_bytes = size_bytes(path)
    if kind == "jsonl" and is_compressed(path):
        lines = partial(_documents, path, lambda: _lines(_decompressed(path)), "line", 0, file_bytes)
        return [StreamPart(lines, lambda: sum(1 for _ in lines(0)), file_bytes)]
    index = index_file(path, records.table.format)
    return [StreamPart(partial(_indexed, index), partial(len, index), file_bytes)]


def _documents(
    where: Path | str,
    read: Callable[[], Iterable[Record]],
    unit: str,
    before: int,
    file_bytes: int | None,
    start: int,
) -> Documents:
    """Yield the records of a part as documents, from the `start`-th on. `before` records are in earlier parts."""
    number = 0
    if isinstance(where, Path):
        refuse_changed(where, size_bytes(where), file_bytes)
    try:
        for number, record in enumerate(read(), start=1):
            if number > start:
                yield _document(where, before + number, unit, record)
    except Exception as error:  # noqa: BLE001 (packages raise many kinds for damaged data)
        _refuse_lost(where, file_bytes, error)
        if number + 1 > start:
            reason = DataError(f"cannot be read from here on: {type(error).__name__}: {error}")
            yield _document(where, before + number + 1, unit, reason)


def _document(where: Path | str, number: int, unit: str, record: Record) -> Document:
    if isinstance(record, DataError):
        record = DataError(f"{where}, {unit} {number}: {record}")
    return Document(where, 0, number, unit, record)


def _refuse_lost(where: Path | str, file_bytes: int | None, error: Exception) -> None:
    """Raise `DataFileError` if an error came from the system or the network, or if the file's size has changed."""
    if isinstance(where, Path):
        if isinstance(error, OSError) and error.errno is not None:
            raise cannot_be_read(where, error) from error
        refuse_changed(where, size_bytes(where), file_bytes)
        return
    # An error of the network may come wrapped in an error of the format.
    chain: list[BaseException] = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    lost = [link for link in chain if isinstance(link, OSError) and not isinstance(link, gzip.BadGzipFile)]
    is_fault = any(
        isinstance(link, FAULTS_OF_RECORDS) or type(link).__module__.startswith("zstandard") for link in chain
    )
    if lost or not is_fault:
        raise DataFileError(f"{where}: cannot be read: {type(error).__name__}: {error}") from error


# Lines.


def _indexed(index: FileIndex, start: int) -> Documents:
    for number in range(start, len(index)):
        document = index.document(number)
        if document.record is None:
            yield document  # a text is not held in memory
            continue
        # Read now, while its neighbours are read.
        record: Record
        try:
            record = index.read(number)
        except DataFileError:
            raise
        except DataError as error:
            record = error
        yield Document(document.path, document.start_byte, document.number, document.unit, record)


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split unpacked chunks into lines without their ends. A last line without an end counts too."""
    rest: list[bytes] = []
    num_bytes = num_blank = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        num_bytes += len(first)
        # Checked per chunk, before the parts are joined: a small archive can unpack to a line of any length.
        if num_bytes > MOST_LINE_BYTES:
            raise ValueError(TOO_LONG)
        for line in others:
            num_blank = 0 if num_bytes else num_blank + 1
            if num_blank > MOST_BLANK_LINES:
                raise ValueError(f"more than {MOST_BLANK_LINES:,} blank lines in a row")
            yield b"".join(rest)
            rest, num_bytes = [line], len(line)
    if last := b"".join(rest):
        yield last


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


# Rows of parquet files.


def _parquet_parts(path: Path, records: RecordReader) -> list[StreamPart]:
    """Return one part per row group, so that the records of a large file come in another order than its own."""
    parquet = _optional("pyarrow.parquet", path)
    file_bytes = size_bytes(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except Exception as error:  # noqa: BLE001 (pyarrow raises many kinds for damaged files)
        _refuse_lost(path, file_bytes, error)
        fault: Record = DataError(f"not a readable parquet file: {error}")
        broken = partial(_documents, path, lambda: [fault], "row", 0, file_bytes)
        return [StreamPart(broken, lambda: 1, file_bytes)]
    columns = records.columns(names)
    parts, before = [], 0
    for group, count in enumerate(counts):
        rows = partial(_rows, parquet, path, group, columns)
        opened = partial(_documents, path, rows, "row", before, file_bytes)
        parts.append(StreamPart(opened, partial(int, count), count))
        before += count
    return parts


def _rows(parquet: Any, path: Path, group: int, columns: list[str]) -> Iterator[Record]:
    # Columns are read through a buffer and in this thread. The default reads a whole row group ahead, and a row
    # group may be as large as the file.
    with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
        for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False):
            yield from _records(batch)


def _records(batch: Any) -> list[Record]:
    """Return the fields of each row. Text that is not UTF-8 makes only its own row an error."""
    try:
        records: list[Record] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:  # only now row by row, which takes 40 times as long
            return [record for index in range(len(batch)) for record in _records(batch.slice(index, 1))]
        return [DataError(f"not valid UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})")]
    return records


# The package datasets.


def _dataset_parts(table: SourceTable) -> list[StreamPart]:
    """Return row ranges of a dataset in memory or on disk, or the shards of a streamed one."""
    package = _optional("datasets", table.path)
    try:
        loaded = _load_dataset(package, table)
        if hasattr(loaded, "__len__") and not len(loaded):
            raise DataError("it has no rows")
    except Exception as error:  # the package raises many kinds; each means that it could not load the dataset
        kind = "" if isinstance(error, DataError) else f"{type(error).__name__}: "
        reason = f"{kind}{' '.join(str(error).split())}"
        raise DataError(
            f"dataset {table.path!r}, split {table.split!r}: {reason} (source keys: split, subset)"
        ) from error
    parts = []
    if hasattr(loaded, "__len__"):
        for low in range(0, len(loaded), DATASET_PART_ROWS):
            rows = range(low, min(low + DATASET_PART_ROWS, len(loaded)))
            opened = partial(_documents, table.path, partial(_table_rows, loaded, rows), "row", low, None)
            parts.append(StreamPart(opened, partial(len, rows), len(rows)))
        return parts
    # The sizes of streamed shards are unknown, so the fingerprint holds the dataset's name.
    name = f"{table.path} {table.subset} {table.split}"
    count = max(1, loaded.num_shards)
    for index in range(count):
        shard = loaded.shard(num_shards=count, index=index) if count > 1 else loaded
        opened = partial(_shard_rows, f"{table.path}, shard {index}", shard)
        parts.append(StreamPart(opened, partial(_refuse_to_count, table), name))
    return parts


def _load_dataset(package: Any, table: SourceTable) -> Any:
    folder = Path(os.path.expanduser(table.path))
    if is_saved_dataset(folder):
        loaded = package.load_from_disk(str(folder))
        if not isinstance(loaded, dict):
            return loaded
        if table.split not in loaded:
            raise DataError(f"it has no such split, only {', '.join(loaded)}")
        return loaded[table.split]
    name = str(folder) if folder.exists() else table.path
    return package.load_dataset(name, table.subset, split=table.split, streaming=True)


def _table_rows(dataset: Any, rows: range) -> Iterator[Record]:
    """Yield the rows of a dataset on disk. A row that cannot be read becomes an error and costs no other row."""
    for index in rows:
        try:
            yield dict(dataset[index])
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 (the package raises many kinds)
            yield DataError(f"cannot be read: {type(error).__name__}: {error}")


def _shard_rows(where: str, shard: Any, start: int) -> Documents:
    # Skipping is the shard's own: what it skips may not have to be fetched.
    rows = partial(map, dict, shard.skip(start) if start else shard)
    return _documents(where, rows, "row", start, None, 0)


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
