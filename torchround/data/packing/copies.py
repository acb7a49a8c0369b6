"""Notices steps that train on a document twice, because an epoch is too small to fill them."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np

from torchround.data.packing.contiguous import PackedSequence
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)


class CopyWatch:
    """Looks for documents of different epochs that are the same, until it has found some and warned once.

    `names` has the name of each source.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._has_warned = False

    def look(self, rows: Sequence[PackedSequence]) -> None:
        """Warn if a document comes from two epochs in the sequences of one batch."""
        # Most batches have documents of one epoch of each source: nothing is compared then.
        if self._has_warned or not self._mixes_epochs(rows):
            return
        epochs: dict[tuple[int, bytes], set[int]] = {}
        for source, epoch, tokens in self._documents(rows):
            epochs.setdefault((source, tokens), set()).add(epoch)
        repeated = [source for (source, _), found in epochs.items() if len(found) > 1]
        if repeated:
            self._has_warned = True
            text = (
                f"a batch of {len(rows)} sequences has {len(repeated)} documents more than once, from different "
                f"epochs of source {self._names[repeated[0]]!r}: an epoch of it has too few documents for a batch; "
                "a smaller training.global_batch_size or more data keeps the copies apart (shown once)"
            )
            logger.warning("%s", terminal_safe(text))

    def _mixes_epochs(self, rows: Sequence[PackedSequence]) -> bool:
        origins = {origin for row in rows for origin in row.origins if origin[1] >= 0}
        return len(origins) > len({source for source, _ in origins})

    def _documents(self, rows: Sequence[PackedSequence]) -> Iterator[tuple[int, int, bytes]]:
        """Yield source, epoch and tokens of each document whose epoch is known."""
        for row in rows:
            starts = [*np.flatnonzero(row.positions == 0).tolist(), len(row.tokens)]
            for number, (source, epoch) in enumerate(row.origins):
                if epoch >= 0:
                    yield source, epoch, row.tokens[starts[number] : starts[number + 1]].tobytes()
