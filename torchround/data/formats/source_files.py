"""Finds the files that a path or glob names, and reads plain text piece by piece and plain records line by line."""

import codecs
import glob
import os
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from torchround.data.document_types import TokenIds
from torchround.data.errors import DataError
from torchround.untrusted.data_limits import read_bounded_line

PYTHON_STDLIB = "python-stdlib"
NOT_STDLIB_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
JSONL_ENDINGS = (".jsonl", ".jsonl.gz", ".jsonl.zst")
FILES_SAMPLED = 1000
PIECE_SIZE = 1 << 16
SCAN_BYTES = 1 << 20


def find_files(path: str) -> list[Path]:
    """Return the named file, or the files that a glob matches, sorted by name. Raises `DataError` if no file exists."""
    if path == PYTHON_STDLIB:
        return _stdlib_files()
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        such = f"{path.rstrip('/')}/**/*{_usual_ending(path)}"
        raise DataError(f"source {path!r} is a folder; name its files with a glob such as {such!r}")
    if os.path.isfile(path):
        return [Path(path)]
    if os.path.exists(path):  # opening a pipe would wait forever, and a device may be endless
        raise DataError(f"source {path!r}: {path}: not an ordinary file")
    if not glob.has_magic(path):
        raise DataError(f"source {path!r} does not exist (working directory: {os.getcwd()})")
    found = sorted(name for name in glob.glob(path, recursive=True) if os.path.isfile(name))
    if not found:
        raise DataError(f"source {path!r}: no file matches (working directory: {os.getcwd()})")
    return [Path(name) for name in found]


def _usual_ending(folder: str) -> str:
    """Return the most common ending among the first files in and below `folder`, or `.txt` if no file has one."""
    names = (name for _, _, names in os.walk(folder) for name in sorted(names))
    endings = Counter(
        next((known for known in JSONL_ENDINGS if name.endswith(known)), os.path.splitext(name)[1])
        for name in islice(names, FILES_SAMPLED)
    )
    del endings[""]  # names that only begin with a dot have no ending
    return endings.most_common(1)[0][0] if endings else ".txt"


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
    """Return `text`, `jsonl` or `parquet`. The format `auto` decides by the ending of the name."""
    if format != "auto":
        return format
    if path.name.endswith(JSONL_ENDINGS):
        return "jsonl"
    return "parquet" if path.suffix == ".parquet" else "text"


def is_compressed(path: Path) -> bool:
    """Say whether the file is compressed, by the ending of its name."""
    return path.suffix in (".gz", ".zst")


def size_bytes(path: Path) -> int:
    """Return the size of a file. Raises `DataError` if it cannot be opened."""
    # Opened and not only asked for its size: a file without permission to read should fail here, at the start.
    try:
        with path.open("rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def line_starts(path: Path) -> TokenIds:
    """Return the byte offset `[lines]` of each line. A newline at the end of the file begins no further line."""
    starts = array("q", [0])  # grows in place: joining arrays at the end would need twice the memory
    offset = 0
    for block in _blocks(path):
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        starts.frombytes((ends.astype(np.int64) + (offset + 1)).tobytes())
        offset += len(block)
    if starts[-1] == offset:
        starts.pop()
    return np.frombuffer(starts, dtype=np.int64)


def read_line(path: Path | str, start_byte: int) -> bytes:
    """Read the line that begins at `start_byte`. Raises `DataError`, also for a line that is too long."""
    try:
        with open(path, "rb") as file:
            file.seek(start_byte)
            return read_bounded_line(file)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path}: the line at byte {start_byte} is {error}") from error


def read_file_piece(path: Path | str, offset: int) -> tuple[str, int | None]:
    """Read the piece of text at byte `offset`; return it and the next offset, None at the end. Raises `DataError`."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(PIECE_SIZE)
            ends = offset + len(data) >= os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        # Incremental: a piece may end in the middle of a character, whose bytes then belong to the next piece.
        text = codecs.getincrementaldecoder("utf-8")().decode(data, final=ends)
    except UnicodeDecodeError as error:
        line, bad = _line_of(Path(path), offset + error.start), error.object[error.start]
        raise DataError(f"{path}, line {line}: not valid UTF-8 (byte 0x{bad:02x}: {error.reason})") from error
    if ends:
        return text, None
    piece = text[: _cut_point(text)]
    return piece, offset + len(piece.encode())


def piece_end(text: str, offset: int) -> int:
    """Return the end, in characters, of the piece that begins at character `offset`."""
    if len(text) - offset <= PIECE_SIZE:
        return len(text)
    return offset + _cut_point(text[offset : offset + PIECE_SIZE])


LINE_START = re.compile(r"\n(?=[^\s/])")


def _cut_point(text: str) -> int:
    """Return how many characters of `text` form a piece, if more text follows it.

    The best cut is before a line that begins with a visible character. The patterns of the known vocabularies end a
    token there too, so the pieces have the same tokens as the whole text. A line that begins with `/` is avoided: one
    pattern joins `/` to the newline before it. Second best are any line, a space, and the end of `text`.
    """
    line_starts = [match.end() for match in LINE_START.finditer(text)]
    if line_starts:
        return line_starts[-1]
    return text.rfind("\n") + 1 or max(0, text.rfind(" ")) or len(text)


def _blocks(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            while block := file.read(SCAN_BYTES):
                yield block
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error


def _line_of(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that holds byte `offset` of a file."""
    line = 1
    for block in _blocks(path):
        line += block[:offset].count(b"\n")
        offset = max(0, offset - len(block))
    return line
