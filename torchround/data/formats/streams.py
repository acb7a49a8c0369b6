"""What is read in sequence: compressed JSONL, parquet, and what the package datasets loads.

A part that cannot be read, or not to its end, yields what came before and then a document that says what is wrong:
whether that stops the run is not decided here.
"""

import gzip
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torchround.config import SourceTable
from torchround.data.document_types import Document, Record
from torchround.data.errors import DataError
from torchround.data.formats.records import RecordReader
from torchround.data.formats.source_files import (
    MOST_LINE_BYTES,
    TOO_LONG,
    find_files,
    is_compressed,
    kind_of,
    line_starts,
    read_line,
    size_bytes,
)
from torchround.data.formats.sources import FileIndex, Order, Source, Stream, Unit

CHUNK_BYTES = 1 << 18
FEED_BYTES = 1 << 10  # to zstd at once: each may become 32 KiB per byte
MOST_BLANK_LINES = 100_000  # in a row, in an archive: it may unpack to any number of them
ROWS_AT_ONCE = 1024
# What pyarrow raises for files that are damaged or of a kind that it does not read, and for values Python has none of,
# besides errors of its own kind.
UNREADABLE = (OSError, ValueError, MemoryError, RuntimeError, TypeError, LookupError, OverflowError)


def open_source(table: SourceTable, records: RecordReader | None = None) -> Source:
    """The source that a table describes. Raises `DataError` where it is missing, empty or contradicts itself."""
    records = records or RecordReader(table)
    if table.format == "dataset":
        return Source(table, Stream(_dataset_units(table)), records)
    paths = find_files(table.path)
    kinds = {kind_of(path, table.format) for path in paths}
    if "text" in kinds and table.content != "text":
        example = next(path for path in paths if kind_of(path, table.format) == "text")
        hint = (
            f"; jq -c '.[]' {example} > {example}l makes one object a line"
            if example.suffix == ".json"
            else ""
        )
        raise DataError(
            f"source {table.path!r}: {example} is a file of text, which cannot hold {table.content!r}; "
            f"legal for that: JSONL, parquet or a dataset (source key format){hint}"
        )
    return Source(table, _file_order(table, paths, records), records)


def _file_order(table: SourceTable, paths: list[Path], records: RecordReader) -> Order:
    kinds = {path: kind_of(path, table.format) for path in paths}
    if not any(
        kind == "parquet" or (kind == "jsonl" and is_compressed(path)) for path, kind in kinds.items()
    ):
        return FileIndex(table, paths, records)
    if not any(size_bytes(path) for path in paths):
        raise DataError(f"source {table.path!r}: all of its {len(paths)} files are empty")
    units: list[Unit] = []
    for path in paths:
        if kinds[path] == "parquet":
            units += _parquet_units(path, records.fields())
        elif kinds[path] == "text":
            units.append(Unit(partial(_text, path), lambda: 1, size_bytes(path)))
        else:
            lines = _lines if is_compressed(path) else _plain_lines
            units.append(_line_unit(path, lines))
    return Stream(units)


# Lines.


def _line_unit(path: Path, lines: Callable[[Path, int], Iterator[Document]]) -> Unit:
    return Unit(partial(lines, path), lambda: sum(1 for _ in lines(path, 0)), size_bytes(path))


def _text(path: Path, start: int) -> Iterator[Document]:
    yield from [Document(path)][start:]


def _plain_lines(path: Path, start: int) -> Iterator[Document]:
    starts = line_starts(path)[start:].tolist()
    for number, start_byte in enumerate(starts, start=start + 1):
        yield Document(path, start_byte, number, record=_line_or_error(path, start_byte))


def _line_or_error(path: Path, start_byte: int) -> bytes | DataError:
    try:
        return read_line(path, start_byte)
    except DataError as error:
        return error


