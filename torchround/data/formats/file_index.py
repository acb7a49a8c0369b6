"""Finds where each record of a plain file begins, so that records can be read in any order.

The formats are text (one document), JSON Lines, JSON arrays, CSV and TSV. An index takes 8 bytes per record. Every read
compares the file's size with the size that was indexed: in a changed file the offsets would point into other records.
"""

import csv
import json
import os
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchround.data.document_types import Document, Record, TokenIds
from torchround.data.errors import DataError, cannot_be_read
from torchround.data.formats.json_array import json_array_starts
from torchround.data.formats.source_files import (
    BYTE_ORDER_MARK,
    SCAN_BYTES,
    kind_of,
    line_starts,
    refuse_changed,
    refuse_packed,
    size_bytes,
)
from torchround.planning.memory import size_text
from torchround.untrusted.data_limits import MOST_LINE_BYTES, TOO_LONG, read_bounded_line
from torchround.untrusted.progress import Progress

UNITS = {"jsonl": "line", "json": "record", "csv": "row", "tsv": "row"}
SPACE_AND_COMMA = b" \t\r\n,"


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The records of one plain file of `file_bytes` bytes.

    `starts` `[n]` or `[n + 1]` int64 holds the byte at which each record begins; the last entry may be the end of the last
    record. It is None if the file is one text. `header` and `delimiter` are those of CSV.
    """

    path: Path
    kind: str
    file_bytes: int
    starts: TokenIds | None = field(default=None, repr=False, compare=False)
    header: tuple[str, ...] = ()
    delimiter: str = ","

    def __len__(self) -> int:
        """Return the number of documents, blank ones included."""
        if self.starts is None:
            return 1
        return len(self.starts) - (self.kind != "jsonl")

    def document(self, index: int) -> Document:
        """Return document `index`, from 0. Its record is read when it is asked for."""
        if self.starts is None:
            return Document(self.path, file_bytes=self.file_bytes)
        # As a spreadsheet counts: the header is row 1.
        number = index + (2 if self.header else 1)
        start_byte, unit = int(self.starts[index]), UNITS[self.kind]
        return Document(self.path, start_byte, number, unit, partial(self.read, index))

    def read(self, index: int) -> Record:
        """Read record `index`. Raises `DataFileError` if the file cannot be read or has changed, otherwise `DataError`."""
        assert self.starts is not None, f"{self.path} is one text and has no records"
        start = int(self.starts[index])
        try:
            with self.path.open("rb") as file:
                refuse_changed(self.path, os.fstat(file.fileno()).st_size, self.file_bytes)
                file.seek(start)
                if self.kind == "jsonl":
                    return read_bounded_line(file)
                data = read_bounded(file, int(self.starts[index + 1]) - start)
        except OSError as error:
            raise cannot_be_read(self.path, error) from error
        except ValueError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self.path}: the line at byte {start} is {error}") from error
        if self.kind == "json":
            return data.rstrip(SPACE_AND_COMMA) or data
        return self._row(data, str(self.document(index))) if data.strip() else b""

    def _row(self, data: bytes, where: str) -> Record:
        try:
            values = next(csv_rows([data.decode()], self.delimiter))
        except UnicodeDecodeError as error:
            bad = error.object[error.start]
            raise DataError(f"{where}: not valid UTF-8 (byte 0x{bad:02x}: {error.reason})") from error
        except csv.Error as error:
            raise DataError(f"{where}: not valid CSV: {error}") from error
        if len(values) != len(self.header):
            raise DataError(f"{where}: {len(values)} values, and the header has {len(self.header)} columns")
        return dict(zip(self.header, values, strict=True))


def index_file(path: Path, format: str) -> FileIndex:
    """Index a plain file of the source key `format`. Raises `DataError`."""
    kind = kind_of(path, format)
    if kind == "text":
        if format == "auto":
            refuse_packed(path)
        return FileIndex(path, kind, size_bytes(path))
    file_bytes = size_bytes(path)
    if kind == "json":
        kind = "json" if _opens_array(path) else "jsonl"
    if kind == "jsonl":
        return FileIndex(path, kind, file_bytes, line_starts(path))
    try:
        with path.open("rb") as file:
            if kind == "json":
                return FileIndex(path, kind, file_bytes, json_array_starts(file))
            return _index_csv(path, kind, file, file_bytes)
    except OSError as error:
        raise cannot_be_read(path, error) from error


def read_bounded(file: BinaryIO, num_bytes: int) -> bytes:
    """Read a record of `num_bytes`. Raises `ValueError` past the limit of a record."""
    if num_bytes > MOST_LINE_BYTES:
        raise ValueError(TOO_LONG)
    return file.read(num_bytes)


def _opens_array(path: Path) -> bool:
    """Say whether a `.json` file is an array, and not JSON Lines. Raises `DataError` if it is neither."""
    try:
        with path.open("rb") as file:
            line = _first_line(file)
    except OSError as error:
        raise cannot_be_read(path, error) from error
    except ValueError as error:
        raise DataError(f"{path}: its first line is {error}") from error
    if not line or line == b"[":
        return bool(line)
    try:
        is_object = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        is_object = False
    if not is_object:
        raise DataError(
            f"{path} holds neither an array of objects nor one object per line; if the records are in a field of one "
            f"object, jq -c '.FIELD[]' {path} > {path}l writes them as lines; source key format = \"text\" reads the "
            "whole file as one text"
        )
    return False


def _first_line(file: BinaryIO) -> bytes:
    """Read the first line that is not blank. An array often is one line, of any length: only its bracket is read."""
    file.seek(len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0)
    visible = b""
    while not visible and (block := file.read(SCAN_BYTES)):
        visible = block.lstrip()
    if visible.startswith(b"["):
        return b"["
    file.seek(-len(visible), os.SEEK_CUR)
    return read_bounded_line(file)


# CSV.


def csv_rows(lines: Iterator[str] | list[str], delimiter: str) -> Iterator[list[str]]:
    """Return the rows of CSV. Raises `csv.Error` at a row that no reader would take apart in one way only."""
    csv.field_size_limit(MOST_LINE_BYTES)  # the default, 128 Ki characters, is less than long texts have
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _index_csv(path: Path, kind: str, file: BinaryIO, file_bytes: int) -> FileIndex:
    """Index the rows of CSV. A row may take several lines, inside quotes."""
    consumed = 0
    progress = Progress(f"indexing {path}", text=size_text)

    def lines() -> Iterator[str]:
        nonlocal consumed
        try:
            while line := read_bounded_line(file):
                # Latin 1 keeps one character per byte. Everything that parts rows is ASCII.
                yield line.removeprefix(b"" if consumed else BYTE_ORDER_MARK).decode("latin-1")
                consumed += len(line)
                progress.advance(len(line))
        except ValueError as error:
            raise DataError(f"{path}: the line at byte {consumed} is {error}") from error

    delimiter = "\t" if kind == "tsv" else _delimiter(file)
    rows = csv_rows(lines(), delimiter)
    header = _header(path, rows)
    if not header and file_bytes:
        raise DataError(f"{path}, row 1: it is blank; the first row names the columns")
    starts = array("q")
    while True:
        # The reader takes exactly the lines of a row, so the next row begins after them. The row before is counted by now.
        begins = file.tell()
        try:
            row = next(rows, None)
        except csv.Error:
            row = []  # a bad record, which is named when it is read
        if row is None:
            starts.append(begins)
            return FileIndex(path, kind, file_bytes, np.frombuffer(starts, dtype=np.int64), header, delimiter)
        starts.append(begins)


def _delimiter(file: BinaryIO) -> str:
    """Return the delimiter of the header: a semicolon, as some spreadsheets write, if it has no comma."""
    header = file.readline(MOST_LINE_BYTES)
    file.seek(0)
    return ";" if b";" in header and b"," not in header else ","


def _header(path: Path, rows: Iterator[list[str]]) -> tuple[str, ...]:
    try:
        names = [name.encode("latin-1").decode() for name in next(rows, [])]
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path}, row 1: the header is not valid UTF-8 (byte 0x{error.object[error.start]:02x}); "
            "export the file as CSV in UTF-8"
        ) from error
    except csv.Error as error:
        raise DataError(f"{path}, row 1: the header is not valid CSV: {error}") from error
    if len(set(names)) < len(names) or "" in names:
        raise DataError(f"{path}, row 1: the header has an empty or a repeated name: {', '.join(names)}")
    return tuple(names)
