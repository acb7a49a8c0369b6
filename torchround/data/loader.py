"""Batches of packed sequences for the training loop, from a position that can be saved and gone back to.

The nodes are: read, tokenise, pack, batch, and, with workers, prefetch.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable, ValidationTable
from torchround.data.errors import DataError
from torchround.data.formats.records import RecordReader
from torchround.data.formats.sources import Source
from torchround.data.formats.streams import open_source
from torchround.data.packing.batches import Batches, num_tokens
from torchround.data.packing.best_fit import BestFitPacker, in_changed_files
from torchround.data.packing.contiguous import ContiguousPacker, PackedSequence
from torchround.data.reader import MixSettings, Reader
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import Tokenising
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.untrusted.data_position import check_data_position
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)
PREFETCHED_BATCHES = 2
REPAIRED = "where a record was repaired, --data.on_changed_files go_on keeps the place"


def build_loader(
    data: DataTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    epochs: int | None = None,
) -> "Loader":
    """A loader of batches `[global_batch_size, seq_len]`; endless unless `data.epochs` or `epochs` is given.

    Raises `DataError` where a source is missing or empty, `TokenizerError` where conversations have no template.
    """
    if epochs is not None:
        data = data.model_copy(update={"epochs": epochs})
    return Loader(data, tokenizer, seq_len, global_batch_size, seed)


def build_validation_loader(
    validation: ValidationTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    data: DataTable | None = None,
) -> "ValidationLoader":
    """The first `validation.max_batches` batches of one unshuffled pass, the same each time.

    Without sources of its own: a pass over what `data.validation_fraction` holds out. Documents are treated as
    `data` says, the defaults where it is not given. Reads the first batch. Raises `DataError`.
    """
    data = data or DataTable(sources=validation.sources)
    held_out = 0.0 if validation.sources else data.validation_fraction
    if not validation.sources and not held_out:
        raise DataError("validation has no sources, and data.validation_fraction is 0")
    treated = data.model_copy(
        update={
            "sources": validation.sources or data.sources,
            "shuffle": False,
            "epochs": 1,
            "num_workers": 0,
            "validation_fraction": held_out,
        }
    )
    loader = Loader(treated, tokenizer, seq_len, global_batch_size, 0, validation=bool(held_out))
    found = ValidationLoader(loader, validation.max_batches)
    next(iter(found))  # what is wrong with it should show now, and not after so many steps
    return found


class Loader(Iterator[MicroBatch]):
    """The batches of a run. Threads start with the first batch, and only where `data.num_workers` is above 0.

    At the end of limited data the last batch holds fewer sequences. A `DataError` is raised in place of the batch
    that would have held the record at fault, and again by each later call. `validation`: only what
    `data.validation_fraction` holds out, where everything else is read otherwise.
    """

    def __init__(
        self,
        data: DataTable,
        tokenizer: Tokenizer,
        seq_len: int,
        global_batch_size: int,
        seed: int,
        *,
        validation: bool = False,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._sources = open_sources(data, tokenizer)
        self._order = reading_order(data, self._sources, seed, validation)
        self._packs_whole = packs_whole_documents(data)
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

        Beside a few integers it holds the tokens that are read but not yet in a batch: less than one sequence and
        one piece of text (64 Ki characters), or with whole documents less than one sequence and the names of the
        documents that have left the group being packed (up to twice as many where its files have changed).
        """
        return {"data": self._identity, "position": _plain(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `num_workers`, the batch size and the sequence length may have changed.

        Raises `DataError` where the files, weights, seed, shuffling or tokenizer are not the ones that the
        position was saved with: it would mean other documents. Other files alone are a warning with
        `data.on_changed_files = "go_on"`.
        """
        saved, position = state.get("data"), state.get("position")
        if not isinstance(saved, dict):
            raise DataError(f"the saved data position says nothing of its data: {str(saved)[:100]}")
        current = self._identity
        changed = {key: now for key, now in current.items() if saved.get(key) != now}
        text = "; ".join(f"{key} was {saved.get(key)}, is {now}" for key, now in changed.items())
        files = saved.get("sources")
        only_files = (
            changed.keys() == {"sources"}
            and isinstance(files, list)
            and len(files) == len(current["sources"])
        )
        if changed and not (only_files and self._data.on_changed_files == "go_on"):
            hint = f"; {REPAIRED}" if only_files else ""
            raise DataError(f"the saved data position is of other data: {text}{hint}")
        if position is not None:
            self._check_position(position)
        if changed:
            what = what_a_change_costs(position, saved["sources"], current["sources"])
            told = f"going on at the same document numbers in changed files: {text}"
            logger.warning("%s; %s", terminal_safe(told), what)
            position = in_changed_files(position) if self._packs_whole and position else position
        self.close()
        self._position = position

    def _check_position(self, position: Any) -> None:
        """Raise `DataError` for a position that no run with these sources could have saved."""
        first_cursors = [source.first_cursor() for source in self._sources]
        whole_document_tokens = self._seq_len if self._packs_whole else None
        try:
            check_data_position(
                position, first_cursors, self._tokenizer.vocab_size, IGNORED_LABEL, whole_document_tokens
            )
        except ValueError as error:
            raise DataError(error) from error

    def close(self) -> None:
        """End the threads. The position stays; a further batch starts them again."""
        self._batches = None  # torchdata's prefetch thread ends with its node
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    def num_tokens(self, batch: MicroBatch) -> int:
        """Tokens of one of its batches, without padding."""
        return num_tokens(batch, self._tokenizer.pad_id)

    def counts(self) -> "Counts":
        """What was left out or cut up to the batch handed out last."""
        if self._position is None:
            return Counts(0, 0)
        so_far = so_far_in(self._position)
        return Counts(sum(source["bad"] for source in so_far["reader"]["sources"]), so_far["long"])

    def _start(self) -> BaseNode[MicroBatch | DataError]:
        """New nodes each time: a thread of the old ones that is still at work cannot reach them."""
        reader = Reader(self._sources, self._order)
        self._tokenising = Tokenising(reader, self._tokenizer, self._data.num_workers)
        batches = Batches(self._packer(self._tokenising), self._global_batch_size)
        if not self._data.num_workers:
            batches.reset(self._position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self._position and {"snapshot": self._position, "steps_since_snapshot": 0})
        return prefetcher

    def _packer(self, source: Tokenising) -> BaseNode[PackedSequence | DataError]:
        pad_id = self._tokenizer.pad_id
        if self._packs_whole:
            return BestFitPacker(source, self._seq_len, pad_id, self._data.long_documents)
        return ContiguousPacker(source, self._seq_len, pad_id)

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

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """What fixes the batches that follow a position, all of it fixed when the sources are opened."""
        identity = {
            "seed": self._order.seed,
            "shuffle": self._data.shuffle,
            "tokenizer": f"{self._tokenizer.name} with {self._tokenizer.vocab_size} tokens",
            "sources": [source.fingerprint() for source in self._sources],
            "weights": [table.weight for table in self._data.sources],
            "weight_by": self._data.weight_by,
            "validation_fraction": self._data.validation_fraction,
            "packing": "best_fit" if self._packs_whole else "contiguous",
        }
        if any(table.content in CONVERSATIONS for table in self._data.sources):
            template = hashlib.sha256((self._tokenizer.chat_template or "").encode()).hexdigest()
            identity |= {"chat_template": template[:12], "loss_on": self._data.loss_on}
        if self._packs_whole:  # a group of sequences that is half used up has to come out the same
            identity |= {"seq_len": self._seq_len, "long_documents": self._data.long_documents}
        return identity


@dataclass(frozen=True)
class Counts:
    """Records that were skipped as bad, and documents longer than a sequence where they are kept whole."""

    bad_records: int
    long_documents: int


def so_far_in(position: dict[str, Any]) -> dict[str, Any]:
    """How far the reader of a position is, and how many long documents it came upon, whatever the packing."""
    so_far: dict[str, Any] = position.get("so_far", {"reader": position["reader"], "long": 0})
    return so_far


def what_a_change_costs(position: dict[str, Any] | None, were: Sequence[str], are: Sequence[str]) -> str:
    """How many documents come again or not at all where the files of some sources have changed."""
    if position is None:
        return "nothing of them was read yet"
    progress = so_far_in(position)["reader"]["sources"]
    read = sum(source["used"] for source, was, now in zip(progress, were, are, strict=True) if was != now)
    told = "none is read twice or left out where records were changed in their place; where documents were added or "
    told += (
        f"taken out, at most the {read} that this pass has read come again, and about as many are left out"
    )
    gone = {(source, number) for source, number, _ in position.get("gone", ())}
    return told + (
        f"; {len(gone)} of the group being packed are used, its others are packed anew" if gone else ""
    )


CONVERSATIONS = ("messages", "alpaca")


def packs_whole_documents(data: DataTable) -> bool:
    """What `data.packing` means for these sources."""
    chats = any(table.content in CONVERSATIONS for table in data.sources)
    return data.packing == "best_fit" or (data.packing == "auto" and chats)


def open_sources(data: DataTable, tokenizer: Tokenizer) -> list[Source]:
    """The sources of a table, conversations with the tokenizer's template. Raises `DataError`."""
    chats = any(table.content in CONVERSATIONS for table in data.sources)
    template = ChatTemplate(tokenizer, data.loss_on) if chats else None
    return [open_source(table, RecordReader(table, template, tokenizer.vocab_size)) for table in data.sources]


def reading_order(
    data: DataTable, sources: Sequence[Source], seed: int, validation: bool = False
) -> MixSettings:
    """What fixes the order of documents. Raises `DataError` where a source's size is asked for and not known."""
    weights = [table.weight for table in data.sources]
    if data.weight_by == "size":
        weights = [weight * source.count() for weight, source in zip(weights, sources, strict=True)]
    return MixSettings(
        weights,
        shuffle=data.shuffle,
        seed=seed,
        epochs=data.epochs,
        skip_bad=data.on_bad_record == "skip",
        held_out=data.validation_fraction,
        validation=validation,
    )


class ValidationLoader:
    """Each `iter()` begins at the first batch and ends after `max_batches`, or with the data."""

    def __init__(self, loader: Loader, max_batches: int) -> None:
        self._loader = loader
        self._max_batches = max_batches
        self._beginning = loader.state_dict()

    def __iter__(self) -> Iterator[MicroBatch]:
        self._loader.load_state_dict(self._beginning)
        batch = None
        for _, batch in zip(range(self._max_batches), self._loader, strict=False):
            yield batch
        if batch is None:
            raise DataError(
                "validation has no document: data.validation_fraction holds none out of these sources"
            )


def _plain(state: Any) -> Any:
    """The same nested state with lists for arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state
