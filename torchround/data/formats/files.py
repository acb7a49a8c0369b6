"""Finds the files that a path or glob names and where each record in a file begins, and reads text and records.

The formats here are text (one document per file), JSON Lines, JSON arrays, CSV and TSV. An index takes 8 bytes per
record, so that records can be read in any order. Every read compares the file's size with the size that was indexed:
in a changed file the offsets would point into other records.
"""

import codecs
import csv
import glob
import json
import logging
import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np

from torchround.data.document_types import (
    DataError,
    DataFileError,
    Document,
    Record,
    TokenIds,
    cannot_be_read,
)
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress

logger = logging.getLogger(__name__)
PYTHON_STDLIB = "python-stdlib"
NOT_STDLIB_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
JSONL_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
KINDS = {".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
UNITS = {"jsonl": "line", "json": "record", "csv": "row", "tsv": "row"}
BYTE_ORDER_MARK = codecs.BOM_UTF8
MOST_LINE_BYTES = 1 << 27  # a record takes several times its size in memory
TOO_LONG = f"longer than {MOST_LINE_BYTES >> 20} MiB; cut such texts into records"
PIECE_SIZE = 1 << 16
SCAN_BYTES = 1 << 20
LINE_START = re.compile(r"\n(?=[^\s/])")
SPACE = re.compile(r"(?<=\S) (?=\S)")
JSON_SPACE = re.compile(r"[ \t\r\n]*")
LEFT_UNTRIED = 128  # last characters of a text that is cut anywhere: a cut is judged by what comes after it
SplitsAt = Callable[[str, int], bool]
"""Says whether cutting a text at a place leaves its tokens as they are."""


def find_files(path: str) -> list[Path]:
    """Return the named file, or the files that a glob matches, sorted by name. Raises `DataError` if no file exists."""
    if path == PYTHON_STDLIB:
        return _stdlib_files()
    path = os.path.expanduser(path)
    if is_saved_dataset(path):
        raise DataError(
            f'source {path!r} is a folder that save_to_disk wrote; source key format = "dataset" reads it'
        )
    if os.path.isdir(path):
        such = f"{path.rstrip('/')}/**/*.jsonl"
        raise DataError(f"source {path!r} is a folder; name its files with a glob such as {such!r}")
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.exists(path):  # opening a pipe would wait forever, and a device may be endless
        raise DataError(f"source {path!r}: {path}: not an ordinary file")
    if not glob.has_magic(path):
        raise DataError(f"source {path!r} does not exist (working directory: {os.getcwd()})")
    names = sorted(glob.glob(_literal_beginning(path), recursive=True))
    broken = next((name for name in names if os.path.islink(name) and not os.path.exists(name)), None)
    if broken is not None:
        raise DataError(f"source {path!r}: {broken} is a link to {os.readlink(broken)}, which does not exist")
    # A link may lead to a file that has another name here, or even into its own folder: each file is read once.
    found: dict[str, str] = {}
    for name in filter(os.path.isfile, names):
        found.setdefault(os.path.realpath(name), name)
    if not found:
        hint = "; [ begins a set of letters, and [[] means the letter [ itself" if "[" in path else ""
        raise DataError(f"source {path!r}: no file matches (working directory: {os.getcwd()}){hint}")
    return [Path(name) for name in found.values()]


def _literal_beginning(path: str) -> str:
    """Escape the glob letters of the leading folders that exist under just these names, such as `data/run[1]`."""
    *folders, last = path.split("/")
    for count in range(len(folders), 0, -1):
        if os.path.isdir(beginning := "/".join(folders[:count])):
            return "/".join([glob.escape(beginning), *folders[count:], last])
    return path


def is_saved_dataset(folder: str | Path) -> bool:
    """Say whether a folder was written by `save_to_disk` of the package datasets."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def _stdlib_files() -> list[Path]:
    """Return the modules of Python's own library, without tests, installed packages and files that are not UTF-8."""
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


def kind_of(path: Path, format: str) -> str:
    """Return `text`, `jsonl`, `json`, `csv`, `tsv` or `parquet`. The format `auto` decides by the ending of the name."""
    if format != "auto":
        return format
    # Some systems write endings in capitals (`EXPORT.CSV`), which would otherwise be one text.
    if path.name.lower().endswith(JSONL_ENDINGS):
        return "jsonl"
    return KINDS.get(path.suffix.lower(), "text")


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".zst")


def size_bytes(path: Path) -> int:
    """Return the size of a file. Raises `DataFileError` if it cannot be opened."""
    # Opened and not only asked for its size: a file without permission to read should fail here, at the start.
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise cannot_be_read(path, error) from error