def _lines(path: Path, start: int) -> Iterator[Document]:
    number = 0
    try:
        for number, line in enumerate(_split_lines(_decompressed(path)), start=1):
            if number > start:
                yield Document(path, 0, number, record=line)
    except (DataError, OSError, EOFError, zlib.error, _zstd_error()) as error:
        reason = error if isinstance(error, DataError) else f"the archive is damaged or cut off: {error}"
        broken = Document(path, 0, number + 1, record=None)
        if number + 1 > start:
            yield Document(path, 0, number + 1, record=DataError(f"{broken}: {reason}"))


def _split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends; a last one that has none is a line too. Raises `DataError` for those of a bomb."""
    rest: list[bytes] = []
    num_bytes = num_blank = 0
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        rest.append(first)
        num_bytes += len(first)
        if num_bytes > MOST_LINE_BYTES:
            raise DataError(f"it is {TOO_LONG}")
        for line in others:
            num_blank = 0 if num_bytes else num_blank + 1
            if num_blank > MOST_BLANK_LINES:
                raise DataError(f"more than {MOST_BLANK_LINES:,} blank lines in a row")
            yield b"".join(rest)
            rest, num_bytes = [line], len(line)
    if last := b"".join(rest):
        yield last


def _decompressed(path: Path) -> Iterator[bytes]:
    if path.suffix == ".gz":
        with gzip.open(path, "rb") as file:
            while chunk := file.read1(CHUNK_BYTES):  # `read` would lose what comes before a cut
                yield chunk
        return
    zstandard = _optional("zstandard", "zstd", path)
    with path.open("rb", buffering=CHUNK_BYTES) as file:
        frame = None
        while data := file.read(FEED_BYTES):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = b""
                if frame.eof:
                    data, frame = frame.unused_data, None
    if frame is not None:  # its own reader takes a file that is cut off for a whole one
        raise EOFError("the file ends inside a zstd frame")


def _zstd_error() -> type[Exception]:
    """What zstandard raises; `EOFError` again where it is not installed, and so is not used."""
    try:
        from zstandard import ZstdError
    except ImportError:
        return EOFError
    error: type[Exception] = ZstdError
    return error


# Rows.


def _parquet_units(path: Path, fields: tuple[str, ...] | None) -> list[Unit]:
    """One unit per row group, so that a large file is not read in its own order."""
    parquet = _optional("pyarrow.parquet", "parquet", path)
    unreadable = (*UNREADABLE, _optional("pyarrow", "parquet", path).ArrowException)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            counts = [file.metadata.row_group(index).num_rows for index in range(file.num_row_groups)]
    except unreadable as error:
        broken = Document(path, record=DataError(f"{path}: not a readable parquet file: {error}"), number=1)
        return [Unit(partial(_only, broken), lambda: 1, size_bytes(path))]
    columns = names if fields is None else [name for name in names if name in fields]
    before = [sum(counts[:index]) for index in range(len(counts))]
    return [
        Unit(
            partial(_rows, parquet, unreadable, path, index, before[index], columns or names),
            partial(int, count),
            count,
        )
        for index, count in enumerate(counts)
    ]


def _only(document: Document, start: int) -> Iterator[Document]:
    yield from [document][start:]


def _rows(
    parquet: Any,
    unreadable: tuple[type[Exception], ...],
    path: Path,
    group: int,
    before: int,
    columns: list[str],
    start: int,
) -> Iterator[Document]:
    """Rows of a row group from the `start`-th on; `before`: rows of the file that are in earlier groups.

    A column is read through a buffer and in this thread: its default reads a whole row group ahead, which is as much
    memory as somebody once made it large.
    """
    number = 0
    try:
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=CHUNK_BYTES) as file:
            batches = file.iter_batches(ROWS_AT_ONCE, row_groups=[group], columns=columns, use_threads=False)
            for batch in batches:
                if number + len(batch) > start:
                    for row, record in enumerate(_records(batch), start=number + 1):
                        if row > start:
                            yield _row(path, before + row, record)
                number += len(batch)
    except unreadable as error:
        where = Document(path, 0, before + number + 1, "row")
        reason = "takes more memory than there is" if isinstance(error, MemoryError) else "is damaged"
        if number + 1 > start:
            yield Document(
                path, 0, where.number, "row", DataError(f"{where}: the parquet file {reason}: {error}")
            )


def _records(batch: Any) -> list[Record]:
    """The fields of each row. A text that is no UTF-8 is only its own row's fault."""
    try:
        records: list[Record] = batch.to_pylist()
    except UnicodeDecodeError as error:
        if len(batch) > 1:  # row by row takes 40 times as long
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


