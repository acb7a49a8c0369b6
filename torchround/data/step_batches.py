"""The batches of a run as one machine trains on them: its own micro-batches, and the counts of the whole step.

Every machine cuts the step's batch in the same way and keeps the micro-batches of its share. Once a step, the machines
tell each other what they found: labels, tokens and documents, an error in the data, the end of the data, and the flags of
the caller. So all of them train on the same step, or all stop before the same step.
"""

import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torchround.data.document_types import DataError
from torchround.data.loader import Loader
from torchround.data.packing import micro_batch_rows
from torchround.data.sequence_stream import joined_positions
from torchround.layer import MicroBatch, longest_document, most_documents, with_dropout_seeds
from torchround.planning.machine_shares import StepShare, step_share

JSON: TypeAlias = Any
Agree: TypeAlias = Callable[[JSON], list[JSON]]
"""Gives a value to all machines and returns the value of each, in rank order. The same machine's value may come back as a
copy that went through JSON."""


@dataclass(frozen=True)
class StepBatch:
    """One step's batch on one machine: `micro_batches` are those of its `share`, in order, and may be none.

    `num_labels` and `num_tokens` count the whole step, on all machines together; tokens without padding.
    """

    micro_batches: tuple[MicroBatch, ...]
    share: StepShare
    num_labels: int
    num_tokens: int

    def with_seeds(self, seed: int, step: int) -> list[MicroBatch]:
        """Return the micro-batches with the dropout seeds of a run's seed and step: those of one machine's."""
        return with_dropout_seeds(self.micro_batches, seed, step, self.share.micro_batches)


class StepBatches:
    """The steps of a loader, each as `machine` of `num_machines` trains on it.

    `rounds` is the number of rounds that each machine runs. `agree` exchanges values between the machines; one machine
    has none. `names` has the name of each machine for messages. `reading` is a context around this machine's own reading,
    without the wait for the others.
    """

    def __init__(
        self,
        loader: Loader,
        micro_batch_size: int,
        rounds: int,
        agree: Agree | None = None,
        machine: int = 0,
        num_machines: int = 1,
        *,
        names: Sequence[str] = (),
        reading: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        if (agree is None) != (num_machines == 1):
            raise ValueError(f"{num_machines} machines {'cannot' if agree is None else 'need not'} agree")
        self._loader = loader
        self._micro_batch_size = micro_batch_size
        self._rounds = rounds
        self._agree = agree
        self._machine = machine
        self._num_machines = num_machines
        self._names = names or [f"machine {rank}" for rank in range(num_machines)]
        self._reading = reading
        if agree is not None and loader.num_streams > 1:
            # A machine may need streams that another one has read so far: the number of rounds can have changed.
            loader.load_state_dict(joined_positions(agree(loader.state_dict())))
            loader.read_only(self._needed_streams())

    def next(self, flags: JSON = None) -> tuple[StepBatch | None, list[JSON]]:
        """Return the next step's batch, None at the end of the data, and the flags of all machines in rank order.

        Raises `DataError` on all machines if one of them meets an error in the data; the steps before it are the same
        on all. One machine's own error is raised as it is.
        """
        error: DataError | None = None
        batch: MicroBatch | None = None
        try:
            with self._reading():
                batch = next(self._loader, None)
        except DataError as caught:
            if self._agree is None:
                raise
            error = caught
        share, parts = self._cut(batch)
        found_here = {
            "labels": sum(part.num_labels() for part in parts),
            "tokens": sum(self._loader.num_tokens(part) for part in parts),
            "documents": _most([most_documents(part.document_ids) for part in parts]),
            "longest": max((longest_document(part.document_ids) for part in parts), default=0),
            "has_ended": batch is None,
            "flags": flags,
        }
        found = [found_here]
        if self._agree is not None:
            found_here |= {
                "error": error and str(error),
                "digest": self._digest(batch),
                "counts": self._loader.counts,
            }
            found = self._agree(found_here)
            self._require_the_same(found)
            self._loader.hear_counts(counts for each in found for counts in each["counts"])
        agreed_flags = [each["flags"] for each in found]
        if all(each["has_ended"] for each in found):
            return None, agreed_flags
        documents = _most([each["documents"] for each in found])
        longest = max(each["longest"] for each in found)
        return StepBatch(
            tuple(replace(part, max_documents=documents, longest_document=longest) for part in parts),
            share,
            num_labels=sum(each["labels"] for each in found),
            num_tokens=sum(each["tokens"] for each in found),
        ), agreed_flags

    def _cut(self, batch: MicroBatch | None) -> tuple[StepShare, list[MicroBatch]]:
        """Return this machine's share of a batch, and its micro-batches as views.

        Without a batch it is padding: other machines may have streams that go further.
        """
        loader = self._loader
        # One stream's last batch may be short. Of several streams, a batch has only those that this machine needs.
        num_sequences = loader.global_batch_size
        if batch is not None and loader.num_streams == 1:
            num_sequences = len(batch.tokens)
        share, sequences = self._share_of(num_sequences)
        if not sequences:
            return share, []
        tensors = (loader.padding() if batch is None else batch).tensors()
        starts = [(loader.row_of(rows.start), len(rows)) for rows in sequences]
        return share, [
            MicroBatch(*(tensor[first : first + count] for tensor in tensors)) for first, count in starts
        ]

    def _share_of(self, num_sequences: int) -> tuple[StepShare, list[range]]:
        rows = micro_batch_rows(num_sequences, self._micro_batch_size)
        share = step_share(len(rows), self._rounds, self._machine, self._num_machines)
        return share, [rows[number] for number in share.micro_batches]

    def _needed_streams(self) -> set[int]:
        size = self._loader.global_batch_size // self._loader.num_streams
        _, sequences = self._share_of(self._loader.global_batch_size)
        return {sequence // size for rows in sequences for sequence in rows}

    def _digest(self, batch: MicroBatch | None) -> list[int] | None:
        """Return a digest of a batch that all machines read whole, and its number of sequences."""
        if batch is None or self._loader.num_streams > 1:
            return None
        return [len(batch.tokens), zlib.crc32(batch.tokens.numpy().data)]

    def _require_the_same(self, found: Sequence[dict[str, JSON]]) -> None:
        """Raise the same `DataError` on all machines if one has an error, or if they read different data."""
        raise_agreed([each["error"] for each in found], self._names)
        for rank, each in enumerate(found):
            if each["digest"] != found[0]["digest"]:
                raise DataError(
                    f"{self._names[rank]} reads another batch than {self._names[0]} for the same step: the files "
                    "of data.sources differ between them, although their sizes are the same"
                )


def raise_agreed(texts: Sequence[str | None], names: Sequence[str]) -> None:
    """Raise the same `DataError` on all machines if one has an error; `texts` has each machine's, None without one."""
    failed = [rank for rank, text in enumerate(texts) if text is not None]
    if failed:
        text = texts[failed[0]]
        # A record that every machine reads is bad on all of them; otherwise the message needs the machine.
        raise DataError(text if len(set(texts)) == 1 else f"{names[failed[0]]}: {text}")


def _most(documents: Sequence[int | None]) -> int | None:
    """Return the bound on documents that holds for all parts: None if one of them has no bound, 0 without parts."""
    known = [count for count in documents if count is not None]
    return None if len(known) < len(documents) else max(known, default=0)
