"""The two kinds of source: files whose documents can be read in any order, and records that come in sequence.

A document is a whole text file, or one record of a file. A source yields its content in pieces, so that memory
stays small and a saved position never holds more than one piece.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate, islice
from pathlib import Path

import numpy as np

from torchround.config import SourceTable
from torchround.data.document_types import Content, Cursor, DataError, Document
from torchround.data.formats.content import RecordReader
from torchround.data.formats.files import PIECE_SIZE, index_file, piece_end, read_file_piece
from torchround.data.shuffling import EpochKey, Order, epoch_order

BLOCK_RECORDS = 8192
BLOCK_BYTES = 1 << 25
QUICK_COUNT_SIZE = 1 << 23  # bytes of compressed files, or rows


class Source(ABC):
    """The documents of one entry of `data.sources`, in the order of a pass."""

    def __init__(self, table: SourceTable, records: RecordReader) -> None:
        self.name = table.path
        self.special_tokens = table.special_tokens
        self._records = records
        self._last_read: tuple[Document, Content] | None = None

    @abstractmethod
    def first_cursor(self) -> Cursor: ...

    @abstractmethod
    def locate(self, cursor: Cursor, key: EpochKey | None) -> tuple[Document, Cursor] | None:
        """Find the document at `cursor` and the cursor after it, or None at the end of the pass.

        `key` fixes the shuffled order of the pass; with None the documents come as listed.
        """

    @abstractmethod
    def first_documents(self, count: int) -> list[Document]:
        """List the first `count` documents as listed, or fewer if there are no more. Moves no cursor."""

    @abstractmethod
    def count(self) -> int | None:
        """Count the documents of one pass, blank ones included; None if that would take long. Raises `DataError`."""

    @abstractmethod
    def layout(self) -> str:
        """Describe the number and sizes of the files. Folders and file names do not matter."""

    def fingerprint(self) -> str:
        """Describe everything that must be unchanged for a saved position to mean the same documents."""
        table = self._records.table
        special = " with special tokens" if table.special_tokens else ""
        module = f" by {table.module}" if table.module else ""
        return f"{self.layout()} as {table.content} {table.field or ''}".rstrip() + special + module

    def read(self, document: Document, offset: int) -> tuple[Content, int | None]:
        """Read the piece of a document at `offset`; return it and the next offset, or None after the last piece.

        The first offset is 0. It counts bytes of a text file, and characters or token ids of a record. A
        conversation is a single piece. Raises `DataError`.
        """
        if document.record is None:
            return read_file_piece(document.path, offset, document.file_bytes, self._records.splits_at)
        if offset == 0:
            self._last_read = None  # a later pass reads the file again: it may be gone
        content = self._content(document)
        if isinstance(content, tuple):
            return content, None
        end = min(len(content), offset + PIECE_SIZE)
        if isinstance(content, str):
            end = piece_end(content, offset, self._records.splits_at)
        return content[offset:end], end if end < len(content) else None

    def _content(self, document: Document) -> Content:
        # A long record is asked for once per piece: keeping the last one avoids parsing it each time.
        if self._last_read is None or self._last_read[0] != document:
            record = document.record
            assert record is not None, f"{document} is a text and no record"
            if callable(record):
                record = record()
            self._last_read = document, self._records.read(document, record)
        return self._last_read[1]


class IndexedFiles(Source):
    """Indexed files, sorted by name. The cursor is a document's number. Raises `DataError` if there is no document."""

    def __init__(self, table: SourceTable, records: RecordReader, paths: list[Path]) -> None:
        super().__init__(table, records)
        self._files = [index_file(path, table.format) for path in paths]
        self._sizes = [file.file_bytes for file in self._files]
        # Documents up to the end of each file: a binary search in it finds the file of a document.
        self._ends = np.array(list(accumulate(map(len, self._files))), dtype=np.int64)
        if not self._ends[-1]:
            raise DataError(f"source {table.path!r}: none of its {len(paths)} files holds a record")
        self._shuffled: tuple[EpochKey | None, Order] = None, np.empty(0, dtype=np.int64)

    def first_cursor(self) -> Cursor:
        return [0]

    def locate(self, cursor: Cursor, key: EpochKey | None) -> tuple[Document, Cursor] | None:
        (number,) = cursor
        if number >= self.count():
            return None
        if key is None:
            return self._document(number), [number + 1]
        if self._shuffled[0] != key:
            # Kept for the whole pass: sorting all documents again for each one would be far too slow.
            self._shuffled = key, epoch_order(self.count(), key)
        return self._document(int(self._shuffled[1][number])), [number + 1]

    def first_documents(self, count: int) -> list[Document]:
        return [self._document(index) for index in range(min(count, self.count()))]

    def count(self) -> int:
        return int(self._ends[-1])

    def layout(self) -> str:
        digest = hashlib.sha256(repr(self._sizes).encode()).hexdigest()
        return f"{self.count()} documents in {sum(self._sizes)} bytes (layout {digest[:12]})"

    def _document(self, index: int) -> Document:
        file = int(np.searchsorted(self._ends, index, side="right"))
        found = self._files[file]
        return found.document(index - int(self._ends[file]) + len(found))


