"""Turns the fields of one record into its content: text, token ids, a conversation, or a prompt with its completion.

The shapes of conversations are messages with `role` and `content`, ShareGPT's with `from` and `value`, and Alpaca's
instruction and output. Each fault of a record is a `DataError` that says where the record is.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from torchround.config import SourceTable, nearest
from torchround.data.document_types import (
    Content,
    Conversation,
    DataError,
    Document,
    Record,
    TextSpan,
    TokenIds,
)
from torchround.data.formats.files import BYTE_ORDER_MARK
from torchround.data.text.chat import REASONING
from torchround.data.text.tokenizer import Tokenizer, pair_spans, splits_at

Render = Callable[[Conversation], tuple[TextSpan, ...]]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
# The fields that are read; of several names, the first one that is there.
DEFAULT_FIELDS = {"text": ("text",), "messages": ("messages", "conversations"), "tokens": ("tokens",)}
PROMPT, COMPLETION = ("prompt", "question"), ("completion", "response", "answer")
ALPACA_FIELDS = ("instruction", "input", "output", "system")


@dataclass(frozen=True)
class RecordReader:
    """Reader of the records of one source. Token ids must be below `vocab_size`. `learns_all`: prompts are learnt too.

    `render` writes conversations. A source of text alone can be read without a tokenizer.
    """

    table: SourceTable
    tokenizer: Tokenizer | None = None
    render: Render | None = None
    vocab_size: int | None = None
    learns_all: bool = False

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.table.field,) if self.table.field else DEFAULT_FIELDS[self.table.content]

    def columns(self, names: list[str]) -> list[str]:
        """Return those of a table's columns that have to be read: all of them, if a field is missing or fields vary."""
        if self.table.content in ("messages", "prompt_completion"):
            return names
        if self.table.content == "alpaca":
            # If one is missing, the error lists the fields that there are.
            is_whole = {"instruction", "output"} <= set(names)
            return [name for name in names if name in ALPACA_FIELDS] if is_whole else names
        return [name for name in names if name in self.fields] or names

    def splits_at(self, text: str, place: int) -> bool:
        """Say whether cutting a text at a place leaves its tokens as they are."""
        return self.tokenizer is None or splits_at(self.tokenizer, text, place, self.table.special_tokens)

    def read(self, document: Document, record: Record) -> Content:
        """Return the content of a document's record; a blank line gives an empty text. Raises `DataError`."""
        if isinstance(record, bytes) and not record.strip():
            return ""  # the reader passes over empty texts
        try:
            return self._content(_parsed(record) if isinstance(record, bytes) else record)
        except DataError as error:
            raise DataError(f"{document}: {error}") from error

    def _content(self, record: Any) -> Content:
        if not isinstance(record, dict):
            raise DataError(f"a JSON {type(record).__name__}, not an object with fields")
        if self.table.content == "alpaca":
            return self._rendered(_from_alpaca(record))
        if self.table.content == "prompt_completion":
            return self._pair(record)
        value = _field(record, self.fields)
        if self.table.content == "messages":
            return self._rendered(_from_messages(value, record))
        if self.table.content == "tokens":
            return _ids(value, self.vocab_size)
        if not isinstance(value, str):
            raise DataError(f"the text is {_kind(value)}, not a string")
        return value

    def _pair(self, record: dict[str, Any]) -> tuple[TextSpan, ...]:
        """Return a prompt and its completion, of which only the completion is learnt."""
        prompt, completion = _field(record, PROMPT), _field(record, COMPLETION)
        if isinstance(prompt, str) and isinstance(completion, str):
            assert self.tokenizer is not None, f"source {self.table.path} has no tokenizer for its pairs"
            if not completion:
                raise DataError("the completion is an empty string")
            return pair_spans(self.tokenizer, prompt, completion, self.learns_all, self.table.special_tokens)
        asked = _messages(_as_messages(prompt, "user"), "the prompt")
        answered = _messages(_as_messages(completion, "assistant"), "the completion")
        if not any(message["role"] == "assistant" for message in answered):
            raise DataError("the completion has no message of the assistant")
        for message in asked:
            if message["role"] == "assistant" and not self.learns_all:
                message["train"] = False  # answers in the prompt are examples for the model to read
        return self._rendered(_conversation([*asked, *answered], record))

    def _rendered(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        assert self.render is not None, f"source {self.table.path} holds conversations and has no template"
        return self.render(conversation)


def _field(record: dict[str, Any], names: tuple[str, ...]) -> Any:
    for name in names:
        if name in record:
            return record[name]
    wanted, known = " or ".join(map(repr, names)), sorted(map(str, record))
    fields = f"{', '.join(known) or 'none'}{nearest(names[0], known)}"
    raise DataError(f"no field {wanted}; fields: {fields} (source keys: field, content)")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def fields_of(document: Document) -> list[str]:
    """List the fields of a document's record, none for a text or a blank line. Raises `DataError`."""
    record = document.record() if callable(document.record) else document.record
    if isinstance(record, bytes):
        try:
            record = _parsed(record) if record.strip() else None
        except DataError as error:
            raise DataError(f"{document}: {error}") from error
    return list(record) if isinstance(record, dict) else []


def likely_content(names: Collection[str]) -> str | None:
    """Find the content that records with these fields hold, None if they are of no known shape."""

    def has(some: Sequence[str]) -> bool:
        return any(name in names for name in some)

    pairs, alpaca = has(PROMPT) and has(COMPLETION), {"instruction", "output"} <= set(names)
    found = {"messages": has(DEFAULT_FIELDS["messages"]), "alpaca": alpaca, "prompt_completion": pairs}
    found |= {kind: has(DEFAULT_FIELDS[kind]) for kind in ("text", "tokens")}
    return next((kind for kind, fits in found.items() if fits), None)


def _parsed(line: bytes) -> Any:
    try:
        # Editors on Windows begin a file with a mark that JSON does not have.
        return json.loads(line.removeprefix(BYTE_ORDER_MARK).decode())
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise DataError(f"not valid UTF-8 (byte 0x{bad:02x}: {error.reason})") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}") from error


