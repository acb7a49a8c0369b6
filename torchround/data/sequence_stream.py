"""One stream of packed sequences, from the documents that are dealt to it.

The nodes are: read, tokenise, pack, shuffle (if asked for), batch, and prefetch (with workers).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable
from torchround.data.errors import DataError
from torchround.data.formats.sources import Source
from torchround.data.order_rules import OrderRules
from torchround.data.packing.batches import Batches, CopyWatch
from torchround.data.packing.best_fit import BestFitPacker
from torchround.data.packing.contiguous import ContiguousPacker, PackedSequence
from torchround.data.packing.window_shuffle import SequenceShuffler
from torchround.data.reading_order import MixSettings, Reader
from torchround.data.saved_positions import ELSEWHERE
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import Tokenising
from torchround.layer import MicroBatch

PREFETCHED_BATCHES = 2


@dataclass(frozen=True)
class StreamSettings:
    """Settings of all streams of a loader: each makes `part_size` sequences of every batch."""

    data: DataTable
    tokenizer: Tokenizer
    seq_len: int
    part_size: int
    packs_whole: bool


class SequenceStream:
    """The stream's part of each batch, `[part_size, T]`; fewer sequences in the last part of limited data.

    `position` is the place after the last batch that was kept, None for the beginning.
    """

    def __init__(
        self, settings: StreamSettings, mix: MixSettings, sources: Sequence[Source], copies: CopyWatch
    ) -> None:
        self.position: Any = None
        self._settings = settings
        self._mix = mix
        self._sources = sources
        self._copies = copies
        self._tokenising: Tokenising | None = None
        self._nodes: BaseNode[MicroBatch | DataError] | None = None
        self._has_ended = False

    def next(self, rules: OrderRules, num_read: int) -> MicroBatch | None:
        """Return the stream's part of the next batch, None at its end. Raises `DataError`.

        `num_read` streams are read by this process and share its workers.
        """
        if self._has_ended:
            return None
        if self._nodes is None:
            assert self.position != ELSEWHERE, (
                "another machine has read this stream: its position must be loaded first"
            )
            self._nodes = self._start(rules, -(-self._settings.data.num_workers // num_read))
        item = next(self._nodes, None)
        if isinstance(item, DataError):
            raise item
        self._has_ended = item is None
        return item

    def keep_position(self) -> None:
        """Move the position after the part that `next` returned. The end of the data is no place of its own."""
        if self._nodes is not None and not self._has_ended:
            self.position = self._position_now(self._nodes)

    def close(self) -> None:
        """End the threads. The position stays, and asking for a further part starts them again."""
        self._nodes = None  # torchdata's prefetch thread ends with its node
        self._has_ended = False
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    def _start(self, rules: OrderRules, num_workers: int) -> BaseNode[MicroBatch | DataError]:
        """Make the nodes, and go to the position."""
        # New nodes each time: a thread that still works on the old ones cannot disturb them.
        settings, mix = self._settings, self._mix
        reader = Reader(self._sources, replace(mix, copies_apart=rules.copies_apart))
        self._tokenising = Tokenising(reader, settings.tokenizer, num_workers)
        sequences = self._packer(self._tokenising, rules)
        if rules.window:
            window = rules.window_of_each(mix.num_streams)
            sequences = SequenceShuffler(sequences, window, mix.seed, across_epochs=not rules.copies_apart)
        batches = Batches(sequences, settings.part_size, self._copies)
        if not num_workers:
            batches.reset(self.position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self.position and {"snapshot": self.position, "steps_since_snapshot": 0})
        return prefetcher

    def _packer(self, source: Tokenising, rules: OrderRules) -> BaseNode[PackedSequence | DataError]:
        settings, pad_id = self._settings, self._settings.tokenizer.pad_id
        if settings.packs_whole:
            # Asked for only here: to count the records of small archives, they are read.
            counts = [each.quick_count() for each in self._sources] if rules.copies_apart else []
            return BestFitPacker(source, settings.seq_len, pad_id, settings.data.long_documents, counts)
        return ContiguousPacker(source, settings.seq_len, pad_id)

    def _position_now(self, batches: BaseNode[MicroBatch | DataError]) -> dict[str, Any]:
        state: dict[str, Any] = batches.state_dict()
        if not isinstance(batches, Prefetcher):
            return state
        # The prefetcher keeps the nodes' state as it was after each batch, so a resumed run repeats no batch.
        assert state["steps_since_snapshot"] == 0, (
            f"{state['steps_since_snapshot']} batches without a snapshot"
        )
        snapshot: dict[str, Any] = state["snapshot"]
        return snapshot
