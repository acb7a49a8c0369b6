"""Which document comes next: the order within a source, the mix of several, and the place in a long one.

A source's order in an epoch is fixed by the seed, the source's number and the epoch. Between sources, the one
that is furthest behind its weight is next, so that after any number of documents each source is within one of
its share. Nothing is drawn from a random stream, so a position is a handful of integers.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from torchdata.nodes import BaseNode

from torchround.data.errors import DataError
from torchround.data.sources import Document, Source


@dataclass(frozen=True)
class TextPiece:
    """A part of a document of source number `source`, and whether it is the first and the last part."""

    text: str
    source: int
    document: Document
    first: bool
    last: bool


@dataclass
class Progress:
    """How far one source is: passes finished, documents of this pass, those of them with text, all so far."""

    epoch: int = 0
    position: int = 0
    with_text: int = 0
    drawn: int = 0


class Reader(BaseNode[TextPiece]):
    """Pieces of documents in reading order. Documents without text are passed over.

    `epochs = None`: each source starts over, in a new order, when it is through. Otherwise each document comes
    exactly `epochs` times, and a source that is through leaves the mix to the others. Raises `DataError`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        weights: Sequence[float],
        *,
        shuffle: bool,
        seed: int,
        epochs: int | None = None,
    ) -> None:
        super().__init__()
        self._sources = sources
        self._weights = weights
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64]]] = {}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin at the first document, or where `initial_state` was taken."""
        super().reset(initial_state)
        state = initial_state or {"sources": [{} for _ in self._sources], "source": None, "offset": 0}
        self._progress = [Progress(**progress) for progress in state["sources"]]
        self._source: int | None = state["source"]
        self._offset: int = state["offset"]

    def get_state(self) -> dict[str, Any]:
        """Progress of each source, and the place in the document that is being read, if one is."""
        sources = [asdict(progress) for progress in self._progress]
        return {"sources": sources, "source": self._source, "offset": self._offset}

    def next(self) -> TextPiece:
        """The next piece, never empty; `StopIteration` after the last epoch."""
        while True:
            if self._source is None:
                self._source, self._offset = self._choose_source(), 0
            number, offset = self._source, self._offset
            source = self._sources[number]
            document = source.document(self._document_index(number))
            text, next_offset = source.read(document, offset)
            self._advance(number, next_offset, has_text=bool(text))
            if text:
                return TextPiece(text, number, document, first=offset == 0, last=next_offset is None)

    def _choose_source(self) -> int:
        """The source with the fewest documents for its weight; the first of equals."""
        waiting = [
            number
            for number, progress in enumerate(self._progress)
            if self._epochs is None or progress.epoch < self._epochs
        ]
        if not waiting:
            raise StopIteration
        return min(waiting, key=lambda number: self._progress[number].drawn / self._weights[number])

    def _document_index(self, number: int) -> int:
        progress = self._progress[number]
        if not self._shuffle:
            return progress.position
        epoch, order = self._orders.get(number, (-1, np.empty(0, dtype=np.int64)))
        if epoch != progress.epoch:
            order = shuffled(len(self._sources[number]), f"{self._seed}/{number}/{progress.epoch}")
            self._orders[number] = (progress.epoch, order)
        return int(order[progress.position])

    def _advance(self, number: int, next_offset: int | None, *, has_text: bool) -> None:
        if next_offset is not None:
            self._offset = next_offset
            return
        progress = self._progress[number]
        self._source = None
        progress.position += 1
        progress.drawn += 1
        progress.with_text += has_text
        if progress.position == len(self._sources[number]):
            if not progress.with_text:
                raise DataError(
                    f"source {self._sources[number].name!r}: none of its documents holds any text"
                )
            progress.epoch, progress.position, progress.with_text = progress.epoch + 1, 0, 0


def shuffled(count: int, key: str) -> npt.NDArray[np.int64]:
    """`range(count)` in an order fixed by `key`, the same with any version of any library.

    The numbers are sorted by a hash of them (SplitMix64, Steele et al. 2014, which has no collisions).
    """
    seed = np.frombuffer(hashlib.sha256(key.encode()).digest()[:8], dtype="<u8")
    mixed = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + seed
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(mixed ^ (mixed >> np.uint64(31)), kind="stable")
