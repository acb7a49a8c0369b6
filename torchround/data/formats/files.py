"""Finds the files that a path or glob names and where each record in a file begins, and reads text and records.

The formats here are text (one document per file), JSON Lines and JSON arrays. An index takes 8 bytes per record, so
that records can be read in any order. Every read compares the file's size with the size that was indexed: in a changed
file the offsets would point into other records.
"""

import codecs
import glob
import json
import os
import re
import sysconfig
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from torchround.data.document_types import (
    DataError,
    DataFileError,
    Document,
    TokenIds,
    cannot_be_read,
)
from torchround.planning.memory import size_text
from torchround.untrusted.terminal import Progress

PYTHON_STDLIB = "python-stdlib"
NOT_STDLIB_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
KINDS = {
    **dict.fromkeys((".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst"), "jsonl"),
    ".json": "json",
    ".parquet": "parquet",
}
UNREAD = (".csv", ".tsv")
BYTE_ORDER_MARK = codecs.BOM_UTF8
MOST_LINE_BYTES = 1 << 27  # a record takes several times its size in memory
TOO_LONG = f"longer than {MOST_LINE_BYTES >> 20} MiB; cut such texts into records"
PIECE_SIZE = 1 << 16
SCAN_BYTES = 1 << 20
LINE_START = re.compile(r"\n(?=[^\s/])")
SPACE = re.compile(r"(?<=\S) (?=\S)")
NEXT_IN_ARRAY = re.compile(r"[^ \t\r\n,]")
LEFT_UNTRIED = 128  # last characters of a text that is cut anywhere: a cut is judged by what comes after it
SplitsAt = Callable[[str, int], bool]
"""Says whether cutting a text at a place leaves its tokens as they are."""


def find_files(path: str) -> list[Path]:
    """Find the named file, or the files that a glob matches, sorted by name. Raises `DataError` if no file exists."""
    if path == PYTHON_STDLIB:
        return _stdlib_files()
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        such = f"{path.rstrip('/')}/**/*.jsonl"
        raise DataError(
            f"source {path!r} is a folder; name its files with a glob such as {such!r}, or, if save_to_disk wrote it, "
            'give the source key format = "dataset"'
        )
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.exists(path):  # opening a pipe would wait forever, and a device may be endless
        raise DataError(f"source {path!r}: not an ordinary file")
    # A link may lead to a file that has another name here, or even into its own folder: each file is read once. A broken
    # link is an error as soon as it is opened.
    found: dict[str, str] = {}
    for name in sorted(glob.glob(path, recursive=True)):
        if os.path.isfile(name) or not os.path.exists(name):
            found.setdefault(os.path.realpath(name), name)
    if not found:
        raise DataError(f"source {path!r}: there is no such file (working directory: {os.getcwd()})")
    return [Path(name) for name in found.values()]


def _stdlib_files() -> list[Path]:
    """List the modules of Python's own library, without tests, installed packages and files that are not UTF-8."""
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
    """Choose `text`, `jsonl`, `json` or `parquet`. The format `auto` decides by the ending of the name.

    Raises `DataError` for a table in text, which would otherwise be read as one text.
    """
    if format != "auto":
        return format
    # Some systems write endings in capitals.
    name = path.name.lower()
    if name.endswith(UNREAD):
        raise DataError(
            f'{path}: CSV and TSV are not read; the package datasets reads a folder of them (format = "dataset")'
        )
    return next((kind for ending, kind in KINDS.items() if name.endswith(ending)), "text")


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in (".gz", ".zst")


