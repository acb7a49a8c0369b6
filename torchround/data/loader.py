"""Batches of packed sequences for the training loop, from a position that can be saved and gone back to.

The nodes are: read, tokenise, pack, batch, and, with workers, prefetch.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable, ValidationTable
from torchround.data.batches import Batches
from torchround.data.errors import DataError
from torchround.data.packing import Packer
from torchround.data.reader import Reader
from torchround.data.sources import Source
from torchround.data.tokenising import Tokenising
from torchround.data.tokenizer import Tokenizer
from torchround.layer import MicroBatch

PREFETCHED_BATCHES = 2


def build_loader(
    data: DataTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    epochs: int | None = None,
) -> "Loader":
    """A loader of batches `[global_batch_size, seq_len]`; endless unless `epochs` is given.

    Raises `DataError` where a source is missing or empty.
    """
    return Loader(data, tokenizer, seq_len, global_batch_size, seed, epochs)


def build_validation_loader(
    validation: ValidationTable, tokenizer: Tokenizer, seq_len: int, global_batch_size: int
) -> "ValidationLoader":
    """The first `validation.max_batches` batches of one unshuffled pass, the same each time. Raises `DataError`."""
    data = DataTable(sources=validation.sources, shuffle=False, num_workers=0)
    return ValidationLoader(Loader(data, tokenizer, seq_len, global_batch_size, 0, 1), validation.max_batches)


class Loader(Iterator[MicroBatch]):
    """The batches of a run. Threads start with the first batch, and only where `data.num_workers` is above 0.

    At the end of limited data the last batch holds fewer sequences, the last of them padded. A `DataError`
    is raised in place of the batch that would have held the record at fault, and again by each later call.
    """

    def __init__(
        self,
        data: DataTable,
        tokenizer: Tokenizer,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        epochs: int | None,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._seed = seed
        self._epochs = epochs
        self._sources = [Source(table) for table in data.sources]
        self._tokenising: Tokenising | None = None
        self._batches: BaseNode[MicroBatch | DataError] | None = None
        self._position: dict[str, Any] | None = None

    def __next__(self) -> MicroBatch:
        """The next batch, all four tensors `[G, T]` int64 on the CPU. The caller may change them."""
        if self._batches is None:
            self._batches = self._start()
        item = next(self._batches)
        if isinstance(item, DataError):
            self.close()  # at the position before it: the next call comes upon the same record
            raise item
        self._position = self._position_now(self._batches)
        return item

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch handed out last, fit for JSON; prefetched batches do not count.

        Beside a few integers it holds the tokens that are read but not yet in a batch: less than one
        sequence and one piece of text (64 Ki characters).
        """
        return {"data": self._data_identity(), "position": _plain(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `num_workers`, the batch size and the sequence length may have changed.

        Raises `DataError` where the files, weights, seed, shuffling or tokenizer are not the ones that the
        position was saved with: it would mean other documents.
        """
        saved, current = state["data"], self._data_identity()
        changed = [
            f"{key} was {saved.get(key)}, is {now}" for key, now in current.items() if saved.get(key) != now
        ]
        if changed:
            raise DataError(f"the saved data position is of other data: {'; '.join(changed)}")
        self.close()
        self._position = state["position"]

    def close(self) -> None:
        """End the threads. The position stays; a further batch starts them again."""
        self._batches = None  # torchdata's prefetch thread ends with its node
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    def _start(self) -> BaseNode[MicroBatch | DataError]:
        """New nodes each time: a thread of the old ones that is still at work cannot reach them."""
        weights = [table.weight for table in self._data.sources]
        reader = Reader(
            self._sources, weights, shuffle=self._data.shuffle, seed=self._seed, epochs=self._epochs
        )
        self._tokenising = Tokenising(reader, self._tokenizer, self._data.num_workers)
        packer = Packer(self._tokenising, self._seq_len, self._tokenizer.pad_id)
        batches = Batches(packer, self._global_batch_size)
        if not self._data.num_workers:
            batches.reset(self._position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self._position and {"snapshot": self._position, "steps_since_snapshot": 0})
        return prefetcher

    def _position_now(self, batches: BaseNode[MicroBatch | DataError]) -> dict[str, Any]:
        state: dict[str, Any] = batches.state_dict()
        if not self._data.num_workers:
            return state
        # The prefetcher keeps the nodes' state as it was after each batch: none has to be gone through again.
        assert state["steps_since_snapshot"] == 0, (
            f"{state['steps_since_snapshot']} batches without a snapshot"
        )
        snapshot: dict[str, Any] = state["snapshot"]
        return snapshot

    def _data_identity(self) -> dict[str, Any]:
        return {
            "seed": self._seed,
            "shuffle": self._data.shuffle,
            "tokenizer": f"{self._tokenizer.name} with {self._tokenizer.vocab_size} tokens",
            "sources": [source.fingerprint() for source in self._sources],
            "weights": [table.weight for table in self._data.sources],
        }


class ValidationLoader:
    """Each `iter()` begins at the first batch and ends after `max_batches`, or with the data."""

    def __init__(self, loader: Loader, max_batches: int) -> None:
        self._loader = loader
        self._max_batches = max_batches
        self._beginning = loader.state_dict()

    def __iter__(self) -> Iterator[MicroBatch]:
        self._loader.load_state_dict(self._beginning)
        for _, batch in zip(range(self._max_batches), self._loader, strict=False):
            yield batch


def _plain(state: Any) -> Any:
    """The same nested state with lists for arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state
