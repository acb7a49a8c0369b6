"""Batches of packed sequences for the training loop, from a position that can be saved and restored.

The nodes are: read, tokenise, pack, shuffle (`data.shuffle_sequences`), batch, and prefetch (with workers). The sources are opened
first, and their first records read for mistakes that all of them share.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any

import numpy as np
from torchdata.nodes import BaseNode, Prefetcher

from torchround.config import DataTable, SourceTable, ValidationTable
from torchround.data.best_fit import BestFitPacker
from torchround.data.document_types import (
    Conversation,
    DataError,
    DataFileError,
    Document,
    TextSpan,
    TokenizerError,
)
from torchround.data.formats.content import RecordReader, Render
from torchround.data.formats.sources import Source
from torchround.data.formats.streams import open_source
from torchround.data.packing import Batches, ContiguousPacker, num_tokens, progress_so_far
from torchround.data.reading_order import FEW_DOCUMENTS, MixSettings, Reader
from torchround.data.reading_order import logger as reader_logger
from torchround.data.shuffling import WAITING_TOKEN_BYTES, SequenceShuffler, auto_window
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import Tokenizer
from torchround.data.tokenising import Tokenising
from torchround.layer import MicroBatch
from torchround.planning.run_question import INTEGER_TENSORS

logger = logging.getLogger(__name__)
PREFETCHED_BATCHES = 2
CONVERSATIONS = ("messages", "alpaca")
WITH_PROMPTS = (*CONVERSATIONS, "prompt_completion")
FIRST_DOCUMENTS = 100  # looked at for mistakes that all records share
ALL_BAD = 8
"""Number of records at the beginning that must all be bad before a run that skips bad records is refused."""
ORDER = 2
"""Number of the rules that turn documents into the order of sequences. A position of other rules is refused."""


def packs_whole_documents(data: DataTable) -> bool:
    chats = any(table.content in WITH_PROMPTS for table in data.sources)
    return data.packing == "best_fit" or (data.packing == "auto" and chats)


def window_of(data: DataTable, seq_len: int) -> int:
    """Count the sequences of a shuffled window, 0 if sequences are not shuffled."""
    if data.shuffle_sequences != "auto":
        return data.shuffle_sequences
    # Whole documents leave in a mixed order already.
    return auto_window(seq_len) if data.shuffle and not packs_whole_documents(data) else 0


class Loader(Iterator[MicroBatch]):
    """The batches of a run, each `[global_batch_size, seq_len]`, endless unless `data.epochs` is given.

    With `data.num_workers` above 0, threads start with the first batch. `vocab_size` is the model's, which bounds data that
    is token ids; default: the tokenizer's. Raises `DataError` if a source is missing or empty, `TokenizerError` if
    conversations have no template.

    The last batch of limited data holds fewer sequences. A `DataError` is raised in place of the batch that would have held
    the bad record, and again by each later call. With `validation`, only the documents that `data.validation_fraction`
    holds out are read, otherwise only the others. Without `copies_apart`, whole documents are packed as densely as they
    can be, also across the ends of epochs.
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
        copies_apart: bool = True,
        vocab_size: int | None = None,
    ) -> None:
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self._global_batch_size = global_batch_size
        self._copies_apart = copies_apart
        # Opened here and not with the first batch, so that a missing source is an error as soon as the run starts.
        self._sources = open_sources(data, tokenizer, vocab_size)
        self._mix = mix_settings(data, seed, validation)
        self._position: Any = None  # after the last batch handed out; None is the beginning
        self._tokenising: Tokenising | None = None
        self._nodes: BaseNode[MicroBatch | DataError] | None = None
        self._has_ended = False

    def __next__(self) -> MicroBatch:
        """Read the next batch, all four tensors `[G, T]` int64 on the CPU. The caller may change them."""
        if self._has_ended:
            raise StopIteration
        if self._nodes is None:
            self._nodes = self._start()
        batch = next(self._nodes, None)
        if isinstance(batch, DataError):
            self.close()  # the position stays before the error, so the next call meets the same record
            raise batch
        if batch is None:  # the end of the data is no place of its own
            self._has_ended = True
            raise StopIteration
        state: dict[str, Any] = self._nodes.state_dict()
        if isinstance(self._nodes, Prefetcher):
            # The prefetcher keeps the nodes' state as it was after each batch, so a resumed run repeats no batch.
            assert state["steps_since_snapshot"] == 0, (
                f"{state['steps_since_snapshot']} batches without a snapshot"
            )
            state = state["snapshot"]
        self._position = state
        return batch

    def _start(self) -> BaseNode[MicroBatch | DataError]:
        # New nodes each time: a thread that still works on the old ones cannot disturb them.
        data, pad_id, seq_len = self._data, self._tokenizer.pad_id, self._seq_len
        reader = Reader(self._sources, self._mix)
        self._tokenising = Tokenising(reader, self._tokenizer, data.num_workers)
        sequences: BestFitPacker | ContiguousPacker | SequenceShuffler
        if packs_whole_documents(data):
            # Asked for only here: to count the records of small archives, they are read.
            counts = [each.count() for each in self._sources] if self._copies_apart else []
            sequences = BestFitPacker(self._tokenising, seq_len, pad_id, data.long_documents, counts)
        else:
            sequences = ContiguousPacker(self._tokenising, seq_len, pad_id)
        if window := window_of(data, seq_len):
            sequences = SequenceShuffler(sequences, window, self._mix.seed)
        batches = Batches(sequences, self._global_batch_size)
        if not data.num_workers:
            batches.reset(self._position)
            return batches
        prefetcher = Prefetcher(batches, PREFETCHED_BATCHES)
        prefetcher.reset(self._position and {"snapshot": self._position, "steps_since_snapshot": 0})
        return prefetcher

    # The position.

    def state_dict(self) -> dict[str, Any]:
        """Save the position after the last batch handed out, fit for JSON. Prefetched batches do not count.

        Besides a few integers it holds the tokens that are read but not yet in a batch: less than one sequence and
        one piece of text (64 Ki characters), with whole documents less than one sequence.
        """
        return {"data": self._identity(), "position": _plain(self._position)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `num_workers` and the batch size may have changed.

        The sequence length may have changed too if sequences are packed contiguously and not shuffled. Raises
        `DataError` if the position belongs to other files, weights, shuffling, packing, another seed or tokenizer:
        it would mean other documents.
        """
        saved, current = state.get("data"), self._identity()
        if not isinstance(saved, dict):
            raise DataError(f"the saved data position does not name its data: {str(saved)[:100]}")
        changed = [key for key in {**current, **saved} if saved.get(key) != current.get(key)]
        if changed:
            text = "; ".join(
                f"{key} was {saved.get(key, 'not set')}, is {current.get(key, 'not set')}" for key in changed
            )
            raise DataError(f"the saved data position is of other data: {text}")
        self.close()  # what is prefetched belongs to the old position
        self._position = state.get("position")

    def check_first_records(self) -> None:
        """Raise `DataError` if the first records of a source cannot be used. Moves no position."""
        check_first_records(self._data, self._sources, self._tokenizer)

    def num_left(self, state: dict[str, Any] | None, advance: Callable[[], object]) -> int:
        """Count the batches after a saved position, or all, by reading them. The loader stays where it is. Raises `DataError`."""
        beginning, level, count = self.state_dict(), reader_logger.level, 0
        reader_logger.setLevel(logging.ERROR)  # the run warns of the same bad records
        try:
            with suppress(DataError):  # resuming refuses this position and says why
                self.load_state_dict(beginning if state is None else state)
            for _ in self:
                count += 1
                advance()
        finally:
            self.load_state_dict(beginning)
            reader_logger.setLevel(level)
        return count

    def close(self) -> None:
        """End the threads. The position stays, and asking for a further batch starts them again."""
        self._nodes = None  # torchdata's prefetch thread ends with its node
        self._has_ended = False
        if self._tokenising is not None:
            self._tokenising.close()
            self._tokenising = None

    # Figures.

    def num_tokens(self, batch: MicroBatch) -> int:
        return num_tokens(batch, self._tokenizer.pad_id)

    def num_bad_records(self) -> int:
        """Count the records skipped as bad up to the last batch handed out."""
        if self._position is None:
            return 0
        return sum(source["bad"] for source in progress_so_far(self._position)["reader"]["sources"])

    def num_long_documents(self) -> int:
        """Count the documents longer than a sequence up to the last batch; only best-fit packing counts them."""
        return 0 if self._position is None else int(progress_so_far(self._position)["long"])

    def _identity(self) -> dict[str, Any]:
        """Describe everything that fixes the batches after a position."""
        packs_whole = packs_whole_documents(self._data)
        identity = {
            "seed": self._mix.seed,
            "shuffle": self._data.shuffle,
            "tokenizer": f"{self._tokenizer.name} with {self._tokenizer.vocab_size} tokens",
            "sources": self._source_fingerprints,
            "weights": [table.weight for table in self._data.sources],
            "weight_by": "source",  # in positions since the first release
            "validation_fraction": self._data.validation_fraction,
            "packing": "best_fit" if packs_whole else "contiguous",
        }
        # Keys are added only if they matter, so that positions of runs without these features stay valid.
        if any(table.content in WITH_PROMPTS for table in self._data.sources):
            template = self._tokenizer.template.digest()
            identity |= {"chat_template": template, "loss_on": self._data.loss_on}
        # A group or a window that is half used up must be packed again into the same sequences.
        if packs_whole:
            identity |= {"seq_len": self._seq_len, "long_documents": self._data.long_documents}
        identity["order"] = ORDER
        if window := window_of(self._data, self._seq_len):
            identity |= {"seq_len": self._seq_len, "shuffle_sequences": window}
        return identity

    def fingerprints(self) -> dict[str, str]:
        """List what must be alike on all machines, by name. Names of files and folders do not matter."""
        return {f"data: {key}": str(value) for key, value in self._identity().items()}

    @cached_property
    def _source_fingerprints(self) -> list[str]:
        return [source.fingerprint() for source in self._sources]


def _plain(state: Any) -> Any:
    """Copy a nested state with lists in place of arrays."""
    if isinstance(state, np.ndarray):
        return state.tolist()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return state


def mix_settings(data: DataTable, seed: int, validation: bool = False) -> MixSettings:
    return MixSettings(
        [table.weight for table in data.sources],
        shuffle=data.shuffle,
        seed=seed,
        epochs=data.epochs,
        skip_bad=data.on_bad_record == "skip",
        held_out=data.validation_fraction,
        validation=validation,
    )


def loader_bytes(data: DataTable, seq_len: int, global_batch_size: int) -> int:
    """Count the large buffers of the data loader: the window that sequences are shuffled in, and batches being made."""
    token_bytes = INTEGER_TENSORS * 8
    # The batch of the step under way, the next one, and with workers the batches that wait for it.
    batches = 2 + (PREFETCHED_BATCHES if data.num_workers else 0)
    token_total = seq_len * batches * global_batch_size
    return token_bytes * token_total + WAITING_TOKEN_BYTES * seq_len * window_of(data, seq_len)


# Validation.


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
    loader = Loader(
        treated,
        tokenizer,
        seq_len,
        global_batch_size,
        seed=0,
        validation=bool(held_out),
        copies_apart=False,  # one pass has no copies
        vocab_size=vocab_size,
    )
    found = ValidationLoader(loader, validation.max_batches)
    next(iter(found))  # an error of the validation data should show now, and not after many steps of training
    return found


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
                "validation has no document: data.validation_fraction holds out none of these sources' documents "
                f"({FEW_DOCUMENTS})"
            )

    def fingerprints(self) -> dict[str, str]:
        return {f"validation {key}": value for key, value in self._loader.fingerprints().items()}


# The sources of a run, and a look at their first records for mistakes that all records share: a field of another name, a
# parquet file without the column, token ids of another vocabulary. A run would meet them only after its start, or, if bad
# records are skipped, never say that it met them.


def reads_conversations(data: DataTable) -> bool:
    return any(table.content in CONVERSATIONS for table in data.sources)


def open_sources(data: DataTable, tokenizer: Tokenizer, vocab_size: int | None = None) -> list[Source]:
    """Open the sources of a table; the tokenizer's template writes conversations. Raises `DataError`.

    `vocab_size` bounds records that are token ids; it is the model's, which may have more than the tokenizer.
    """
    kinds = {table.content for table in data.sources}
    render: Render | None = None
    if kinds & set(WITH_PROMPTS):
        try:
            render = ChatTemplate(tokenizer, data.loss_on)
        except TokenizerError as error:
            if kinds & set(CONVERSATIONS):
                raise
            render = partial(_refuse, str(error))  # pairs that are plain text need no template
    learns_all, most_ids = data.loss_on == "all", vocab_size or tokenizer.vocab_size
    readers = [RecordReader(table, tokenizer, render, most_ids, learns_all) for table in data.sources]
    return [open_source(table, reader) for table, reader in zip(data.sources, readers, strict=True)]


def _refuse(reason: str, _: Conversation) -> tuple[TextSpan, ...]:
    raise DataError(reason)


def check_first_records(data: DataTable, sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Raise `DataError` if the first records of a source cannot be used. Warns of text that a run reads as it is.

    With `on_bad_record = "stop"` one bad record is enough, because it would stop the run as well.
    """
    most_bad = 1 if data.on_bad_record == "stop" else ALL_BAD
    for table, source in zip(data.sources, sources, strict=True):
        has_good, errors = False, list[DataError]()
        for document in source.first_documents(FIRST_DOCUMENTS):
            try:
                content, _ = source.read(document, 0)
            except DataFileError:
                raise  # no record is at fault: leaving such documents out would hide it
            except DataError as error:
                errors.append(error)
                content = ""
            # A document that is empty is neither good nor bad.
            has_good |= len(content) > 0
            # Text is read until there is something to warn of, other records only until one is good.
            is_enough = has_good
            if isinstance(content, str) and not table.special_tokens:
                is_enough = _has_warned(table, tokenizer, document, content)
            if is_enough or (len(errors) >= most_bad and not has_good):
                break
        if errors and not has_good:
            raise DataError(f"source {table.path!r}: {errors[0]}")


def _has_warned(table: SourceTable, tokenizer: Tokenizer, document: Document, text: str) -> bool:
    """Warn if a text looks like records, or holds the name of a special token. Returns whether it does."""
    if document.record is None and table.format == "auto" and text.startswith("{"):
        with suppress(ValueError, RecursionError):
            if all(isinstance(json.loads(line), dict) for line in text.split("\n", 2)[:2] if line):
                logger.warning(
                    '%s looks like JSON Lines and is read as one text; format = "jsonl" in its source reads the records',
                    document,
                )
                return True
    found = tokenizer.special_pattern.search(text)
    if found is not None:
        logger.warning(
            "%s holds %s, the name of a special token. It is read as plain text, so that no text can fake a turn; if a chat "
            "template wrote this text, special_tokens = true in its source reads such names as tokens",
            *(document, found[0]),
        )
    return found is not None
