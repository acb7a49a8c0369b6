"""Opens the sources of a run, and looks at their first records for mistakes that all records share.

Such mistakes are a field of another name, a parquet file without the column, token ids of another vocabulary. A run would
meet them only after its start, or, if bad records are skipped, never say that it met them.
"""

import hashlib
import json
import logging
from collections.abc import Sequence
from functools import partial

from torchround.config import DataTable, SourceTable
from torchround.data.document_types import (
    Content,
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
from torchround.data.text.special_tokens import PairFormat, splits_at
from torchround.data.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
DOCUMENTS_READ = 100  # for names of special tokens
ALL_BAD = 8
"""Number of records at the beginning that must all be bad before a run that skips bad records is refused."""
CONVERSATIONS = ("messages", "alpaca")
WITH_PROMPTS = (*CONVERSATIONS, "prompt_completion")


def reads_conversations(data: DataTable) -> bool:
    """Say whether the tokenizer's chat template writes documents of these sources."""
    return any(table.content in CONVERSATIONS for table in data.sources)


def packs_whole_documents(data: DataTable) -> bool:
    """Say whether `data.packing` means best-fit packing for these sources."""
    chats = any(table.content in WITH_PROMPTS for table in data.sources)
    return data.packing == "best_fit" or (data.packing == "auto" and chats)


def open_sources(data: DataTable, tokenizer: Tokenizer, vocab_size: int | None = None) -> list[Source]:
    """Open the sources of a table; the tokenizer's template writes conversations. Raises `DataError`.

    `vocab_size` bounds records that are token ids; it is the model's, which may have more than the tokenizer.
    """
    kinds = {table.content for table in data.sources}
    render: Render | None = ChatTemplate(tokenizer, data.loss_on) if kinds & set(CONVERSATIONS) else None
    if "prompt_completion" in kinds and render is None:
        render = _template_if_needed(tokenizer, data.loss_on)
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


def _template_if_needed(tokenizer: Tokenizer, loss_on: str) -> Render:
    """Return the chat template, or a function that raises its error: pairs that are plain text need no template."""
    try:
        return ChatTemplate(tokenizer, loss_on)
    except TokenizerError as error:
        reason = str(error)

    def refuse(_: Conversation) -> tuple[TextSpan, ...]:
        raise DataError(reason)

    return refuse


def check_first_records(data: DataTable, sources: Sequence[Source], tokenizer: Tokenizer) -> None:
    """Raise `DataError` if the first records of a source cannot be used.

    With `on_bad_record = "stop"` one bad record is enough, because it would stop the run as well. Warns of text that holds
    names of special tokens.
    """
    for table, source in zip(data.sources, sources, strict=True):
        _check_source(table, source, tokenizer, 1 if data.on_bad_record == "stop" else ALL_BAD)


def _check_source(table: SourceTable, source: Source, tokenizer: Tokenizer, most_bad: int) -> None:
    is_plain = table.content == "text" and not table.special_tokens
    num_good, first_error, num_bad = 0, None, 0
    for document in source.first_documents(DOCUMENTS_READ if is_plain else ALL_BAD):
        try:
            content, _ = source.read(document, 0)
        except DataFileError:
            raise  # no record is at fault: leaving such documents out would hide it
        except DataError as error:
            first_error, num_bad = first_error or error, num_bad + 1
        else:
            num_good += len(content) > 0
            if table.format == "auto" and _looks_like_records(document, content):
                logger.warning(
                    '%s looks like JSON Lines and is read as one text; format = "jsonl" in its source reads the records',
                    document,
                )
                return
            if is_plain and _warns(tokenizer, document, content):
                return
        if num_bad >= most_bad and not num_good:
            break
    # A document that is empty is neither good nor bad. Later records may be bad: this is about the beginning.
    if first_error is not None and not num_good:
        raise DataError(f"source {table.path!r}: {first_error}")


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


def _looks_like_records(document: Document, content: Content) -> bool:
    """Say whether a text begins with two lines that are objects of JSON."""
    if document.record is not None or not isinstance(content, str) or not content.startswith("{"):
        return False
    try:
        return all(isinstance(json.loads(line), dict) for line in content.split("\n", 2)[:2] if line)
    except (ValueError, RecursionError):
        return False


def _warns(tokenizer: Tokenizer, document: Document, content: Content) -> bool:
    """Warn if a text holds the name of a special token, and say whether it does."""
    found = tokenizer.special_pattern.search(content) if isinstance(content, str) else None
    if found is None:
        return False
    logger.warning(
        "%s holds %s, the name of a special token. It is read as plain text, so that no text can fake a turn; if a chat "
        "template wrote this text, special_tokens = true in its source reads such names as tokens",
        *(document, found[0]),
    )
    return True
