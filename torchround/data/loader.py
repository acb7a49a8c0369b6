"""Batches of packed sequences for the training loop, from a position that can be saved and restored.

The sources are opened first, and their first records read for mistakes that all of them share. The documents are dealt to
`data.streams` streams, each of which makes its part of every batch.
"""

import copy
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from torchround.config import DataTable, SourceTable, ValidationTable
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
from torchround.data.packing import num_tokens, padding_sequences, progress_so_far
from torchround.data.reading_order import FEW_DOCUMENTS, MixSettings, content_bytes
from torchround.data.sequence_stream import (
    CONVERSATIONS,
    ELSEWHERE,
    PREFETCHED_BATCHES,
    WITH_PROMPTS,
    OrderRules,
    SequenceStream,
    joined,
    packs_whole_documents,
    rules_for,
    rules_of,
    split_position,
)
from torchround.data.shuffling import WAITING_TOKEN_BYTES
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import PairFormat, Tokenizer, splits_at
from torchround.layer import MicroBatch
from torchround.planning.run_question import INTEGER_TENSORS

logger = logging.getLogger(__name__)
DOCUMENTS_READ = 100  # for names of special tokens
ALL_BAD = 8
"""Number of records at the beginning that must all be bad before a run that skips bad records is refused."""
# Keys of a position's data that are saved only if they have another value than this one.
LEFT_OUT = {"shuffle_sequences": 0, "streams": 1}


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