def size_bytes(path: Path) -> int:
    """Measure the size of a file. Raises `DataFileError` if it cannot be opened."""
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
    file is one text. `unit` names a record in messages.
    """

    path: Path
    file_bytes: int
    starts: TokenIds | None = field(default=None, repr=False, compare=False)
    unit: str = "line"

    def __len__(self) -> int:
        return 1 if self.starts is None else len(self.starts) - 1

    def document(self, index: int) -> Document:
        if self.starts is None:
            return Document(self.path, file_bytes=self.file_bytes)
        start_byte = int(self.starts[index])
        return Document(self.path, start_byte, index + 1, self.unit, partial(self.read, index))

    def read(self, index: int) -> bytes:
        """Read record `index`. Raises `DataFileError` if the file cannot be read or has changed."""
        assert self.starts is not None, f"{self.path} is one text and has no records"
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        if end - start > MOST_LINE_BYTES:
            raise DataFileError(f"{self.document(index)}: {TOO_LONG}")
        try:
            with self.path.open("rb") as file:
                refuse_changed(self.path, os.fstat(file.fileno()).st_size, self.file_bytes)
                file.seek(start)
                data = file.read(end - start)
        except OSError as error:
            raise cannot_be_read(self.path, error) from error
        return data.rstrip(b" \t\r\n,") if self.unit == "record" else data


def index_file(path: Path, format: str) -> FileIndex:
    kind, file_bytes = kind_of(path, format), size_bytes(path)
    if kind == "text":
        return FileIndex(path, file_bytes)
    try:
        if kind == "json" and _opens_array(path):
            return FileIndex(path, file_bytes, _array_starts(path), "record")
        return FileIndex(path, file_bytes, _line_starts(path))
    except OSError as error:
        raise cannot_be_read(path, error) from error


def _line_starts(path: Path) -> TokenIds:
    """Find the byte offset of each line, and the file's end. A newline at the end begins no further line."""
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
    """Say whether a `.json` file is an array, and not JSON Lines."""
    with path.open("rb") as file:
        beginning = file.read(PIECE_SIZE).removeprefix(BYTE_ORDER_MARK)
    return beginning.lstrip().startswith(b"[")


def _array_starts(path: Path) -> TokenIds:
    """Find the bytes `[n + 1]` at which the elements of a JSON array begin, and at which the last one ends.

    The whole file is in memory meanwhile. Raises `DataError` with the byte at which it is no array.
    """
    # In Latin 1 a character is a byte. JSON's own characters are ASCII, and letters in strings do not matter here.
    text = path.read_bytes().decode("latin-1")
    decode, starts, at = json.JSONDecoder().raw_decode, array("q"), text.index("[") + 1
    try:
        while (found := NEXT_IN_ARRAY.search(text, at)) is not None and found[0] != "]":
            at = found.start()
            starts.append(at)
            _, at = decode(text, at)
        if found is None:
            raise ValueError("it has no end")
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a valid JSON array at byte {at}: {error}") from error
    starts.append(found.start())
    return np.frombuffer(starts, dtype=np.int64)


# Text.


def read_file_piece(
    path: Path | str, offset: int, file_bytes: int | None, splits_at: SplitsAt
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
        bad, place = error.object[error.start], offset + error.start
        raise DataError(f"{path}: not valid UTF-8 at byte {place} (0x{bad:02x}: {error.reason})") from error
    if ends:
        return text, None
    piece = text[: _cut_point(text, splits_at)]
    return piece, offset + len(piece.encode())


def piece_end(text: str, offset: int, splits_at: SplitsAt) -> int:
    """Find the end, in characters, of the piece that begins at character `offset`."""
    if len(text) - offset <= PIECE_SIZE:
        return len(text)
    return offset + _cut_point(text[offset : offset + PIECE_SIZE], splits_at)


def _cut_point(text: str, splits_at: SplitsAt) -> int:
    """Find how many characters of `text` form a piece, if more text follows it.

    The pieces have the tokens of the whole text if `splits_at` accepts the place. The first choice is the start of a line that
    begins with a visible character other than `/`, because most patterns end a token there. GPT-2's does not after an
    empty line: the usual way out is a space. A text that has no such place is cut at the first choice.
    """
    line_starts = [match.end() for match in LINE_START.finditer(text)]
    usual = line_starts[-1] if line_starts else text.rfind("\n") + 1 or max(0, text.rfind(" ")) or len(text)
    if splits_at(text, usual):
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