def refuse_changed(path: Path | str, now_bytes: int, were_bytes: int | None) -> None:
    """Raise `DataFileError` if a file has another size than at the run's start. `None`: the size is not known."""
    if were_bytes is not None and now_bytes != were_bytes:
        raise DataFileError(
            f"{path}: has {now_bytes} bytes and had {were_bytes} when the run began; another program has changed it"
        )


# Records.


@dataclass(frozen=True, slots=True)
class FileIndex:
    """The records of one plain file of `file_bytes` bytes.

    `starts` `[n + 1]` int64 holds the byte at which each record begins, and the end of the last one. It is None if the
    file is one text. `header` and `delimiter` are those of CSV.
    """

    path: Path
    kind: str
    file_bytes: int
    starts: TokenIds | None = field(default=None, repr=False, compare=False)
    header: tuple[str, ...] = ()
    delimiter: str = ","

    def __len__(self) -> int:
        return 1 if self.starts is None else len(self.starts) - 1

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
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        if end - start > MOST_LINE_BYTES:
            raise DataError(f"{self.document(index)}: {TOO_LONG}")
        try:
            with self.path.open("rb") as file:
                refuse_changed(self.path, os.fstat(file.fileno()).st_size, self.file_bytes)
                file.seek(start)
                data = file.read(end - start)
        except OSError as error:
            raise cannot_be_read(self.path, error) from error
        if self.kind == "jsonl":
            return data
        if self.kind == "json":
            return data.rstrip(b" \t\r\n,")
        return self._row(data, str(self.document(index))) if data.strip() else b""

    def _row(self, data: bytes, where: str) -> Record:
        try:
            values = next(_csv_rows([data.decode()], self.delimiter))
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(f"{where}: not valid CSV in UTF-8: {error}") from error
        if len(values) != len(self.header):
            raise DataError(f"{where}: {len(values)} values, and the header has {len(self.header)} columns")
        return dict(zip(self.header, values, strict=True))


def index_file(path: Path, format: str) -> FileIndex:
    kind, file_bytes = kind_of(path, format), size_bytes(path)
    if kind == "text":
        return FileIndex(path, kind, file_bytes)
    try:
        if kind == "json":
            kind = "json" if _opens_array(path) else "jsonl"
        if kind == "json":
            return FileIndex(path, kind, file_bytes, _array_starts(path))
        if kind == "jsonl":
            return FileIndex(path, kind, file_bytes, _line_starts(path))
        with path.open("rb") as file:
            return _index_csv(path, kind, file, file_bytes)
    except OSError as error:
        raise cannot_be_read(path, error) from error


def _line_starts(path: Path) -> TokenIds:
    """Return the byte offset of each line, and the file's end. A newline at the end begins no further line."""
    starts = array("q", [0])  # grows in place: joining arrays at the end would need twice the memory
    offset = 0
    progress = Progress(f"indexing {path}", text=size_text)
    for block in _blocks(path):
        progress.advance(len(block))
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        starts.frombytes((ends.astype(np.int64) + (offset + 1)).tobytes())
        offset += len(block)
    if starts[-1] != offset:
        starts.append(offset)
    return np.frombuffer(starts, dtype=np.int64)


def _opens_array(path: Path) -> bool:
    """Say whether a `.json` file is an array, and not JSON Lines. Raises `DataError` if it is neither."""
    with path.open("rb") as file:
        line = b"\n"
        while line and not line.strip():
            line = file.readline(MOST_LINE_BYTES).removeprefix(BYTE_ORDER_MARK)
    if not line or line.lstrip().startswith(b"["):
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


def _array_starts(path: Path) -> TokenIds:
    """Return the bytes `[n + 1]` at which the elements of a JSON array begin, and at which the last one ends.

    The whole file is in memory meanwhile. Raises `DataError` with the byte at which it is no array.
    """
    # In Latin 1 a character is a byte. JSON's own characters are ASCII, and letters in strings do not matter here.
    text = path.read_bytes().decode("latin-1")
    decode, starts = json.JSONDecoder().raw_decode, array("q")
    at = _after_space(text, text.index("[") + 1)
    try:
        while text[at : at + 1] != "]":
            starts.append(at)
            at = _after_space(text, decode(text, at)[1])
            if text[at : at + 1] == ",":
                at = _after_space(text, at + 1)
                if text[at : at + 1] == "]":
                    raise ValueError("a bracket follows a comma")
            elif text[at : at + 1] != "]":
                raise ValueError("no comma or bracket follows the element")
        end = _after_space(text, at + 1)
        if end < len(text):
            raise ValueError("more text follows the array")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a valid JSON array at byte {at}: {error}") from error
    starts.append(at)
    return np.frombuffer(starts, dtype=np.int64)


def _after_space(text: str, at: int) -> int:
    found = JSON_SPACE.match(text, at)
    return at if found is None else found.end()


