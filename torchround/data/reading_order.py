"""Decides which document comes next: the order within a source, the mix of several, and the place in a long one.

The seed, the source's number and the epoch fix the order of a source. Between sources, the one furthest behind its
weight is next, so after any number of documents each source is within one of its share. Nothing is drawn from a
random stream, so a position is a handful of integers.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from torchround.data.document_types import Content, Cursor, DataError, DataFileError, Document
from torchround.data.formats.sources import Source
from torchround.data.shuffling import EpochKey

logger = logging.getLogger(__name__)
WARNINGS_SHOWN = 10
REMEDIES = 'repair it, or leave such records out with data.on_bad_record = "skip"'
FEW_DOCUMENTS = (
    "it takes whole documents, and a text file is one: part the text into more files, or into lines of JSON "
    '{"text": ..}, or name other files in validation.sources'
)
LEAST_BAD_RECORDS, MOST_BAD = 10, 0.01


@dataclass(frozen=True)
class MixSettings:
    """Settings that fix which documents are read, and in which order.

    `epochs = None`: each source starts over in a new order after its last document. Otherwise each document comes
    exactly `epochs` times, and a source at its end leaves the mix to the others. With `skip_bad`, bad records are left
    out up to the fraction `MOST_BAD` of a source's documents. The fraction `held_out` of the
    documents is for validation: with `validation` only those are read, otherwise only the others.
    """

    weights: Sequence[float]
    shuffle: bool = True
    seed: int = 0
    epochs: int | None = None
    skip_bad: bool = False
    held_out: float = 0.0
    validation: bool = False


@dataclass(frozen=True)
class DocumentPiece:
    """A part of a document of source number `source`. `special_tokens`: names of special tokens in its text are tokens."""

    content: Content
    source: int
    document: Document
    first: bool
    last: bool
    special_tokens: bool = False


@dataclass
class SourceProgress:
    """Progress in one source: passes finished, cursor in this pass, and counts of documents.

    `used` counts the documents of this pass that gave content, `drawn` the documents of all passes that were looked at, and
    `bad` the documents of all passes that were skipped as bad. A checkpoint holds these fields by name.
    """

    place: Cursor
    epoch: int = 0
    used: int = 0
    drawn: int = 0
    bad: int = 0


class Reader(BaseNode[DocumentPiece]):
    """Pieces of documents in reading order. Empty documents are passed over. Raises `DataError`."""

    def __init__(self, sources: Sequence[Source], settings: MixSettings) -> None:
        super().__init__()
        self._sources = sources
        self._settings = settings
        self.bad_records: list[str] = []  # the first ones that were skipped, with file and line

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        self._source: int | None = None  # the source whose document is being read
        self._offset: int = 0  # in that document
        if initial_state is None:
            self._progress = [SourceProgress(source.first_cursor()) for source in self._sources]
        else:
            self._progress = [SourceProgress(**state) for state in initial_state["sources"]]
            self._source, self._offset = initial_state["source"], initial_state["offset"]

    def get_state(self) -> dict[str, Any]:
        sources = [asdict(progress) for progress in self._progress]
        return {"sources": sources, "source": self._source, "offset": self._offset}

    def next(self) -> DocumentPiece:
        """Read the next piece, never empty. Raises `StopIteration` after the last epoch."""
        while True:
            if self._source is None:
                self._source, self._offset = self._choose_source(), 0
            number, progress = self._source, self._progress[self._source]
            found = self._sources[number].locate(progress.place, self._shuffle_key(number))
            if found is None:
                self._end_pass(number)
                continue
            piece = self._read(number, *found)
            if piece is not None:
                return piece

    def _read(self, number: int, document: Document, after: Cursor) -> DocumentPiece | None:
        """Read the piece of a document at the present offset, or None if the document is not to be used."""
        progress, offset, content = self._progress[number], self._offset, None
        try:
            content, next_offset = self._sources[number].read(document, offset)
        except DataFileError:
            raise
        except DataError as error:
            if not self._settings.skip_bad:
                raise DataError(f"{error} ({REMEDIES})") from error
            self._skip_bad(number, error)
            next_offset = None
        # Whether a document is held out is decided with its first piece, so all of its pieces are treated alike.
        if content is None or not len(content) or (offset == 0 and not self._is_wanted(content)):
            content, next_offset = None, None
        self._offset = next_offset or 0
        # The cursor moves only after the last piece, so a position in a long document is its cursor and the offset.
        if next_offset is None:
            self._source = None
            progress.place = after
            progress.drawn += 1
            progress.used += content is not None
        if content is None:
            return None
        return DocumentPiece(
            content,
            number,
            document,
            first=offset == 0,
            last=next_offset is None,
            special_tokens=self._sources[number].special_tokens,
        )

    def _choose_source(self) -> int:
        waiting = [
            number
            for number, progress in enumerate(self._progress)
            if self._settings.epochs is None or progress.epoch < self._settings.epochs
        ]
        if not waiting:
            raise StopIteration
        weights = self._settings.weights
        return min(waiting, key=lambda number: self._progress[number].drawn / weights[number])

    def _shuffle_key(self, number: int) -> EpochKey | None:
        if not self._settings.shuffle:
            return None
        seed, epoch = self._settings.seed, self._progress[number].epoch
        return EpochKey(f"{seed}/{number}/{epoch}", f"{seed}/{number}/0" if epoch > 0 else None)

    def _end_pass(self, number: int) -> None:
        """Turn to the next epoch of a source. Raises `DataError` if the pass gave nothing."""
        progress, name, settings = self._progress[number], self._sources[number].name, self._settings
        # Without this error, an endless run would read an empty source forever.
        if not progress.used and not settings.validation:
            left_out = f"; {progress.bad} records were skipped as bad" if progress.bad else ""
            if settings.held_out and progress.drawn > progress.bad:
                left_out += (
                    f"; data.validation_fraction {settings.held_out} holds out the rest ({FEW_DOCUMENTS})"
                )
            raise DataError(f"source {name!r}: none of its documents holds any text{left_out}")
        progress.epoch += 1
        progress.place = self._sources[number].first_cursor()
        progress.used = 0
        self._source = None

    def _skip_bad(self, number: int, error: DataError) -> None:
        """Count a record as bad. Raises `DataError` after too many, at the same record in a resumed run."""
        progress, bound = self._progress[number], MOST_BAD
        progress.bad += 1
        # A small source would pass a small fraction with one bad record. The least number is one of each pass, because
        # later passes meet the same bad records again.
        least = LEAST_BAD_RECORDS * (progress.epoch + 1)
        looked_at = progress.drawn + 1
        if progress.bad > max(least, bound * looked_at):
            raise DataError(
                f"{error} (source {self._sources[number].name!r}: {progress.bad} of {looked_at} records were bad, "
                f"which is more than {bound:.0%}; repair or remove them)"
            )
        if len(self.bad_records) < WARNINGS_SHOWN:
            self.bad_records.append(str(error))
            further = "; further bad records are counted and not shown"
            logger.warning("skipped: %s%s", error, further if len(self.bad_records) == WARNINGS_SHOWN else "")

    def _is_wanted(self, content: Content) -> bool:
        """Say whether a document is for training, or for validation. A hash of its first piece decides: copies agree."""
        if not self._settings.held_out:
            return True
        digest = hashlib.blake2b(content_bytes(content), digest_size=8).digest()
        is_held_out = int.from_bytes(digest, "big") < self._settings.held_out * 2**64
        return is_held_out == self._settings.validation


def content_bytes(content: Content) -> bytes:
    """Encode a content as bytes wherever it is hashed."""
    if isinstance(content, str):
        return content.encode("utf-8", "surrogatepass")
    if isinstance(content, np.ndarray):
        return content.tobytes()
    return "".join(span.text for span in content).encode("utf-8", "surrogatepass")
