"""Batches of packed sequences for the training loop, from a position that can be saved and restored.

The nodes are: read, tokenise, pack, shuffle (if asked for), batch, and prefetch (with workers).
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable, ValidationTable
from torchround.data.errors import DataError
from torchround.data.formats.sources import Source
from torchround.data.opening import (
    WITH_PROMPTS,
    check_first_records,
    open_sources,
    packs_whole_documents,
)
from torchround.data.order_rules import OrderRules, rules_for, rules_of
from torchround.data.packing.batches import (
    Batches,
    CopyWatch,
    num_tokens,
    packing_state,
    progress_so_far,
    with_packing_state,
)
from torchround.data.packing.best_fit import BestFitPacker, in_changed_files
from torchround.data.packing.contiguous import ContiguousPacker, PackedSequence
from torchround.data.packing.window_shuffle import SequenceShuffler
from torchround.data.reading_order import MixSettings, Reader
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import Tokenising
from torchround.layer import IGNORED_LABEL, MicroBatch
from torchround.untrusted.data_position import PositionLimits, check_data_position
from torchround.untrusted.terminal import terminal_safe

logger = logging.getLogger(__name__)
PREFETCHED_BATCHES = 2
REPAIRED = "if a record was repaired, or documents were added, --data.on_changed_files go_on keeps the place"


def build_loader(
    data: DataTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    epochs: int | None = None,
    vocab_size: int | None = None,
) -> "Loader":
    """Make a loader of batches `[global_batch_size, seq_len]`, endless unless `data.epochs` or `epochs` is given.

    `vocab_size` is the model's, which bounds data that is token ids; default: the tokenizer's. Raises `DataError` if a
    source is missing or empty, `TokenizerError` if conversations have no template.
    """
    if epochs is not None:
        data = data.model_copy(update={"epochs": epochs})
    return Loader(data, tokenizer, seq_len, global_batch_size, seed, vocab_size=vocab_size)


def build_validation_loader(
    validation: ValidationTable,
    tokenizer: Tokenizer,
    seq_len: int,
    global_batch_size: int,
    data: DataTable | None = None,
    vocab_size: int | None = None,
) -> "ValidationLoader":
    """Make a loader of the first `validation.max_batches` batches of one unshuffled pass, the same each time.

    If validation has no sources of its own, the pass is over the documents that `data.validation_fraction` holds out.
    `data` also says how documents are treated; without it, the defaults hold. Reads the first batch. Raises
    `DataError`.
    """
    data = data or DataTable(sources=validation.sources)
    held_out = 0.0 if validation.sources else data.validation_fraction
    if not validation.sources and not held_out:
        raise DataError("validation has no sources, and data.validation_fraction is 0")
    treated = data.model_copy(
        update={
            "sources": validation.sources or data.sources,
            "shuffle": False,
            "shuffle_sequences": 0,
            "epochs": 1,
            "num_workers": 0,
            "validation_fraction": held_out,
        }
    )
    sizes = seq_len, global_batch_size
    # One pass has no copies to keep apart, so its documents are packed as densely as they can be.
    rules = OrderRules(number=1, window=0)
    loader = Loader(
        treated, tokenizer, *sizes, 0, validation=bool(held_out), rules=rules, vocab_size=vocab_size
    )
    found = ValidationLoader(loader, validation.max_batches)
    next(iter(found))  # an error of the validation data should show now, and not after many steps of training
    return found


class Loader(Iterator[MicroBatch]):
    """The batches of a run. With `data.num_workers` above 0, threads start with the first batch.

    At the end of limited data the last batch holds fewer sequences. A `DataError` is raised in place of the batch
    that would have held the bad record, and again by each later call. With `validation`, only the documents that
    `data.validation_fraction` holds out are read, otherwise only the others. `rules` is for tests and for validation;
    without it, the config and the latest rules decide the order.
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
        rules: OrderRules | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        # Opened here and not with the first batch, so that a missing source is an error as soon as the run starts.
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._sources = open_sources(data, tokenizer, self._vocab_size)
        self._mix = mix_settings(data, self._sources, seed, validation)
        self._packs_whole = packs_whole_documents(data)
        self._rules = rules or rules_for(data, seq_len)
        self._copies = CopyWatch([source.name for source in self._sources])
        self._tokenising: Tokenising | None = None
        self._batches: BaseNode[MicroBatch | DataError] | None = None
        self._position: dict[str, Any] | None = None

    def __next__(self) -> MicroBatch:
        """Return the next batch, all four tensors `[G, T]` int64 on the CPU. The caller may change them."""
        if self._batches is None:
            self._batches = self._start()
        item = next(self._batches)
        if isinstance(item, DataError):
            self.close()  # the position stays before the error, so the next call meets the same record
            raise item
        self._position = self._position_now(self._batches)
        return item

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, fit for JSON. Prefetched batches do not count.

        Besides a few integers it holds the tokens that are read but not yet in a batch: less than one sequence and
        one piece of text (64 Ki characters). With whole documents it holds less than one sequence, and the numbers of
        the documents that have left the group being packed (up to twice as many if its files have changed).
        """
        return {"data": self._identity(self._rules), "position": _plain(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `num_workers` and the batch size may have changed.

        The sequence length may have changed too if sequences are packed contiguously and not shuffled. Raises
        `DataError` if the position belongs to other files, weights, shuffling, packing, another seed or tokenizer:
        it would mean other documents. If only the files differ, `data.on_changed_files = "go_on"` makes it a warning.
        The rules of the order become those of the position, so that a run keeps the order that it began with.
        """
        saved, position = state.get("data"), state.get("position")
        if not isinstance(saved, dict):
            raise DataError(f"the saved data position does not name its data: {str(saved)[:100]}")
        rules = rules_of(saved, self._data, self._rules)
        current = self._identity(rules)
        changed = {key: now for key, now in current.items() if saved.get(key) != now}
        # Only a run that shuffles sequences saves this key.
        if "shuffle_sequences" in saved.keys() - current.keys():
            changed["shuffle_sequences"] = 0
        text = "; ".join(f"{key} was {saved.get(key, 'not set')}, is {now}" for key, now in changed.items())
        files = saved.get("sources")
        only_files = (
            changed.keys() == {"sources"}
            and isinstance(files, list)
            and len(files) == len(current["sources"])
        )
        # The number of sources must be the same even then: their cursors are matched by index.
        if changed and not (only_files and self._data.on_changed_files == "go_on"):
            hint = f"; {REPAIRED}" if only_files else ""
            raise DataError(f"the saved data position is of other data: {text}{hint}")
        if position is not None:
            self._check_position(position, rules)
        if changed:
            what = what_a_change_costs(position, saved["sources"], current["sources"])
            notice = f"continuing at the same document numbers in changed files: {text}"
            logger.warning("%s; %s", terminal_safe(notice), what)
            if self._packs_whole and position:
                position = with_packing_state(position, in_changed_files(packing_state(position)))
        if rules.number < self._rules.number:
            logger.info("the data keep the order of the version that the run began with")
        self.close()  # what is prefetched belongs to the old position
        self._position, self._rules = position, rules

    def _check_position(self, position: Any, rules: OrderRules) -> None:
        """Raise `DataError` for a position that no run with these sources could have saved."""
        limits = PositionLimits(
            first_cursors=[source.first_cursor() for source in self._sources],
            vocab_size=self._vocab_size,
            ignored_label=IGNORED_LABEL,
            whole_document_tokens=self._seq_len if self._packs_whole else None,
            shuffle_window=rules.window,
        )
        try:
            check_data_position(position, limits)
        except ValueError as error:
            raise DataError(error) from error

    def check_first_records(self) -> None:
        """Raise `DataError` if the first records of a source cannot be used. Moves no position."""
        check_first_records(self._data, self._sources, self._tokenizer)

    def close(self) -> None:
        """End the threads. The position stays, and asking for a further batch starts them again."""
        self._batches = None  # torchdata's prefetch thread ends with its node
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    def num_tokens(self, batch: MicroBatch) -> int:
        """Count the tokens of one of its batches, without padding."""
        return num_tokens(batch, self._tokenizer.pad_id)

    def epochs_read(self) -> float:
        """Return about how many passes the batches so far took, over the source that is furthest behind."""
        position = self._position
        if position is None:
            return 0.0
        read = self._passes(progress_so_far(position))
        if not (taken := position.get("taken")):
            return read
        # The reader is at the end of a window of shuffled sequences, of which some have been handed out.
        begun = self._passes(progress_so_far(packing_state(position)))
        # A window may have ended early. Positions of earlier versions do not have its number of sequences.
        return begun + (read - begun) * taken / max(position.get("sequences", self._rules.window), 1)

    def _passes(self, progress: dict[str, Any]) -> float:
        pairs = zip(self._sources, progress["reader"]["sources"], strict=True)
        return min(float(state["epoch"] + source.share_read(state["place"])) for source, state in pairs)

    def size_bytes(self) -> int | None:
        """Return the bytes that one pass over all sources reads, None if a source's files do not say it."""
        sizes = [source.total_bytes() for source in self._sources]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def num_bad_records(self) -> int:
        """Count the records skipped as bad up to the last batch handed out."""
        if self._position is None:
            return 0
        return sum(source["bad"] for source in progress_so_far(self._position)["reader"]["sources"])

    def num_long_documents(self) -> int:
        """Count the documents longer than a sequence up to the last batch; only best-fit packing counts them."""
        return 0 if self._position is None else progress_so_far(self._position)["long"]

    def _start(self) -> BaseNode[MicroBatch | DataError]:
        """Make the nodes, and go to the position."""
        # New nodes each time: a thread that still works on the old ones cannot disturb them.
        rules = self._rules
        reader = Reader(self._sources, replace(self._mix, copies_apart=rules.copies_apart))
        self._tokenising = Tokenising(reader, self._tokenizer, self._data.num_workers)
        sequences = self._packer(self._tokenising)
        if rules.window:
            sequences = SequenceShuffler(
                sequences, rules.window, self._mix.seed, across_epochs=not rules.copies_apart
            )
        batches = Batches(sequences, self._global_batch_size, self._copies)
        if not self._data.num_workers:
            batches.reset(self._position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self._position and {"snapshot": self._position, "steps_since_snapshot": 0})
        return prefetcher

    def _packer(self, source: Tokenising) -> BaseNode[PackedSequence | DataError]:
        pad_id = self._tokenizer.pad_id
        if self._packs_whole:
            # Asked for only here: to count the records of small archives, they are read.
            counts = [each.quick_count() for each in self._sources] if self._rules.copies_apart else []
            return BestFitPacker(source, self._seq_len, pad_id, self._data.long_documents, counts)
        return ContiguousPacker(source, self._seq_len, pad_id)

    def _position_now(self, batches: BaseNode[MicroBatch | DataError]) -> dict[str, Any]:
        state: dict[str, Any] = batches.state_dict()
        if not self._data.num_workers:
            return state
        # The prefetcher keeps the nodes' state as it was after each batch, so a resumed run repeats no batch.
        assert state["steps_since_snapshot"] == 0, (
            f"{state['steps_since_snapshot']} batches without a snapshot"
        )
        snapshot: dict[str, Any] = state["snapshot"]
        return snapshot

    def _identity(self, rules: OrderRules) -> dict[str, Any]:
        """Return everything that fixes the batches after a position, under the given rules of the order."""
        identity = {
            "seed": self._mix.seed,
            "shuffle": self._data.shuffle,
            "tokenizer": f"{self._tokenizer.name} with {self._tokenizer.vocab_size} tokens",
            "sources": self._fingerprints,
            "weights": [table.weight for table in self._data.sources],
            "weight_by": self._data.weight_by,
            "validation_fraction": self._data.validation_fraction,
            "packing": "best_fit" if self._packs_whole else "contiguous",
        }
        # Keys are added only if they matter, so that positions of runs without these features stay valid.
        if any(table.content in WITH_PROMPTS for table in self._data.sources):
            template = self._tokenizer.templates.digest()
            identity |= {"chat_template": template, "loss_on": self._data.loss_on}
        # A group that is half used up must be packed again into the same sequences.
        if self._packs_whole:
            identity |= {"seq_len": self._seq_len, "long_documents": self._data.long_documents}
        return identity | rules.identity(self._seq_len)

    @cached_property
    def _fingerprints(self) -> list[str]:
        return [source.fingerprint() for source in self._sources]