def _dataset_units(table: SourceTable) -> list[Unit]:
    """Row ranges of a dataset in memory or on disk; shards of one that is streamed."""
    package = _optional("datasets", "datasets", table.path)
    try:
        loaded = _load_dataset(package, table)
    except Exception as error:  # the package raises many kinds; all mean that it could not be loaded
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise DataError(
            f"dataset {table.path!r}, split {table.split!r}: {reason} (source keys: split, subset)"
        ) from error
    if hasattr(loaded, "__len__"):
        if not len(loaded):
            raise DataError(f"dataset {table.path!r}, split {table.split!r}: it has no rows")
        ranges = [range(low, min(low + 8192, len(loaded))) for low in range(0, len(loaded), 8192)]
        return [
            Unit(partial(_dataset_rows, table.path, loaded, rows), partial(len, rows), len(rows))
            for rows in ranges
        ]
    size = f"{table.path} {table.subset} {table.split}"
    count = max(1, loaded.num_shards)
    shards = [loaded.shard(num_shards=count, index=index) if count > 1 else loaded for index in range(count)]
    return [
        Unit(partial(_dataset_stream, table.path, shard, index), partial(_unknown, table), size)
        for index, shard in enumerate(shards)
    ]


def _load_dataset(package: Any, table: SourceTable) -> Any:
    folder = Path(os.path.expanduser(table.path))
    if (folder / "dataset_dict.json").is_file():
        return package.load_from_disk(str(folder))[table.split]
    if (folder / "state.json").is_file():
        return package.load_from_disk(str(folder))
    name = str(folder) if folder.exists() else table.path
    return package.load_dataset(name, table.subset, split=table.split, streaming=True)


def _dataset_rows(name: str, dataset: Any, rows: range, start: int) -> Iterator[Document]:
    """One document for each row: any of them can be gone to, so a row that cannot be read costs no other."""
    for low in range(rows.start + start, rows.stop, ROWS_AT_ONCE):
        number, high = low, min(low + ROWS_AT_ONCE, rows.stop)
        try:
            for record in dataset.select(range(low, high)):
                yield Document(name, 0, number + 1, "row", dict(record))
                number += 1
        except Exception:  # noqa: BLE001 (the package raises many kinds, before the row that is at fault)
            yield from (_dataset_row(name, dataset, index) for index in range(number, high))


def _dataset_row(name: str, dataset: Any, index: int) -> Document:
    try:
        return Document(name, 0, index + 1, "row", dict(dataset[index]))
    except Exception as error:  # noqa: BLE001 (the package raises many kinds)
        return _unreadable(name, index + 1, error)


def _unreadable(where: str, number: int, error: Exception) -> Document:
    here = Document(where, 0, number, "row")
    return replace(here, record=DataError(f"{here}: cannot be read: {type(error).__name__}: {error}"))


def _dataset_stream(name: str, dataset: Any, shard: int, start: int) -> Iterator[Document]:
    number = start
    where = f"{name}, shard {shard}"
    try:
        for record in dataset.skip(start) if start else dataset:
            number += 1
            yield Document(where, 0, number, "row", dict(record))
    except Exception as error:  # noqa: BLE001 (the package and its readers raise many kinds)
        yield _unreadable(where, number + 1, error)


def _unknown(table: SourceTable) -> int:
    raise DataError(
        f"dataset {table.path!r} is streamed, so its number of documents is not known; "
        'data.weight_by = "size" needs it'
    )


def _optional(module: str, extra: str, where: Path | str) -> Any:
    """A package that only some sources need. Raises `DataError` that says how to install it."""
    try:
        return __import__(module, fromlist=["*"])
    except ImportError as error:
        raise DataError(
            f"{where} needs the package {module.split('.')[0]}: pip install 'torchround[{extra}]' ({error})"
        ) from error
