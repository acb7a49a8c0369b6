"""Which documents a source holds, in which order, and the content of each, read piece by piece.

A document is a whole text file, or one record of a file. Long text comes in pieces, so that memory stays small
and a saved position never holds more than one piece. Files of plain text and plain JSONL are indexed (8 bytes of
memory per line) and read in any order; what can only be read in sequence is a stream (`streams.py`).
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from torchround.config import SourceTable
from torchround.data.document_types import Content, Cursor, Document
from torchround.data.errors import DataError
from torchround.data.formats.records import RecordReader
from torchround.data.formats.source_files import (
    PIECE_SIZE,
    kind_of,
    line_starts,
    piece_end,
    read_file_piece,
    read_line,
    size_bytes,
)

BLOCK_RECORDS = 8192
BLOCK_BYTES = 1 << 25


class Order(Protocol):
    """Documents of a source as places in a pass over them."""

    def first_place(self) -> Cursor:
        """Where a pass begins."""
        ...

    def locate(self, place: Cursor, key: str | None) -> tuple[Document, Cursor] | None:
        """The document at a place of the pass shuffled by `key`, and the place after it; `None` at the end."""
        ...

    def count(self) -> int:
        """Documents of one pass, blank ones included. May have to read all of it. Raises `DataError`."""
        ...

    def fingerprint(self) -> str:
        """What must be unchanged for a saved place to mean the same document; where it lies may differ."""
        ...


class Source:
    """The documents of one element of `data.sources`. Raises `DataError` where it has none."""

    def __init__(self, table: SourceTable, order: Order, records: RecordReader) -> None:
        self.name = table.path
        self._order = order
        self._records = records
        self._last: tuple[Document, Content] | None = None
        self.first_place = order.first_place
        self.locate = order.locate
        self.count = order.count

    def read(self, document: Document, offset: int) -> tuple[Content, int | None]:
        """One piece of a document and the offset of the next one, `None` where the document ends.

        The first offset is 0; what it counts is the document's business. A conversation is one piece. Raises
        `DataError`.
        """
        if not document.number:
            return read_file_piece(document.path, offset)
        content = self._content(document)
        if isinstance(content, tuple):
            return content, None
        end = min(len(content), offset + PIECE_SIZE)
        if isinstance(content, str):
            end = piece_end(content, offset)
        return content[offset:end], end if end < len(content) else None

    def fingerprint(self) -> str:
        """What must be unchanged for a saved position to mean the same documents."""
        table = self._records.table
        return f"{self._order.fingerprint()} as {table.content} {table.field or ''}".rstrip()

    def _content(self, document: Document) -> Content:
        """That of the last record is kept, or a long one would be parsed once per piece."""
        if self._last is None or self._last[0] != document:
            record = document.record
            if record is None:
                record = read_line(document.path, document.start_byte)
            self._last = document, self._records.read(document, record)
        return self._last[1]


class FileIndex:
    """Plain text and JSONL files, in the order of their names; a place is the number of a document."""

    def __init__(self, table: SourceTable, paths: list[Path], records: RecordReader) -> None:
        self._paths = paths
        self._sizes = [size_bytes(path) for path in paths]
        if not any(self._sizes):
            raise DataError(f"source {table.path!r}: all of its {len(paths)} files are empty")
        self._line_starts = [
            line_starts(path) if kind_of(path, table.format) == "jsonl" else None for path in paths
        ]
        counts = [1 if starts is None else len(starts) for starts in self._line_starts]
        self._ends = np.array(list(accumulate(counts)), dtype=np.int64)
        self._shuffled: tuple[str, npt.NDArray[np.integer]] = "", np.empty(0, dtype=np.int64)

    def first_place(self) -> Cursor:
        """Document 0."""
        return [0]

    def locate(self, place: Cursor, key: str | None) -> tuple[Document, Cursor] | None:
        """The document at a place of the order that `key` gives, or as listed."""
        (position,) = place
        if position >= self.count():
            return None
        if key is None:
            return self._document(position), [position + 1]
        if self._shuffled[0] != key:
            self._shuffled = key, shuffled(self.count(), key)
        return self._document(int(self._shuffled[1][position])), [position + 1]

    def count(self) -> int:
        """Documents, blank lines and empty files included: they are passed over when read."""
        return int(self._ends[-1])

    def fingerprint(self) -> str:
        """The number and sizes of the files."""
        layout = hashlib.sha256(repr(self._sizes).encode()).hexdigest()
        return f"{self.count()} documents in {sum(self._sizes)} bytes (layout {layout[:12]})"

    def _document(self, index: int) -> Document:
        file = int(np.searchsorted(self._ends, index, side="right"))
        path, starts = self._paths[file], self._line_starts[file]
        if starts is None:
            return Document(path)
        line = index - int(self._ends[file]) + len(starts)
        return Document(path, int(starts[line]), line + 1)


@dataclass(frozen=True)
class Unit:
    """A part of a stream that can be opened by itself: a file, a row group, a shard.

    `open(n)` yields its documents from the n-th on; `count` may read through it. `size`: for the fingerprint.
    """

    open: Callable[[int], Iterator[Document]]
    count: Callable[[], int]
    size: int | str


class Stream:
    """Records that are only read in sequence. A place is unit, first record of a block, number in the block.

    With a key, units come in a shuffled order, and so do the records of each block (8192 records or 32 MiB, which
    is what memory holds). A saved place is three numbers: a resumed run reads the block again.
    """

    def __init__(self, units: list[Unit]) -> None:
        self._units = units
        self._block = Block()
        self._reading: tuple[int, int, Iterator[Document]] = -1, 0, iter(())

    def first_place(self) -> Cursor:
        """The first record of the first unit."""
        return [0, 0, 0]

    def locate(self, place: Cursor, key: str | None) -> tuple[Document, Cursor] | None:
        """The document at a place; finds the next unit where one has ended."""
        rank, start, index = place
        while rank < len(self._units):
            block = self._find_block(rank, start, key)
            if block.documents:
                ends = index + 1 == len(block.documents)
                after = [rank, start + len(block.documents), 0] if ends else [rank, start, index + 1]
                return block.documents[index], after
            rank, start, index = rank + 1, 0, 0
        return None

    def count(self) -> int:
        """The sum over units."""
        return sum(unit.count() for unit in self._units)

    def fingerprint(self) -> str:
        """The number and sizes of the units."""
        layout = hashlib.sha256(repr([unit.size for unit in self._units]).encode()).hexdigest()
        return f"{len(self._units)} parts (layout {layout[:12]})"

    def _find_block(self, rank: int, start: int, key: str | None) -> "Block":
        if self._block.identity != (rank, start, key):
            unit = rank if key is None else int(shuffled(len(self._units), key)[rank])
            documents = self._read(unit, start)
            if key is not None:
                order = shuffled(len(documents), f"{key}/{unit}/{start}")
                documents = [documents[index] for index in order.tolist()]
            self._block = Block((rank, start, key), documents)
        return self._block

    def _read(self, unit: int, start: int) -> list[Document]:
        """The records of a unit from `start` on that make up a block; none at its end."""
        if self._reading[:2] != (unit, start):
            self._reading = unit, start, self._units[unit].open(start)
        records = self._reading[2]
        documents: list[Document] = []
        num_bytes = 0
        while len(documents) < BLOCK_RECORDS and num_bytes < BLOCK_BYTES:
            document = next(records, None)
            if document is None:
                break
            documents.append(document)
            num_bytes += size_of(document.record)
        self._reading = unit, start + len(documents), records
        return documents


@dataclass(frozen=True)
class Block:
    """Documents of a stream in the order they are visited in, and which ones: rank of the unit, start, key."""

    identity: tuple[int, int, str | None] = (-1, 0, None)
    documents: list[Document] = field(default_factory=list)


def size_of(record: object) -> int:
    """About the bytes that a record takes, by the length of the strings and lists in it."""
    if isinstance(record, (str, bytes)):
        return len(record)
    if isinstance(record, dict):
        return sum(size_of(value) for value in record.values())
    if isinstance(record, list):
        return 8 * len(record) + sum(size_of(value) for value in record if not isinstance(value, int))
    return 8


def shuffled(count: int, key: str) -> npt.NDArray[np.integer]:
    """`range(count)` in an order fixed by `key`, the same with any version of any library; 4 bytes a number.

    The numbers are sorted by a hash of them (SplitMix64, Steele et al. 2014, which has no collisions).
    """
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest()[:8], dtype="<u8")
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)  # in place: each copy of 10 M documents would take 80 MB
    mixed += seed
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return np.argsort(mixed, kind="stable").astype(np.uint32 if count < 2**32 else np.int64)