def what_a_change_costs(position: dict[str, Any] | None, were: Sequence[str], are: Sequence[str]) -> str:
    """Describe how many documents come again or not at all, if the files of some sources have changed."""
    if position is None:
        return "none of their documents was read yet"
    progress = progress_so_far(position)["reader"]["sources"]
    read = sum(source["used"] for source, was, now in zip(progress, were, are, strict=True) if was != now)
    text = (
        "if records were changed in place, none is read twice or left out; if documents were added or removed, "
        f"at most the {read} that this pass has read come again, and about as many are left out"
    )
    gone = {(source, number) for source, number, _ in packing_state(position).get("gone", ())}
    if gone:
        text += (
            f"; {len(gone)} documents of the group being packed are used, its other documents are packed anew"
        )
    if position.get("taken"):
        text += (
            f"; {position['taken']} sequences of the window being shuffled are used; the window is packed anew, and "
            "as many of its new sequences are left out"
        )
    return text


def mix_settings(
    data: DataTable, sources: Sequence[Source], seed: int, validation: bool = False
) -> MixSettings:
    """Return the settings that fix the order of documents. Raises `DataError` if a source's size is needed and unknown."""
    weights = [table.weight for table in data.sources]
    if data.weight_by == "size":
        # Counted here and not by the reader: counting may read whole archives, which should happen once at the start.
        weights = [weight * source.count() for weight, source in zip(weights, sources, strict=True)]
    return MixSettings(
        weights,
        shuffle=data.shuffle,
        seed=seed,
        epochs=data.epochs,
        skip_bad=data.on_bad_record == "skip",
        max_bad_fraction=data.max_bad_fraction,
        held_out=data.validation_fraction,
        validation=validation,
    )


class ValidationLoader:
    """The batches of a validation. Each `iter()` begins at the first and ends after `max_batches`, or with the data."""

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
                "validation has no document: data.validation_fraction holds out none of these sources' documents"
            )


def _plain(state: Any) -> Any:
    """Copy a nested state with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state