def _ids(value: Any, vocab_size: int | None) -> TokenIds:
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        raise DataError("the tokens are not a list of integers")
    if value and (min(value) < 0 or (vocab_size is not None and max(value) >= vocab_size)):
        raise DataError(
            f"token ids from {min(value)} to {max(value)}; the vocabulary has 0 to {(vocab_size or 0) - 1}"
        )
    return np.array(value, dtype=np.int64)


# Conversations.


def _from_messages(value: Any, record: dict[str, Any]) -> Conversation:
    messages = _messages(value, "the conversation")
    # ShareGPT and others keep the system prompt beside the messages.
    system = _optional_text(record, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, record)


def _from_alpaca(record: dict[str, Any]) -> Conversation:
    question, answer = _field(record, ("instruction",)), _field(record, ("output",))
    further, system = (_optional_text(record, name) for name in ("input", "system"))
    if further and isinstance(question, str):
        question = f"{question}\n\n{further}"
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _conversation(_messages(messages, "the record"), {})


def _as_messages(value: Any, role: str) -> Any:
    return [{"role": role, "content": value}] if isinstance(value, str) else value


def _messages(value: Any, what: str) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else _kind(value)
        raise DataError(f"{what} is {given}, not a list of messages")
    return [_message(message, index) for index, message in enumerate(value)]


def _message(message: Any, index: int) -> dict[str, Any]:
    """Return a message with `role` and `content`, from either shape, without the fields that are null."""
    if not isinstance(message, dict):
        raise DataError(f"message {index} is a {type(message).__name__}, not an object")
    fields = {key: value for key, value in message.items() if value is not None}
    if "role" not in fields and "from" in fields:
        role = fields.pop("from")
        fields["role"] = SHAREGPT_ROLES.get(role, role) if isinstance(role, str) else role
        fields["content"] = fields.pop("value", None)
    if not isinstance(fields.get("role"), str):
        raise DataError(f"message {index} has no role; fields: {', '.join(map(str, message)) or 'none'}")
    content = fields.get("content")
    # Calls and thoughts may come without any answer.
    if content is None and any(fields.get(name) for name in ("tool_calls", *REASONING)):
        content = ""
    if isinstance(content, list):
        parts: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in content]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else content
    if not isinstance(content, str):
        legal = "a string, or a list of parts of type 'text'"
        raise DataError(
            f"message {index} ({fields['role']}): the content is {_kind(content)}; legal: {legal}"
        )
    return {**fields, "content": content}


def _optional_text(record: dict[str, Any], name: str) -> str:
    """Return a field that may be missing, null or empty; each of these gives an empty string."""
    value = record.get(name) or ""
    if not isinstance(value, str):
        raise DataError(f"field {name!r} is a {type(value).__name__}, not a string")
    return value


def _conversation(messages: list[dict[str, Any]], record: dict[str, Any]) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"no message of the assistant; roles: {', '.join(m['role'] for m in messages)}")
    tools = record.get("tools") or None
    if isinstance(tools, str):
        # JSON as text: a column of parquet needs one shape for all rows.
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError) as error:
            raise DataError(f"field 'tools' is not valid JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"field 'tools' is a {type(tools).__name__}, not a list")
    return Conversation(tuple(messages), tuple(tools or ()))
