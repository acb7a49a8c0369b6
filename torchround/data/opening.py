"""Opens the sources of a run, and looks at their first records for mistakes that all records share.

Such mistakes are a field of another name, a parquet file without the column, token ids of another vocabulary. A run would
meet them only after its start, or, if bad records are skipped, never say that it met them.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from torchround.config import DataTable, SourceTable
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
from torchround.data.reading_order import content_bytes
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import PairFormat, Tokenizer, splits_at

logger = logging.getLogger(__name__)
DOCUMENTS_READ = 100  # for names of special tokens
ALL_BAD = 8
"""Number of records at the beginning that must all be bad before a run that skips bad records is refused."""
CONVERSATIONS = ("messages", "alpaca")
WITH_PROMPTS = (*CONVERSATIONS, "prompt_completion")


def reads_conversations(data: DataTable) -> bool:
    return any(table.content in CONVERSATIONS for table in data.sources)


def packs_whole_documents(data: DataTable) -> bool:
    chats = any(table.content in WITH_PROMPTS for table in data.sources)
    return data.packing == "best_fit" or (data.packing == "auto" and chats)


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