class Loader(Iterator[MicroBatch]):
    """The batches of a run. With `data.num_workers` above 0, threads start with the first batch.

    At the end of limited data the last batch holds fewer sequences; with several streams it is filled up with padding.
    A `DataError` is raised in place of the batch that would have held the bad record, and again by each later call. With
    `validation`, only the documents that `data.validation_fraction` holds out are read, otherwise only the others.
    `rules` is for tests and for validation; without it, the config and the latest rules decide the order.
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
        if global_batch_size % data.streams:
            raise DataError(
                f"{global_batch_size} sequences cannot be parted evenly among {data.streams} streams"
            )
        self._data = data
        self._tokenizer = tokenizer
        self._seq_len = seq_len
        self.num_streams = data.streams
        self.global_batch_size = global_batch_size
        # Opened here and not with the first batch, so that a missing source is an error as soon as the run starts.
        self._vocab_size = vocab_size or tokenizer.vocab_size
        self._sources = open_sources(data, tokenizer, self._vocab_size)
        self._mix = mix_settings(data, self._sources, seed, validation)
        self._rules = rules or rules_for(data, seq_len)
        self._streams = [
            SequenceStream(
                data,
                tokenizer,
                seq_len,
                global_batch_size // data.streams,
                replace(self._mix, stream=number, num_streams=data.streams),
                # The index of the files is shared. The place in a file is each stream's own.
                [copy.copy(source) for source in self._sources] if number else self._sources,
            )
            for number in range(data.streams)
        ]
        self._read: tuple[int, ...] = tuple(range(data.streams))
        # Bad records and long documents of the streams that other machines read, as those have told.
        self._told_counts: dict[int, tuple[int, int]] = {}

    def __next__(self) -> MicroBatch:
        """Return the next batch, all four tensors `[G, T]` int64 on the CPU. The caller may change them.

        It has the sequences of the streams that are read, in the order of the streams. If only some streams have
        ended, padding takes their place.
        """
        try:
            parts = [self._streams[number].next(self._rules, len(self._read)) for number in self._read]
        except DataError:
            self.close()  # the position stays before the error, so the next call meets the same record
            raise
        if all(part is None for part in parts):
            raise StopIteration
        for number in self._read:
            self._streams[number].keep_position()
        if self.num_streams == 1 and parts[0] is not None:
            return parts[0]
        return self._filled(parts)

    def padding(self) -> MicroBatch:
        return self._filled([None] * len(self._read))

    def _filled(self, parts: Sequence[MicroBatch | None]) -> MicroBatch:
        """Join the streams' parts of a batch, each filled up with padding."""
        size = self.global_batch_size // self.num_streams
        pieces: list[MicroBatch] = []
        for part in parts:
            missing = size - (0 if part is None else len(part.tokens))
            pieces += [] if part is None else [part]
            if missing:
                pieces.append(padding_sequences(missing, self._seq_len, self._tokenizer.pad_id))
        return MicroBatch(
            *(torch.cat(tensors) for tensors in zip(*map(MicroBatch.tensors, pieces), strict=True))
        )

    # Streams.

    def read_only(self, streams: Iterable[int]) -> None:
        """Read only these streams from now on; other machines read the others. Goes back to the position.

        To read all streams again, load a position that has them all.
        """
        self.close()
        self._read = tuple(sorted(streams))
        for number, stream in enumerate(self._streams):
            if number not in self._read:
                stream.position = ELSEWHERE

    def row_of(self, sequence: int) -> int:
        """Return the place in its batches of sequence `sequence` of the whole batch, whose stream must be read."""
        if self.num_streams == 1:
            return sequence
        size = self.global_batch_size // self.num_streams
        return self._read.index(sequence // size) * size + sequence % size

    @property
    def counts(self) -> list[list[int]]:
        """Stream, bad records and long documents of each stream that is read, to tell the other machines."""
        return [[number, *self._counts_of(number)] for number in self._read]

    def hear_counts(self, counts: Iterable[Sequence[int]]) -> None:
        self._told_counts = {number: (bad, long) for number, bad, long in counts}

    # The position.

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last batch handed out, fit for JSON. Prefetched batches do not count.

        Besides a few integers it holds the tokens that are read but not yet in a batch: less than one sequence and
        one piece of text (64 Ki characters), with whole documents less than one sequence. All this is there once for
        each stream; if other machines read some streams, `joined_positions` makes it whole.
        """
        position = joined([stream.position for stream in self._streams])
        return {"data": self._identity(self._rules), "position": position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. `num_workers` and the batch size may have changed.

        The sequence length may have changed too if sequences are packed contiguously and not shuffled. Raises
        `DataError` if the position belongs to other files, weights, shuffling, packing, another seed or tokenizer:
        it would mean other documents. The rules of the order become those of the position, so that a run keeps the
        order that it began with.
        """
        saved, position = state.get("data"), state.get("position")
        if not isinstance(saved, dict):
            raise DataError(f"the saved data position does not name its data: {str(saved)[:100]}")
        rules = rules_of(saved, self._data, self._rules)
        current = self._identity(rules)
        changed = {key: now for key, now in current.items() if saved.get(key) != now}
        changed |= {key: LEFT_OUT[key] for key in LEFT_OUT if key in saved.keys() - current.keys()}
        if changed.keys() == {"sources"} and isinstance(saved.get("sources"), list):
            names = zip(self._sources, saved["sources"], current["sources"], strict=False)
            text = "; ".join(f"{source.name}: {was}, now {now}" for source, was, now in names if was != now)
            raise DataError(f"the saved data position is of other files: {text}")
        if changed:
            text = "; ".join(
                f"{key} was {saved.get(key, 'not set')}, is {now}" for key, now in changed.items()
            )
            raise DataError(f"the saved data position is of other data: {text}")
        first_places = [source.first_cursor() for source in self._sources]
        positions = split_position(position, self.num_streams, first_places)
        if rules.number < self._rules.number:
            logger.info("the data keep the order of the version that the run began with")
        self.close()  # what is prefetched belongs to the old position
        self._rules = rules
        for stream, position in zip(self._streams, positions, strict=True):
            stream.position = position

    def check_first_records(self) -> None:
        """Raise `DataError` if the first records of a source cannot be used. Moves no position."""
        check_first_records(self._data, self._sources, self._tokenizer)

    def close(self) -> None:
        """End the threads. The position stays, and asking for a further batch starts them again."""
        for stream in self._streams:
            stream.close()

    # Figures.

    def num_tokens(self, batch: MicroBatch) -> int:
        return num_tokens(batch, self._tokenizer.pad_id)

    def num_bad_records(self) -> int:
        """Count the records skipped as bad up to the last batch handed out, in all streams."""
        return sum(self._counts_of(number)[0] for number in range(self.num_streams))

    def num_long_documents(self) -> int:
        """Count the documents longer than a sequence up to the last batch; only best-fit packing counts them."""
        return sum(self._counts_of(number)[1] for number in range(self.num_streams))

    def _counts_of(self, number: int) -> tuple[int, int]:
        position = self._streams[number].position
        if position is None or position == ELSEWHERE:
            return self._told_counts.get(number, (0, 0))
        progress = progress_so_far(position)
        return sum(source["bad"] for source in progress["reader"]["sources"]), progress["long"]

    def _identity(self, rules: OrderRules) -> dict[str, Any]:
        """Return everything that fixes the batches after a position, under the given rules of the order."""
        packs_whole = packs_whole_documents(self._data)
        identity = {
            "seed": self._mix.seed,
            "shuffle": self._data.shuffle,
            "tokenizer": f"{self._tokenizer.name} with {self._tokenizer.vocab_size} tokens",
            "sources": self._fingerprints,
            "weights": [table.weight for table in self._data.sources],
            "weight_by": self._data.weight_by,
            "validation_fraction": self._data.validation_fraction,
            "packing": "best_fit" if packs_whole else "contiguous",
        }
        # Keys are added only if they matter, so that positions of runs without these features stay valid.
        if self.num_streams > 1:
            identity["streams"] = self.num_streams
        if any(table.content in WITH_PROMPTS for table in self._data.sources):
            template = self._tokenizer.templates.digest()
            identity |= {"chat_template": template, "loss_on": self._data.loss_on}
        # A group that is half used up must be packed again into the same sequences.
        if packs_whole:
            identity |= {"seq_len": self._seq_len, "long_documents": self._data.long_documents}
        return identity | rules.identity(self._seq_len)

    def fingerprints(self) -> dict[str, str]:
        """Return what must be alike on all machines, by config key: each source's files and first documents, and the rest.

        Names of files and folders do not matter. Reads the first documents of each source.
        """
        identity = self._identity(self._rules)
        sources = zip(identity.pop("sources"), self._sources, strict=True)
        found = {
            f"data.sources[{number}]": f"{files}, first documents {first_content(source)}"
            for number, (files, source) in enumerate(sources)
        }
        return found | {f"data: {key}": str(value) for key, value in identity.items()}

    @cached_property
    def _fingerprints(self) -> list[str]:
        return [source.fingerprint() for source in self._sources]


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


def loader_bytes(data: DataTable, seq_len: int, global_batch_size: int) -> int:
    """Count the large buffers of the data loader: the window that sequences are shuffled in, and batches being made."""
    token_bytes = INTEGER_TENSORS * 8
    # The batch of the step under way, the next one, and with workers the batches that wait for it.
    batches = 2 + (PREFETCHED_BATCHES if data.num_workers else 0)
    batches += data.streams > 1  # the parts of the streams, while they are joined
    window = rules_for(data, seq_len).window
    token_total = seq_len * batches * global_batch_size
    return token_bytes * token_total + WAITING_TOKEN_BYTES * seq_len * window


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
            "streams": 1,
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
        return {f"validation: {key}": value for key, value in self._loader.fingerprints().items()}


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
    readers = [
        RecordReader(
            table,
            render,
            vocab_size or tokenizer.vocab_size,
            PairFormat(tokenizer, data.loss_on == "all", table.special_tokens),
            data.loss_on == "all",
            partial(splits_at, tokenizer, reads_special=table.special_tokens),
        )
        for table in data.sources
    ]
    return [open_source(table, reader) for table, reader in zip(data.sources, readers, strict=True)]


def _refuse(reason: str, _: Conversation) -> tuple[TextSpan, ...]:
    raise DataError(reason)


def check_first_records(data: DataTable, sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Raise `DataError` if the first records of a source cannot be used. Warns of text that a run reads as it is.

    With `on_bad_record = "stop"` one bad record is enough, because it would stop the run as well.
    """
    most_bad = 1 if data.on_bad_record == "stop" else ALL_BAD
    for table, source in zip(data.sources, sources, strict=True):
        is_plain = table.content == "text" and not table.special_tokens
        num_good, errors = 0, list[DataError]()
        for document in source.first_documents(DOCUMENTS_READ if is_plain else ALL_BAD):
            try:
                content, _ = source.read(document, 0)
            except DataFileError:
                raise  # no record is at fault: leaving such documents out would hide it
            except DataError as error:
                errors.append(error)
            else:
                num_good += len(content) > 0
                if is_plain and isinstance(content, str) and _warns(table, tokenizer, document, content):
                    break
            if len(errors) >= most_bad and not num_good:
                break
        # A document that is empty is neither good nor bad. Later records may be bad: this is about the beginning.
        if errors and not num_good:
            raise DataError(f"source {table.path!r}: {errors[0]}")


def first_content(source: Source) -> str:
    """Return a digest of a source's first documents, of the beginning of each."""
    digest = hashlib.sha256()
    for document in source.first_documents(ALL_BAD):
        try:
            content, _ = source.read(document, 0)
        except DataError:
            content = ""  # the run reports it when it comes to it
        digest.update(hashlib.sha256(content_bytes(content)).digest())
    return digest.hexdigest()[:12]


def _warns(table: SourceTable, tokenizer: Tokenizer, document: Document, text: str) -> bool:
    """Warn if a text looks like records, or holds the name of a special token. Say whether it does."""
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
