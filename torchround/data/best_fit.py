"""Best-fit packing, for fine-tuning: whole documents, combined so that sequences are nearly full.

The packer gathers documents until they fill `GROUP_SEQUENCES` sequences. From the longest to the shortest, each goes
to the sequence with the least room that it fits into (best fit decreasing; Johnson 1973: at most 11/9 of the fewest
possible sequences, and nearly the fewest with many short documents). The packer takes the emptiest sequence of a
group apart, and its documents wait for the next group. Sequences leave in a hashed order, since packing sorts them
by length.

A group ends before 64 sequences if it has a sixth of an epoch of some source: the copies of a document, three quarters
of an epoch apart in reading order, could otherwise come into one group, and so into one step.

The state is the reader's state at the group's start and how many sequences have left: a resumed run packs the group
again. All documents of a group are read before its first sequence leaves, so a bad record stops a run at the start of
its group.
"""

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode

from torchround.data.document_types import DataError, TokenIds
from torchround.data.packing import PackedSequence, TokenPiece, learnt_mask
from torchround.data.shuffling import shuffled
from torchround.layer import IGNORED_LABEL

GROUP_SEQUENCES = 64
GROUPS_PER_EPOCH = 6
LEAST_SEQUENCES = 4  # of a group: fewer would leave much padding


@dataclass(frozen=True)
class WholeDocument:
    """Inputs and labels `[n]` of a document or part. `waited`: it comes from an earlier group, and must not wait again."""

    tokens: TokenIds
    labels: TokenIds
    waited: bool = False


