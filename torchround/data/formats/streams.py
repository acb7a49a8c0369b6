"""Opens the source that a config table describes, and reads the formats that only come in sequence.

Those formats are compressed JSONL, parquet, and datasets of the package datasets. A part that is damaged, that the
system cannot read or whose size has changed raises `DataFileError`: that is no fault of a record.
"""

import gzip
import os
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchround.config import SourceTable, users_module
from torchround.data.document_types import DataError, DataFileError, Document, Record
from torchround.data.formats.content import RecordReader
from torchround.data.formats.files import (
    MOST_LINE_BYTES,
    TOO_LONG,
    FileIndex,
    find_files,
    index_file,
    is_compressed,
    kind_of,
    refuse_changed,
    size_bytes,
)
from torchround.data.formats.sources import IndexedFiles, RecordStream, Source, StreamPart

CHUNK_BYTES = 1 << 18
FEED_BYTES = 1 << 10  # handed to zstd at once: each byte may unpack to 32 KiB
ROWS_AT_ONCE = 1024
DATASET_PART_ROWS = 8192
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
                "legal for that: JSON, JSONL, parquet or a dataset (source key format)"
            )
    if not any(size_bytes(path) for path in paths):
        raise DataError(f"source {table.path!r}: all of its {len(paths)} files are empty")
    # One file that cannot be indexed makes the whole source a stream, so that its shuffled order mixes all files.
    if any(kind == "parquet" or (kind == "jsonl" and is_compressed(path)) for path, kind in kinds.items()):
        parts = [part for path in paths for part in _file_parts(path, kinds[path], records)]
        return RecordStream(table, records, parts)
    return IndexedFiles(table, records, paths)


def _users_part(module: str, path: Path) -> StreamPart:
    """Make a part whose records the user's module reads: `read(path)` yields a mapping for each."""
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
    if kind == "jsonl" and is_compressed(path):
        file_bytes = size_bytes(path)
        lines = partial(_documents, path, lambda: _lines(_decompressed(path)), "line", 0, file_bytes)
        return [StreamPart(lines, lambda: sum(1 for _ in lines(0)), file_bytes)]
    index = index_file(path, records.table.format)
    return [StreamPart(partial(_indexed, index), partial(len, index), index.file_bytes)]


def _documents(
    where: Path | str,
    read: Callable[[], Iterable[Record]],
    unit: str,
    before: int,
    file_bytes: int | None,
    start: int,
) -> Documents:
    """Yield the records of a part as documents, from the `start`-th on. `before` records are in earlier parts."""
    number = before
    try:
        if isinstance(where, Path):
            refuse_changed(where, size_bytes(where), file_bytes)
        for number, record in enumerate(read(), start=before + 1):
            if number > before + start:
                yield Document(where, 0, number, unit, record)
    except DataError:
        raise
    except Exception as error:  # packages raise many kinds for damaged data
        reason = f"{type(error).__name__}: {error}"
        raise DataFileError(f"{where}, {unit} {number + 1}: cannot be read from here on: {reason}") from error


# Lines.


def _indexed(index: FileIndex, start: int) -> Documents:
    for number in range(start, len(index)):
        document = index.document(number)
        # A record is read now, while its neighbours are read; a text is not held in memory.
        yield replace(document, record=index.read(number)) if document.number else document


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Split unpacked chunks into lines without their ends. A last line without an end counts too."""
    rest: list[bytes] = []
    num_bytes = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        num_bytes += len(first)
        # Checked per chunk, before the parts are joined: a small archive can unpack to a line of any length.
        if num_bytes > MOST_LINE_BYTES:
            raise ValueError(TOO_LONG)
        for line in others:
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
    """Make one part per row group, so that the records of a large file come in another order than its own."""
    parquet = _optional("pyarrow.parquet", path)
    file_bytes = size_bytes(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except Exception as error:  # pyarrow raises many kinds for damaged files
        raise DataFileError(f"{path}: not a readable parquet file: {error}") from error
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
            yield from batch.to_pylist()


# The package datasets.


def _dataset_parts(table: SourceTable) -> list[StreamPart]:
    """List row ranges of a dataset in memory or on disk, or the shards of a streamed one."""
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
            records = partial(map, loaded.__getitem__, rows)
            opened = partial(_documents, table.path, records, "row", low, None)
            parts.append(StreamPart(opened, partial(len, rows), len(rows)))
        return parts
    # The sizes of streamed shards are unknown, so the fingerprint holds the dataset's name.
    name = f"{table.path} {table.subset} {table.split}"
    count = max(1, loaded.num_shards)
    for index in range(count):
        shard = loaded.shard(num_shards=count, index=index) if count > 1 else loaded
        opened = partial(_shard_rows, f"{table.path}, shard {index}", shard)
        parts.append(StreamPart(opened, partial(int), name))
    return parts


def _load_dataset(package: Any, table: SourceTable) -> Any:
    folder = Path(os.path.expanduser(table.path))
    # Files that save_to_disk writes.
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        name = str(folder) if folder.exists() else table.path
        return package.load_dataset(name, table.subset, split=table.split, streaming=True)
    loaded = package.load_from_disk(str(folder))
    return loaded[table.split] if isinstance(loaded, dict) else loaded


def _shard_rows(where: str, shard: Any, start: int) -> Documents:
    # Skipping is the shard's own: what it skips may not have to be fetched.
    rows = partial(iter, shard.skip(start) if start else shard)
    return _documents(where, rows, "row", start, None, 0)


def _optional(module: str, where: Path | str) -> Any:
    """Import a package that only some sources need. Raises a `DataError` that says how to install it."""
    package = module.split(".")[0]  # also its name on the package index
    try:
        return __import__(module, fromlist=["*"])
    except ImportError as error:
        raise DataError(f"{where} needs the package {package}: pip install {package} ({error})") from error
