"""The text that `try_model` is asked about: prompts as token ids, and files to score as micro-batches."""

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torchround.config import ConfigError, SourceTable
from torchround.data import DataError, Tokenizer
from torchround.data.document_types import Conversation, TextSpan
from torchround.data.scored_windows import ScoredWindow, scored_batch, scored_windows
from torchround.data.text.chat import ChatTemplate
from torchround.data.text.tokenizer import encode_spans
from torchround.generation.continuations import GROUPS
from torchround.layer import MicroBatch
from torchround.run.samples import Prompt
from torchround.untrusted.terminal import Progress

# Batches in one pass. Each pass uploads all weights once.
PASS_BATCHES = 4


class ScoredText:
    """The micro-batches of a source's text, counted as they are read. Each `iter()` reads the text anew."""

    def __init__(
        self, source: SourceTable, tokenizer: Tokenizer, seq_len: int, batch_size: int, vocab_size: int
    ) -> None:
        self._source = source
        self._tokenizer = tokenizer
        self.seq_len = seq_len
        self._batch_size = batch_size
        self._vocab_size = vocab_size
        self.num_documents = 0

    def __iter__(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each pass. Raises `DataError` if nothing can be scored."""
        windows = scored_windows([self._source], self._tokenizer, self.seq_len, self._vocab_size)
        progress = Progress(f"scoring {self._source.path}", text="{:,} tokens".format)
        self.num_documents = num_labels = 0
        while some := list(islice(windows, PASS_BATCHES * self._batch_size)):
            self.num_documents += sum(window.ends for window in some)
            if batches := self._batches([window for window in some if len(window.tokens)]):
                yield batches
            num_labels += sum(batch.num_labels() for batch in batches)
            progress.advance(sum(batch.num_labels() for batch in batches))
        if not num_labels:
            raise DataError(
                f"{self._source.path}: no token can be scored: a document's first token has nothing before it, and "
                "prompts are not scored; legal: documents of two tokens or more"
            )

    def _batches(self, windows: list[ScoredWindow]) -> list[MicroBatch]:
        """Cut windows into micro-batches. Windows of like lengths are together, which needs little padding."""
        longest_first = sorted(windows, key=lambda window: -len(window.tokens))
        size = -(-self._batch_size // GROUPS)  # as many as a group of prompts, which the engine was made for
        starts = range(0, len(longest_first), size)
        return [scored_batch(longest_first[start : start + size], self._tokenizer.pad_id) for start in starts]


def prompts_of(
    texts: Sequence[str], file: Path | None, tokenizer: Tokenizer, with_chat: bool, key: str = "--prompt"
) -> list[Prompt]:
    """Return the prompts of `key`, then those in a file. With `with_chat` the chat template writes them.

    Raises `ConfigError` for an empty prompt or a file that cannot be used, `DataError` for a template that fails.
    """
    asked: list[tuple[str, Any]] = [(key, text) for text in texts]
    if file is not None:
        asked += _read_prompts(file)
    template = ChatTemplate(tokenizer) if with_chat and asked else None
    return [_prompt(where, content, tokenizer, template) for where, content in asked]


def _read_prompts(path: Path) -> list[tuple[str, Any]]:
    """Read where each prompt of a file is, and the prompt: a text, or a list of messages. Raises `ConfigError`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError([f"--prompts: {path} cannot be read: {error}"]) from error
    found = [(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not found:
        raise ConfigError([f"--prompts: {path} holds no prompt; legal: one in each line"])
    return found if path.suffix != ".jsonl" else [(where, _record(where, line)) for where, line in found]


def _record(where: str, line: str) -> Any:
    """Return the prompt of a line of JSON: a string, or the field `prompt` or `messages` of an object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError([f"{where}: not JSON: {error}"]) from error
    content = record.get("prompt", record.get("messages")) if isinstance(record, dict) else record
    if not isinstance(content, str | list):
        raise ConfigError([f"{where}: no prompt; legal: a string, or an object with prompt or messages"])
    return content


def _prompt(where: str, content: Any, tokenizer: Tokenizer, template: ChatTemplate | None) -> Prompt:
    if isinstance(content, str) and not content:
        raise ConfigError([f"{where}: an empty prompt; legal: some text"])
    if template is None:
        if not isinstance(content, str):
            raise ConfigError([f"{where}: a list of messages; --chat writes it with the chat template"])
        return Prompt(content, tokenizer.prompt_ids(content))
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if not all(isinstance(message, dict) and isinstance(message.get("role"), str) for message in messages):
        raise ConfigError([f"{where}: legal messages: objects with role and content"])
    try:
        spans: tuple[TextSpan, ...] = template.prompt(Conversation(tuple(messages)))
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    ids = [int(token) for part in encode_spans(tokenizer, spans) for token in part]
    return Prompt(str(messages[-1].get("content")), ids)