class BestFitPacker(BaseNode[PackedSequence | DataError]):
    """Sequences of whole documents, packed from token pieces. `long_documents`: `cut` or `split`.

    `epoch_documents` has the documents of an epoch for each source, None for an unknown number. It keeps the copies of
    a document in different groups. Without it, groups end at their usual size alone.

    An error is the last item, in place of the group that it falls into: without the bad record the group would be
    packed differently, so its sequences that have left could not be told from the rest.
    """

    def __init__(
        self,
        source: BaseNode[TokenPiece | DataError],
        seq_len: int,
        pad_id: int,
        long_documents: str,
        epoch_documents: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        self._source = source
        self._seq_len = seq_len
        self._pad_id = pad_id
        self._long_documents = long_documents
        self._epoch_documents = epoch_documents

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state: dict[str, Any] = initial_state or {
            "reader": None,
            "waiting": [],
            "group": 0,
            "long": 0,
            "left": 0,
        }
        self._waiting = [
            WholeDocument(np.array(tokens, dtype=np.int64), np.array(labels, dtype=np.int64), waited=True)
            for tokens, labels in state["waiting"]
        ]
        self._group: int = state["group"]
        self._num_long: int = state["long"]
        # The reader goes back to the group's start, and the group is packed again when the first sequence is needed.
        self._source.reset(state["reader"])
        self._rows: list[list[WholeDocument]] | None = None
        self._begin_group()
        self._left = state["left"]
        self._error: DataError | None = None
        self._ended = False

    def get_state(self) -> dict[str, Any]:
        """Save the state at the group's start, the documents that waited for it, and how many sequences have left it.

        `so_far` is for reports: a run that resumes counts the documents of the group again.
        """
        so_far = {"long": self._num_long, "reader": self._source.state_dict()}
        return {**self._group_start, "left": self._left, "so_far": so_far}

    def next(self) -> PackedSequence | DataError:
        while True:
            if self._rows is None:
                self._rows = self._pack_group()
                if self._error is not None:
                    return self._error
            if self._left < len(self._rows):
                self._left += 1
                return self._row(self._rows[self._left - 1])
            if self._ended:
                raise StopIteration
            # The group is used up: its leftover documents begin the next one.
            self._waiting = self._next_waiting
            self._group += 1
            self._begin_group()

    def _begin_group(self) -> None:
        self._left, self._rows = 0, None
        self._group_start = {
            "reader": self._source.state_dict(),
            "waiting": [(document.tokens.tolist(), document.labels.tolist()) for document in self._waiting],
            "group": self._group,
            "long": self._num_long,
        }

    def _pack_group(self) -> list[list[WholeDocument]]:
        """Pack the sequences of the next group in the order that they leave in. Notes an error, or the data's end."""
        try:
            documents = self._gather()
        except DataError as error:
            self._error, self._ended = error, True
            return []
        rows = best_fit([len(document.tokens) for document in documents], self._seq_len)
        packed = [[documents[index] for index in row] for row in rows]
        self._next_waiting = []
        if not self._ended:
            self._next_waiting = self._take_emptiest(packed)
        # Packing leaves long documents first, so their sequences would all come early.
        order = shuffled(len(packed), f"best fit/{self._group}").tolist()
        return [packed[index] for index in order]

    def _gather(self) -> list[WholeDocument]:
        """Read the documents of one group, and note if the data has ended. Raises `DataError` for a bad record."""
        documents, pieces = list(self._waiting), list[TokenPiece]()
        room = GROUP_SEQUENCES * self._seq_len - total(documents)
        # A document that has begun is read to its end: no other group would have its first pieces.
        while pieces or not self._is_full(room):
            item = next(self._source, None)
            if isinstance(item, DataError):
                raise item
            if item is None:
                self._ended = True
                return documents + self._parts(pieces)
            # A document whose last piece never came was broken off by a bad record: its beginning is kept.
            if item.starts_document and pieces:
                documents += self._parts(pieces)
                pieces = []
            pieces.append(item)
            if item.ends_document:
                parts, pieces = self._parts(pieces), []
                documents += parts
                room -= total(parts)
        return documents

    def _is_full(self, room: int) -> bool:
        """Say whether a group with room for `room` more tokens has all its documents."""
        if room <= 0:
            return True
        # Documents that waited count: with them, the group packs well enough.
        if not self._epoch_documents or room > (GROUP_SEQUENCES - LEAST_SEQUENCES) * self._seq_len:
            return False
        begun, now = self._group_start["reader"]["sources"], self._source.state_dict()["sources"]
        return any(map(_has_its_share, self._epoch_documents, begun, now))

    def _parts(self, pieces: Sequence[TokenPiece]) -> list[WholeDocument]:
        if not pieces:
            return []
        tokens = np.concatenate([piece.tokens for piece in pieces])
        labels = np.empty_like(tokens)
        labels[:-1], labels[-1] = tokens[1:], IGNORED_LABEL
        if any(piece.learn is not None for piece in pieces):
            learn = np.concatenate([learnt_mask(piece) for piece in pieces])
            labels[:-1][~learn[1:]] = IGNORED_LABEL
        starts = range(0, len(tokens), self._seq_len)
        if len(starts) > 1:
            self._num_long += 1
            starts = starts if self._long_documents == "split" else starts[:1]
        return [
            WholeDocument(tokens[low : low + self._seq_len], labels[low : low + self._seq_len])
            for low in starts
        ]

    def _take_emptiest(self, packed: list[list[WholeDocument]]) -> list[WholeDocument]:
        """Remove the emptiest sequence whose documents have not waited before, and return them, if another is left."""
        # A document waits at most once: a hard-to-place one would otherwise be put off to the end of the data.
        candidates = [
            index for index, row in enumerate(packed) if not any(document.waited for document in row)
        ]
        if not candidates or len(packed) == 1:
            return []
        emptiest = packed.pop(min(candidates, key=lambda index: total(packed[index])))
        return [replace(document, waited=True) for document in emptiest]

    def _row(self, documents: Sequence[WholeDocument]) -> PackedSequence:
        """Join documents to a sequence; padding is one more document, whose labels are ignored."""
        missing = self._seq_len - total(documents)
        tokens = [document.tokens for document in documents]
        labels = [document.labels for document in documents]
        if missing:
            tokens.append(np.full(missing, self._pad_id, dtype=np.int64))
            labels.append(np.full(missing, IGNORED_LABEL, dtype=np.int64))
        begins = np.zeros(self._seq_len, dtype=np.bool_)
        begins[np.cumsum([0, *map(len, tokens[:-1])])] = True
        return PackedSequence(
            np.concatenate(tokens).astype(np.int32), np.concatenate(labels).astype(np.int32), begins
        )


def _has_its_share(documents: int | None, begun: dict[str, Any], now: dict[str, Any]) -> bool:
    """Say whether a group has its share of a source's documents, from the reader's progress; None is an unknown number."""
    if documents is None and begun["epoch"]:
        documents = begun["drawn"] // begun["epoch"]
    if documents is None:  # in the first epoch, which then ends the group
        return bool(now["epoch"] > begun["epoch"])
    return bool((now["drawn"] - begun["drawn"]) * GROUPS_PER_EPOCH >= documents)


def best_fit(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute the indices of `lengths` over rows of size `room`: best fit, longest first. No length exceeds `room`."""
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
    return sum(len(document.tokens) for document in documents)