@dataclass(frozen=True)
class StreamPart:
    """A part of a record stream that can be opened by itself: a file, a row group, a shard.

    `open(n)` generates its documents from the n-th on. `count()` may have to read the whole part. `size` enters the
    fingerprint. It is a name, and `count()` is not called, if the size is unknown.
    """

    open: Callable[[int], Generator[Document, None, None]]
    count: Callable[[], int]
    size: int | str


class RecordStream(Source):
    """Records that can only be read in sequence. The cursor is: rank of the part, first record of a block, index in it.

    With a key, the parts come in a shuffled order, and so do the records within each block (8192 records or 32 MiB,
    which is what memory holds). A resumed run reads the block of the saved cursor again.
    """

    def __init__(self, table: SourceTable, records: RecordReader, parts: list[StreamPart]) -> None:
        super().__init__(table, records)
        self._parts = parts
        # Rank of the part, first record, key.
        self._block_id: tuple[int, int, EpochKey | None] = (-1, 0, None)
        self._block: list[Document] = []
        self._reading: tuple[int, int, Iterator[Document]] = -1, 0, iter(())

    def first_cursor(self) -> Cursor:
        return [0, 0, 0]

    def locate(self, cursor: Cursor, key: EpochKey | None) -> tuple[Document, Cursor] | None:
        rank, start, index = cursor
        while rank < len(self._parts):
            block = self._find_block(rank, start, key)
            if index < len(block):
                ends = index + 1 == len(block)
                after = [rank, start + len(block), 0] if ends else [rank, start, index + 1]
                return block[index], after
            rank, start, index = (rank, start + len(block), 0) if block else (rank + 1, 0, 0)
        return None

    def first_documents(self, count: int) -> list[Document]:
        documents: list[Document] = []
        for part in self._parts:
            with closing(part.open(0)) as records:
                documents += islice(records, count - len(documents))
            if len(documents) == count:
                break
        return documents

    def count(self) -> int | None:
        sizes = [part.size for part in self._parts]
        if not all(isinstance(size, int) for size in sizes) or sum(map(int, sizes)) > QUICK_COUNT_SIZE:
            return None
        return sum(part.count() for part in self._parts)

    def layout(self) -> str:
        digest = hashlib.sha256(repr([part.size for part in self._parts]).encode()).hexdigest()
        return f"{len(self._parts)} parts (layout {digest[:12]})"

    def _find_block(self, rank: int, start: int, key: EpochKey | None) -> list[Document]:
        """List the documents of a block in the order of the pass. An empty block ends its part."""
        if self._block_id != (rank, start, key):
            part = rank if key is None else int(epoch_order(len(self._parts), key)[rank])
            documents = self._read(part, start)
            if key is not None:
                order = epoch_order(len(documents), key.within(f"{part}/{start}"))
                documents = [documents[index] for index in order.tolist()]
            self._block_id, self._block = (rank, start, key), documents
        return self._block

    def _read(self, part: int, start: int) -> list[Document]:
        # Usually the part is already open at this record: the previous block ended there.
        is_open = self._reading[:2] == (part, start)
        records = self._reading[2] if is_open else self._parts[part].open(start)
        # A generator that has raised an error looks as if its part had ended: it must not be asked again.
        self._reading = -1, 0, iter(())
        documents: list[Document] = []
        num_bytes = 0
        while len(documents) < BLOCK_RECORDS and num_bytes < BLOCK_BYTES:
            document = next(records, None)
            if document is None:
                break
            documents.append(document)
            num_bytes += size_of(document.record)
        self._reading = part, start + len(documents), records
        return documents


def size_of(record: object) -> int:
    """Estimate the bytes that a record takes, from the lengths of its strings and lists."""
    if isinstance(record, (str, bytes)):
        return len(record)
    if isinstance(record, dict):
        return sum(size_of(value) for value in record.values())
    if isinstance(record, list):
        return 8 * len(record) + sum(size_of(value) for value in record if not isinstance(value, int))
    return 8
