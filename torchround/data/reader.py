"""Which document comes next: the order within a source, the mix of several, and the place in a long one.

A source's order in an epoch is fixed by the seed, the source's number and the epoch. Between sources, the one
that is furthest behind its weight is next, so that after any number of documents each source is within one of
its share. Nothing is drawn from a random stream, so a position is a handful of integers.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from torchround.data.document_types import Content, Cursor, Document
from torchround.data.errors import DataError
from torchround.data.formats.sources import Source

logger = logging.getLogger(__name__)
WARNINGS_SHOWN = 10
TWO_WAYS_ON = 'repair it, or leave such records out with data.on_bad_record = "skip"'


@dataclass(frozen=True)
class DocumentPiece:
    """A part of document `number` of source number `source`, and whether it is the first and the last part.

    Numbers go on from epoch to epoch, and count documents that hold nothing or cannot be used.
    """

    content: Content
    source: int
    epoch: int
    document: Document
    first: bool
    last: bool
    number: int = 0


@dataclass
class SourceProgress:
    """How far one source is: passes finished, place in this pass, documents of it in use, drawn and bad ones."""

    place: Cursor
    epoch: int = 0
    used: int = 0
    drawn: int = 0
    bad: int = 0


@dataclass(frozen=True)
class MixSettings:
    """What fixes which documents are read, and when.

    `epochs = None`: each source starts over, in a new order, when it is through. Otherwise each document comes
    exactly `epochs` times, and a source that is through leaves the mix to the others. `held_out` of the documents
    are for validation: only those are read, or only the others.
    """

    weights: Sequence[float]
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None
    skip_bad: bool = False
    held_out: float = 0.0
    validation: bool = False


class Reader(BaseNode[DocumentPiece]):
    """Pieces of documents in reading order. Documents that hold nothing are passed over. Raises `DataError`."""

    def __init__(self, sources: Sequence[Source], order: MixSettings) -> None:
        super().__init__()
        self._sources = sources
        self._order = order
        self._warnings = 0
        self.bad_records: list[str] = []  # the first ones that were skipped, with file and line

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the first document, or where `initial_state` was taken."""
        super().reset(initial_state)
        fresh: dict[str, Any] = {
            "sources": [{"place": source.first_place()} for source in self._sources],
            "source": None,
            "offset": 0,
        }
        state = initial_state or fresh
        self._progress = [SourceProgress(**progress) for progress in state["sources"]]
        self._source: int | None = state["source"]
        self._offset: int = state["offset"]

    def get_state(self) -> dict[str, Any]:
        """SourceProgress of each source, and the place in the document that is being read, if one is."""
        sources = [dict(vars(progress)) for progress in self._progress]
        return {"sources": sources, "source": self._source, "offset": self._offset}

    def next(self) -> DocumentPiece:
        """The next piece, never empty; `StopIteration` after the last epoch."""
        while True:
            if self._source is None:
                self._source, self._offset = self._choose_source(), 0
            number, progress = self._source, self._progress[self._source]
            found = self._sources[number].locate(progress.place, self._key(number))
            if found is None:
                self._end_pass(number)
                continue
            piece = self._read(number, *found)
            if piece is not None:
                return piece

    def _read(self, number: int, document: Document, after: Cursor) -> DocumentPiece | None:
        """The piece of a document at the present offset, `None` where it is not to be used."""
        progress, offset, content = self._progress[number], self._offset, None
        drawn = progress.drawn
        try:
            content, next_offset = self._sources[number].read(document, offset)
        except DataError as error:
            if not self._order.skip_bad:
                raise DataError(f"{error} ({TWO_WAYS_ON})") from error
            self._skip_bad(progress, error)
            next_offset = None
        if content is None or not len(content) or (offset == 0 and not self._is_wanted(content)):
            content, next_offset = None, None
        self._offset = next_offset or 0
        if next_offset is None:
            self._source = None
            progress.place = after
            progress.drawn += 1
            progress.used += content is not None
        if content is None:
            return None
        return DocumentPiece(
            content, number, progress.epoch, document, offset == 0, next_offset is None, drawn
        )

    def _choose_source(self) -> int:
        """The source with the fewest documents for its weight; the first of equals."""
        waiting = [
            number
            for number, progress in enumerate(self._progress)
            if self._order.epochs is None or progress.epoch < self._order.epochs
        ]
        if not waiting:
            raise StopIteration
        return min(waiting, key=lambda number: self._progress[number].drawn / self._order.weights[number])

    def _key(self, number: int) -> str | None:
        return f"{self._order.seed}/{number}/{self._progress[number].epoch}" if self._order.shuffle else None

    def _end_pass(self, number: int) -> None:
        """Turn to the next epoch. A source that gives nothing would be gone through for ever."""
        progress, name = self._progress[number], self._sources[number].name
        if not progress.used and not self._order.validation:
            left = f"; {progress.bad} records were skipped as bad" if progress.bad else ""
            if self._order.held_out and progress.drawn > progress.bad:
                left += f"; data.validation_fraction {self._order.held_out} holds out the rest"
            raise DataError(f"source {name!r}: none of its documents holds any text{left}")
        progress.epoch, progress.place, progress.used = (
            progress.epoch + 1,
            self._sources[number].first_place(),
            0,
        )
        self._source = None

    def _skip_bad(self, progress: SourceProgress, error: DataError) -> None:
        progress.bad += 1
        if len(self.bad_records) < WARNINGS_SHOWN:
            self.bad_records.append(str(error))
            logger.warning("skipped: %s", error)
            if len(self.bad_records) == WARNINGS_SHOWN:
                logger.warning("further bad records are counted and not shown")

    def _is_wanted(self, content: Content) -> bool:
        if not self._order.held_out:
            return True
        return is_held_out(content, self._order.held_out) == self._order.validation


def is_held_out(content: Content, fraction: float) -> bool:
    """Whether a document is for validation, by what its first piece holds: the same for each copy of it."""
    if isinstance(content, str):
        data = content.encode("utf-8", "surrogatepass")
    elif isinstance(content, np.ndarray):
        data = content.tobytes()
    else:
        data = "".join(segment.text for segment in content).encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "big") < fraction * 2**64
