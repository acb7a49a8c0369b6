"""Whole documents, put together so that sequences are nearly full: the packing of fine-tuning.

Documents are gathered until they fill `GROUP_SEQUENCES` sequences. The longest first, each goes to the sequence
with the least room that it fits into (best fit decreasing; Johnson 1973: at most 11/9 of the fewest sequences, and
with many short documents nearly the fewest). The emptiest sequence of a group is taken apart and its documents
wait for the next group. Sequences leave in a hashed order, since packing sorts them by length.

The state is where the group began and how many of its sequences have left: a resumed run packs the group again.
Nothing of a group leaves before all of its documents are read, so a record at fault stops a run where its group began.
Where a file has changed, the group would be packed in another way. For that, the state also has the names of the
documents that have left: they are left out, and what remains of the group is packed anew (`in_changed_files`).
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from torchround.data.document_types import TokenIds
from torchround.data.errors import DataError
from torchround.data.formats.sources import shuffled
from torchround.data.packing.contiguous import (
    PackedSequence,
    TokenPiece,
    joined,
    learnt_mask,
    positions_from,
)
from torchround.layer import IGNORED_LABEL

GROUP_SEQUENCES = 64
# In files that have changed, the documents of a group may be longer than they were, but not by any amount.
MOST_GROWTH = 16

PartId = tuple[int, int, int]
"""Number of the source, of the document in it, and of the part of that document."""


@dataclass(frozen=True)
class WholeDocument:
    """Inputs and labels `[n]` of a document, or of the part of it that one sequence holds."""

    tokens: TokenIds
    labels: TokenIds
    name: PartId
    waited: bool = False


def in_changed_files(state: dict[str, Any]) -> dict[str, Any]:
    """A packer's state for files in which records have changed.

    The group holds the documents of the same numbers as before, without those that have left it.
    """
    if not state["gone"]:
        return state
    until = [source["drawn"] for source in state["so_far"]["reader"]["sources"]]
    return {**state, "without": state["gone"], "until": until, "left": 0}


class BestFitPacker(BaseNode[PackedSequence | DataError]):
    """Token pieces in, sequences of whole documents out. `long_documents`: `cut`, `skip` or `split`.

    An error is handed on as the last item, in place of the group that it falls into: without the record at fault,
    the group would be packed in another way, and what had left of it could not be told from the rest.
    """

    def __init__(
        self, source: BaseNode[TokenPiece | DataError], seq_len: int, pad_id: int, long_documents: str
    ) -> None:
        super().__init__()
        self._source = source
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._long_documents = long_documents

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin empty, or in the middle of the group that `initial_state` was taken in."""
        super().reset(initial_state)
        state: dict[str, Any] = initial_state or {
            "reader": None,
            "waiting": [],
            "group": 0,
            "long": 0,
            "without": [],
            "until": None,
            "left": 0,
            "gone": [],
        }
        self._waiting = [
            WholeDocument(
                np.array(tokens, dtype=np.int64), np.array(labels, dtype=np.int64), tuple(name), waited=True
            )
            for tokens, labels, name in state["waiting"]
        ]
        self._group: int = state["group"]
        self._num_long: int = state["long"]
        self._source.reset(state["reader"])
        self._begin_group(state["without"], state["until"])
        self._left: int = state["left"]
        self._gone = [tuple(name) for name in state["gone"]]
        self._rows: list[list[WholeDocument]] | None = None
        self._error: DataError | None = None
        self._ended = False

    def get_state(self) -> dict[str, Any]:
        """Where the group began, the documents that waited for it, and what of it has left.

        `so_far` is only for reports: a resumed run counts the group again.
        """
        so_far = {"long": self._num_long, "reader": self._source.state_dict()}
        return {**self._group_start, "left": self._left, "gone": list(self._gone), "so_far": so_far}

    def next(self) -> PackedSequence | DataError:
        """The next sequence; `StopIteration` when the data has ended."""
        while True:
            if self._rows is None:
                self._rows = self._pack_group()
                if self._error is not None:
                    return self._error
            if self._left < len(self._rows):
                row = self._rows[self._left]
                self._left += 1
                self._gone += [document.name for document in row]
                return self._row(row)
            if self._ended:
                raise StopIteration
            self._waiting = self._next_waiting
            self._group += 1
            self._begin_group([], None)
            self._left, self._gone, self._rows = 0, [], None

    def _begin_group(self, without: Iterable[Sequence[int]], until: list[int] | None) -> None:
        """`without` documents that have left it already; up to document `until` of each source, not until it is full."""
        self._without, self._until = {tuple(name) for name in without}, until
        waiting = [
            (document.tokens.tolist(), document.labels.tolist(), document.name) for document in self._waiting
        ]
        self._group_start = {
            "reader": self._source.state_dict(),
            "waiting": waiting,
            "group": self._group,
            "long": self._num_long,
            "without": sorted(self._without),
            "until": until,
        }

    def _pack_group(self) -> list[list[WholeDocument]]:
        documents = self._gather()
        if self._error is not None:
            self._ended = True
            return []
        rows = best_fit([len(document.tokens) for document in documents], self._seq_len)
        packed = [[documents[index] for index in row] for row in rows]
        self._next_waiting = []
        if not self._ended:
            self._next_waiting = self._take_emptiest(packed)
        order = shuffled(len(packed), f"best fit/{self._group}").tolist()
        return [packed[index] for index in order]

    def _gather(self) -> list[WholeDocument]:
        """Documents for one group; notes an error, or that the data has ended."""
        documents, pieces = list(self._waiting), list[TokenPiece]()
        room = GROUP_SEQUENCES * self._seq_len - total(documents)
        fruitless: dict[int, int] = {}  # since which epoch a source has given nothing
        while self._error is None and (room > 0 if self._until is None else self._is_before(self._until)):
            item = next(self._source, None)
            if not isinstance(item, TokenPiece):
                self._error, self._ended = item, item is None
                documents += self._parts(pieces)
                break
            if item.starts_document and pieces:  # a bad record broke off what came before
                documents += self._parts(pieces)
                pieces = []
            pieces.append(item)
            if item.ends_document:
                parts, pieces = self._parts(pieces), []
                documents += parts
                room -= total(parts)
                fruitless = {} if parts else fruitless
                if self._until is not None and -room > MOST_GROWTH * GROUP_SEQUENCES * self._seq_len:
                    self._error = self._too_much()
                if item.epoch > fruitless.setdefault(item.source, item.epoch) + 1:
                    self._error = self._nothing_fits()
        return [document for document in documents if document.name not in self._without]

    def _is_before(self, until: Sequence[int]) -> bool:
        """Whether a source has documents of the group to give."""
        sources = self._source.state_dict()["sources"]
        return any(source["drawn"] < end for source, end in zip(sources, until, strict=True))

    def _too_much(self) -> DataError:
        """Whoever forges a position may have a group reach to any document."""
        return DataError(
            f"the saved data position has a group of documents end at {self._until}, by which there are over "
            f"{MOST_GROWTH} times as many tokens as a group holds: it was altered, or the files are others"
        )

    def _nothing_fits(self) -> DataError:
        """An endless loader would search for ever."""
        return DataError(
            "no document of a whole pass over a source fits into a sequence: training.seq_len is "
            f'{self._seq_len}, and data.long_documents = "skip" leaves out what is longer'
        )

    def _parts(self, pieces: Sequence[TokenPiece]) -> list[WholeDocument]:
        """What is used of a document that has come in `pieces`: nothing, itself, its beginning, or several parts."""
        if not pieces:
            return []
        tokens = joined([piece.tokens for piece in pieces])
        labels = np.empty_like(tokens)
        labels[:-1], labels[-1] = tokens[1:], IGNORED_LABEL
        if any(piece.learn is not None for piece in pieces):
            learn = joined([learnt_mask(piece) for piece in pieces])
            labels[:-1][~learn[1:]] = IGNORED_LABEL
        starts = range(0, len(tokens), self._seq_len)
        if len(starts) > 1:
            self._num_long += 1
            kept = {"cut": 1, "skip": 0, "split": len(starts)}[self._long_documents]
            starts = starts[:kept]
        document = pieces[0].source, pieces[0].number
        return [
            WholeDocument(
                tokens[low : low + self._seq_len], labels[low : low + self._seq_len], (*document, part)
            )
            for part, low in enumerate(starts)
        ]

    def _take_emptiest(self, packed: list[list[WholeDocument]]) -> list[WholeDocument]:
        """Takes apart the emptiest sequence whose documents have not waited before, if there is another."""
        candidates = [
            index for index, row in enumerate(packed) if not any(document.waited for document in row)
        ]
        if not candidates or len(packed) == 1:
            return []
        emptiest = packed.pop(min(candidates, key=lambda index: total(packed[index])))
        return [replace(document, waited=True) for document in emptiest]

    def _row(self, documents: Sequence[WholeDocument]) -> PackedSequence:
        """Documents one after the other and padding as one more, whose labels are ignored."""
        missing = self._seq_len - total(documents)
        tokens, labels = (
            [document.tokens for document in documents],
            [document.labels for document in documents],
        )
        if missing:
            tokens.append(np.full(missing, self._pad_id, dtype=np.int64))
            labels.append(np.full(missing, IGNORED_LABEL, dtype=np.int64))
        begins = np.zeros(self._seq_len, dtype=np.bool_)
        begins[np.cumsum([0, *map(len, tokens[:-1])])] = True
        return PackedSequence(
            tokens=np.concatenate(tokens),
            labels=np.concatenate(labels),
            positions=positions_from(begins),
            document_ids=np.cumsum(begins, dtype=np.int64) - 1,
        )


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of `lengths`, each at most `room`, in rows that hold at most `room`: best fit, longest first."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (room left, row), sorted
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        found = bisect_left(open_rows, (lengths[index], 0))
        if found == len(open_rows):
            rows.append([])
            left, row = room, len(rows) - 1
        else:
            left, row = open_rows.pop(found)
        rows[row].append(index)
        insort(open_rows, (left - lengths[index], row))
    return rows


def total(documents: Iterable[WholeDocument]) -> int:
    """Tokens of several documents."""
    return sum(len(document.tokens) for document in documents)
