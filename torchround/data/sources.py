"""Which documents a source holds, and the text of each, read piece by piece.

A document is a whole text file or one line of a JSONL file. Long text comes in pieces, so that memory stays
small and a saved position never holds more than one piece. Building a source lists its files and, for JSONL,
finds where each line starts (8 bytes of memory per line).
"""

import codecs
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from torchround.config import SourceTable
from torchround.data.errors import DataError

PYTHON_STDLIB = "python-stdlib"
NOT_STDLIB_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
PIECE_SIZE = 1 << 16
SCAN_BYTES = 1 << 24


@dataclass(frozen=True)
class Document:
    """Where a document is stored: from `start_byte` of a file to its end (`line` 0), or one line, from 1."""

    path: Path
    start_byte: int = 0
    line: int = 0

    def __str__(self) -> str:
        return f"{self.path}, line {self.line}" if self.line else str(self.path)


class Source:
    """The documents of one `[data] sources` entry, numbered by file name and, in a file, by line.

    Raises `DataError` where no file matches, a file cannot be read, or all files are empty.
    """

    def __init__(self, table: SourceTable) -> None:
        self.name = table.path
        self._text_field = table.text_field
        self._paths = _find_files(table.path)
        self._sizes = [_size_bytes(path) for path in self._paths]
        if not any(self._sizes):
            raise DataError(f"source {self.name!r}: all of its {len(self._paths)} files are empty")
        self._line_starts = [
            _line_starts(path) if _is_jsonl(path, table.format) else None for path in self._paths
        ]
        counts = [1 if starts is None else len(starts) for starts in self._line_starts]
        self._last_record: tuple[Document, str] | None = None
        self._ends = np.array(list(accumulate(counts)), dtype=np.int64)

    def __len__(self) -> int:
        """Documents, blank lines and empty files included: they are passed over when read."""
        return int(self._ends[-1])

    def document(self, index: int) -> Document:
        """Where document `0 <= index < len` is stored."""
        file = int(np.searchsorted(self._ends, index, side="right"))
        starts = self._line_starts[file]
        if starts is None:
            return Document(self._paths[file])
        line = index - int(self._ends[file]) + len(starts)
        return Document(self._paths[file], int(starts[line]), line + 1)

    def read(self, document: Document, offset: int) -> tuple[str, int | None]:
        """One piece of text and the offset of the next one, `None` where the document ends.

        The first offset is 0; what it counts is the document's business. Raises `DataError`.
        """
        if not document.line:
            return _read_file_piece(document.path, offset)
        text = self._record(document)
        end = _piece_end(text, offset)
        return text[offset:end], end if end < len(text) else None

    def fingerprint(self) -> str:
        """What must be unchanged for a saved position to mean the same documents; where they lie may differ."""
        layout = hashlib.sha256(repr((self._sizes, self._text_field)).encode()).hexdigest()
        return f"{len(self)} documents in {sum(self._sizes)} bytes (layout {layout[:12]})"

    def _record(self, document: Document) -> str:
        """The text of a record; that of the last one is kept, or a long one would be parsed once per piece."""
        if self._last_record is None or self._last_record[0] != document:
            self._last_record = document, _read_record(document, self._text_field)
        return self._last_record[1]


def _find_files(path: str) -> list[Path]:
    if path == PYTHON_STDLIB:
        return _stdlib_files()
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        raise DataError(
            f"source {path!r} is a folder; name its files with a glob such as {path + '/**/*.txt'!r}"
        )
    if os.path.exists(path):
        return [Path(path)]
    if not glob.has_magic(path):
        raise DataError(f"source {path!r} does not exist (working directory: {os.getcwd()})")
    found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(f"source {path!r}: no file matches (working directory: {os.getcwd()})")
    return [Path(name) for name in found]


def _stdlib_files() -> list[Path]:
    """The library's own modules: no tests, no installed packages, nothing that is not UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not NOT_STDLIB_TEXT.intersection(path.relative_to(root).parts) and _is_utf8(path)
    ]
    if not files:
        raise DataError(f"source {PYTHON_STDLIB!r}: this Python has no source files in {root}")
    return files


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode()
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _is_jsonl(path: Path, format: str) -> bool:
    return format == "jsonl" or (format == "auto" and path.suffix == ".jsonl")


def _size_bytes(path: Path) -> int:
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _line_starts(path: Path) -> npt.NDArray[np.int64]:
    """Byte offset of each line; the end of the file begins no line."""
    starts = [np.zeros(1, dtype=np.int64)]
    offset = 0
    for block in _blocks(path):
        starts.append(np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n")) + (offset + 1))
        offset += len(block)
    joined = np.concatenate(starts)
    return joined[joined < offset]


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(SCAN_BYTES):
                yield block
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _read_file_piece(path: Path, offset: int) -> tuple[str, int | None]:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(PIECE_SIZE)
            ends = offset + len(data) >= os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=ends)
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, _line_of(path, offset + error.start), error)) from error
    if ends:
        return text, None
    piece = text[: _cut_point(text)]
    return piece, offset + len(piece.encode())


def _read_record(document: Document, text_field: str) -> str:
    """The text of one JSONL line; empty for a blank line."""
    path, line = document.path, document.line
    try:
        with path.open("rb") as file:
            file.seek(document.start_byte)
            data = file.readline()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if not data.strip():
        return ""
    try:
        record = json.loads(data.decode())
    except UnicodeDecodeError as error:
        raise DataError(_not_utf8(path, line, error)) from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{document}: not valid JSON: {error}") from error
    return _text_of(record, text_field, str(document))


def _text_of(record: Any, text_field: str, where: str) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON {type(record).__name__}, not an object with a field {text_field!r}")
    if text_field not in record:
        raise DataError(f"{where}: no field {text_field!r}; fields: {', '.join(sorted(record)) or 'none'}")
    text = record[text_field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {text_field!r} is a {type(text).__name__}, not a string")
    return text


def _not_utf8(path: Path, line: int, error: UnicodeDecodeError) -> str:
    return f"{path}, line {line}: not valid UTF-8 (byte 0x{error.object[error.start]:02x}: {error.reason})"


def _line_of(path: Path, offset: int) -> int:
    """The line, from 1, that byte `offset` of a file is in."""
    line = 1
    for block in _blocks(path):
        line += block[:offset].count(b"\n")
        offset = max(0, offset - len(block))
    return line


def _piece_end(text: str, offset: int) -> int:
    """Where the piece that begins at character `offset` ends."""
    if len(text) - offset <= PIECE_SIZE:
        return len(text)
    return offset + _cut_point(text[offset : offset + PIECE_SIZE])


LINE_START = re.compile(r"\n(?=[^\s/])")


def _cut_point(text: str) -> int:
    """Characters to take of a text that goes on: up to a line that begins with something visible.

    The patterns of the known vocabularies end a token there too (one also draws `/` to the newline before),
    so the pieces have the tokens that the whole text has. Without such a line: any line, a space, anywhere.
    """
    line_starts = [match.end() for match in LINE_START.finditer(text)]
    if line_starts:
        return line_starts[-1]
    return text.rfind("\n") + 1 or max(0, text.rfind(" ")) or len(text)
