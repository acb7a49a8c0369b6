"""Finds the files that a path or glob names, finds the lines of a file, and reads plain text piece by piece."""

import codecs
import glob
import logging
import os
import re
import sysconfig
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from torchround.data.document_types import TokenIds
from torchround.data.errors import DataError, DataFileError, cannot_be_read
from torchround.planning.memory import size_text
from torchround.untrusted.progress import Progress

logger = logging.getLogger(__name__)
PYTHON_STDLIB = "python-stdlib"
NOT_STDLIB_TEXT = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
JSONL_ENDINGS = (".jsonl", ".ndjson", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".json.zst")
KINDS = {".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet"}
BYTE_ORDER_MARK = codecs.BOM_UTF8
# The first bytes of files that are often taken for text, and what to do about each.
PACKED = {
    b"PAR1": 'a parquet file: source key format = "parquet"',
    b"ARROW1": 'an Arrow file: format = "dataset" with the folder that save_to_disk wrote reads such files',
    b"\x1f\x8b": "a gzip archive: of these, only .jsonl.gz and .json.gz are read",
    b"\x28\xb5\x2f\xfd": "a zstd archive: of these, only .jsonl.zst and .json.zst are read",
    b"PK\x03\x04": "a zip archive, or a document of an office program: unpack it, or export it as CSV",
    b"BZh": "a bzip2 archive: unpack it",
    b"\xfd7zXZ": "an xz archive: unpack it",
    b"%PDF-": "a PDF file: extract its text",
}
FILES_SAMPLED, FOLDERS_SAMPLED = 1000, 1000
PIECE_SIZE = 1 << 16
SCAN_BYTES = 1 << 20
LINE_START = re.compile(r"\n(?=[^\s/])")
SPACE = re.compile(r"(?<=\S) (?=\S)")
LEFT_UNTRIED = 128  # last characters of a text that is cut anywhere: a cut is judged by what comes after it
SplitsAt = Callable[[str, int], bool]
"""Says whether cutting a text at a place leaves its tokens as they are."""


def find_files(path: str) -> list[Path]:
    """Return the named file, or the files that a glob matches, sorted by name. Raises `DataError` if no file exists."""
    if path == PYTHON_STDLIB:
        return _stdlib_files()
    path = os.path.expanduser(path)
    if os.path.isdir(path):
        if is_saved_dataset(path):
            raise DataError(
                f'source {path!r} is a folder that save_to_disk wrote; source key format = "dataset" reads it'
            )
        such = f"{path.rstrip('/')}/**/*{_usual_ending(path)}"
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
    found = [name for name in names if os.path.isfile(name)]
    if not found:
        hint = (
            "; [ begins a set of letters in a glob, and [[] means the letter [ itself" if "[" in path else ""
        )
        raise DataError(f"source {path!r}: no file matches (working directory: {os.getcwd()}){hint}")
    return [Path(name) for name in _each_once(path, found)]


def is_saved_dataset(folder: str | Path) -> bool:
    """Say whether a folder was written by `save_to_disk` of the package datasets."""
    return any(os.path.isfile(os.path.join(folder, name)) for name in ("dataset_dict.json", "state.json"))


def _literal_beginning(path: str) -> str:
    """Escape the glob letters of the leading folders that exist under just these names, such as `data/run[1]`."""
    *folders, last = path.split("/")
    for count in range(len(folders), 0, -1):
        beginning = "/".join(folders[:count])
        if os.path.isdir(beginning):
            return "/".join([glob.escape(beginning), *folders[count:], last])
    return path


def _each_once(path: str, names: list[str]) -> list[str]:
    """Leave out names that lead to a file of an earlier name, with a warning: a link may even lead into its own folder."""
    # Real paths are slow to find: one look-up for each folder and each link, instead of one for each file.
    folders = {folder: os.path.realpath(folder) for folder in {os.path.dirname(name) for name in names}}
    first_names: dict[str, str] = {}
    for name in names:
        folder, file = os.path.split(name)
        real = os.path.realpath(name) if os.path.islink(name) else os.path.join(folders[folder], file)
        first_names.setdefault(real, name)
    num_repeated = len(names) - len(first_names)
    if num_repeated:
        logger.warning(
            "source %r: %d of %d names are links to files that it has already; each file is read once",
            *(path, num_repeated, len(names)),
        )
    return list(first_names.values())


def _usual_ending(folder: str) -> str:
    """Return the most common ending among the first files in and below `folder`, or `.txt` if no file has one."""
    folders = islice(os.walk(folder, followlinks=True), FOLDERS_SAMPLED)  # links may lead round in circles
    names = (name for _, _, names in folders for name in sorted(names))
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
    """Return `text`, `jsonl`, `json`, `csv`, `tsv` or `parquet`. The format `auto` decides by the ending of the name."""
    if format != "auto":
        return format
    # Some systems write endings in capitals (`EXPORT.CSV`), which would otherwise be one text.
    if path.name.lower().endswith(JSONL_ENDINGS):
        return "jsonl"
    return KINDS.get(path.suffix.lower(), "text")


def is_compressed(path: Path) -> bool:
    """Say whether the file is compressed, by the ending of its name."""
    return path.suffix.lower() in (".gz", ".zst")


def size_bytes(path: Path) -> int:
    """Return the size of a file. Raises `DataError` if it cannot be opened."""
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


def refuse_packed(path: Path) -> None:
    """Raise `DataError` for a file that would be read as text and is an archive, or of another kind than text."""
    try:
        with path.open("rb") as file:
            begins = file.read(max(map(len, PACKED)))
    except OSError as error:
        raise cannot_be_read(path, error) from error
    for magic, advice in PACKED.items():
        if begins.startswith(magic):
            raise DataError(f"{path} is no text but {advice}")


def line_starts(path: Path) -> TokenIds:
    """Return the byte offset `[lines]` of each line. A newline at the end of the file begins no further line."""
    starts = array("q", [0])  # grows in place: joining arrays at the end would need twice the memory
    offset = 0
    progress = Progress(f"indexing {path}", text=size_text)
    for block in _blocks(path):
        progress.advance(len(block))
        ends = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
        starts.frombytes((ends.astype(np.int64) + (offset + 1)).tobytes())
        offset += len(block)
    if starts[-1] == offset:
        starts.pop()
    return np.frombuffer(starts, dtype=np.int64)


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
    try:
        with path.open("rb") as file:
            while block := file.read(SCAN_BYTES):
                yield block
    except OSError as error:
        raise cannot_be_read(path, error) from error


def _line_of(path: Path, offset: int) -> int:
    """Return the number, from 1, of the line that holds byte `offset` of a file."""
    line = 1
    for block in _blocks(path):
        line += block[:offset].count(b"\n")
        offset = max(0, offset - len(block))
    return line