def _csv_rows(lines: Iterator[str] | list[str], delimiter: str) -> Iterator[list[str]]:
    """Return the rows of CSV. Raises `csv.Error` at a row that no reader would take apart in one way only."""
    csv.field_size_limit(MOST_LINE_BYTES)  # the default, 128 Ki characters, is less than long texts have
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _index_csv(path: Path, kind: str, file: BinaryIO, file_bytes: int) -> FileIndex:
    """Index the rows of CSV. A row may take several lines, inside quotes."""

    def lines() -> Iterator[str]:
        while line := file.readline(MOST_LINE_BYTES + 1):
            if len(line) > MOST_LINE_BYTES:
                raise DataError(f"{path}: the line that ends after byte {file.tell()} is {TOO_LONG}")
            # Latin 1 keeps one character per byte. Everything that parts rows is ASCII.
            yield line.decode("latin-1")

    first = file.readline(MOST_LINE_BYTES)
    file.seek(len(BYTE_ORDER_MARK) if first.startswith(BYTE_ORDER_MARK) else 0)
    # Some spreadsheets write semicolons.
    usual = ";" if b";" in first and b"," not in first else ","
    rows = _csv_rows(lines(), delimiter := "\t" if kind == "tsv" else usual)
    try:
        header = tuple(name.encode("latin-1").decode() for name in next(rows, []))
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}, row 1: the header is not valid CSV in UTF-8: {error}") from error
    if (not header and file_bytes) or len(set(header)) < len(header) or "" in header:
        names = ", ".join(header) or "none"
        raise DataError(f"{path}, row 1: the header has no, an empty or a repeated name: {names}")
    starts = array("q")
    while True:
        # The reader takes exactly the lines of a row, so the next row begins after them. The row before is counted by now.
        starts.append(file.tell())
        try:
            if next(rows, None) is None:
                break
        except csv.Error:
            pass  # a bad record, which is named when it is read
    return FileIndex(path, kind, file_bytes, np.frombuffer(starts, dtype=np.int64), header, delimiter)


# Text.


def read_file_piece(
    path: Path | str, offset: int, file_bytes: int | None = None, splits_at: SplitsAt | None = None
) -> tuple[str, int | None]:
    """Read the piece of text at byte `offset`; return it and the next offset, None at the end.

    Raises `DataError`: a `DataFileError` if the file has another size than `file_bytes` or cannot be read.
    """
    try:
        with open(path, "rb") as file:
            now_bytes = os.fstat(file.fileno()).st_size
            refuse_changed(path, now_bytes, file_bytes)
            file.seek(offset)
            data = file.read(PIECE_SIZE)
            ends = offset + len(data) >= now_bytes
    except OSError as error:
        raise cannot_be_read(path, error) from error
    try:
        # Incremental: a piece may end in the middle of a character, whose bytes then belong to the next piece.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=ends)
    except UnicodeDecodeError as error:
        line, bad = _line_of(Path(path), offset + error.start), error.object[error.start]
        raise DataError(f"{path}, line {line}: not valid UTF-8 (byte 0x{bad:02x}: {error.reason})") from error
    if ends:
        return text, None
    piece = text[: _cut_point(text, splits_at)]
    return piece, offset + len(piece.encode())


def piece_end(text: str, offset: int, splits_at: SplitsAt | None = None) -> int:
    """Return the end, in characters, of the piece that begins at character `offset`."""
    if len(text) - offset <= PIECE_SIZE:
        return len(text)
    return offset + _cut_point(text[offset : offset + PIECE_SIZE], splits_at)


def _cut_point(text: str, splits_at: SplitsAt | None) -> int:
    """Return how many characters of `text` form a piece, if more text follows it.

    The pieces have the tokens of the whole text if `splits_at` accepts the place. The first choice is the start of a line that
    begins with a visible character other than `/`, because most patterns end a token there. GPT-2's does not after an
    empty line: the usual way out is a space. A text that has no such place is cut at the first choice.
    """
    line_starts = [match.end() for match in LINE_START.finditer(text)]
    usual = line_starts[-1] if line_starts else text.rfind("\n") + 1 or max(0, text.rfind(" ")) or len(text)
    if splits_at is None or splits_at(text, usual):
        return usual
    spaces = [match.start() for match in SPACE.finditer(text, len(text) // 2)]
    anywhere = range(1, len(text) - LEFT_UNTRIED)
    # Few of a kind: in text with a line between paragraphs, every line start fails and the first space is right.
    tried = (*line_starts[:-9:-1], *spaces[:-33:-1], *anywhere[:-257:-1])
    return next((place for place in tried if splits_at(text, place)), usual)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(SCAN_BYTES):
            yield block


def _line_of(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that holds byte `offset` of a file."""
    line = 1
    for block in _blocks(path):
        line += block[:offset].count(b"\n")
        offset = max(0, offset - len(block))
    return line
