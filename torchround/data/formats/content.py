"""Turns the fields of one record into its content: text, token ids, or a conversation in one of three shapes.

The shapes are messages with `role` and `content`, ShareGPT's with `from` and `value`, and Alpaca's instruction and
output. Each fault of a record is a `DataError` that says where the record is.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from torchround.config import SourceTable
from torchround.data.document_types import Content, Conversation, Document, Record, TextSpan, TokenIds
from torchround.data.errors import DataError
from torchround.data.text.messages import REASONING

Render = Callable[[Conversation], tuple[TextSpan, ...]]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
DEFAULT_FIELDS = {"text": ("text",), "messages": ("messages", "conversations"), "tokens": ("tokens",)}
ALPACA_FIELDS = ("instruction", "input", "output", "system", "history")


@dataclass(frozen=True)
class RecordReader:
    """Reader of the records of one source. `render` writes conversations; token ids must be below `vocab_size`."""

    table: SourceTable
    render: Render | None = None
    vocab_size: int | None = None

    def fields(self) -> tuple[str, ...] | None:
        """Return the fields that are read, or None for all, as conversations have various fields."""
        if self.table.content == "alpaca":
            return ALPACA_FIELDS
        if self.table.content == "messages":
            return None
        return (self.table.field,) if self.table.field else DEFAULT_FIELDS[self.table.content]

    def read(self, document: Document, record: Record) -> Content:
        """Return the content of a document's record; a blank line gives an empty text. Raises `DataError`."""
        if isinstance(record, DataError):
            raise record
        if isinstance(record, bytes) and not record.strip():
            return ""  # a blank line: the reader passes over empty texts
        try:
            return self._content(_parsed(record) if isinstance(record, bytes) else record)
        except DataError as error:
            raise DataError(f"{document}: {error}") from error

    def _content(self, record: Any) -> Content:
        if not isinstance(record, dict):
            raise DataError(f"a JSON {type(record).__name__}, not an object with fields")
        if self.table.content == "alpaca":
            return self._rendered(_from_alpaca(record))
        value = self._value(record)
        if self.table.content == "messages":
            return self._rendered(_from_messages(value, record))
        if self.table.content == "tokens":
            return _ids(value, self.vocab_size)
        if not isinstance(value, str):
            raise DataError(f"the text is a {type(value).__name__}, not a string")
        return value

    def _value(self, record: dict[str, Any]) -> Any:
        names = (self.table.field,) if self.table.field else DEFAULT_FIELDS[self.table.content]
        for name in names:
            if name in record:
                return record[name]
        wanted = " or ".join(repr(name) for name in names)
        fields = ", ".join(sorted(map(str, record))) or "none"
        # Often the content kind is wrong rather than the field: say so if a field of another kind is there.
        meant = next((kind for kind, known in DEFAULT_FIELDS.items() if record.keys() & set(known)), None)
        hint = " (the source's key field names the one to read)"
        if meant not in (None, self.table.content):
            hint = f' (is it a source of content = "{meant}"?)'
        raise DataError(f"no field {wanted}; fields: {fields}{hint}")

    def _rendered(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        assert self.render is not None, f"source {self.table.path} holds conversations and has no template"
        return self.render(conversation)


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
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


def _from_messages(value: Any, record: dict[str, Any]) -> Conversation:
    if not isinstance(value, list) or not value:
        raise DataError("the messages are not a list with at least one message")
    messages = [_message(message, index) for index, message in enumerate(value)]
    # ShareGPT and others keep the system prompt beside the messages.
    system = _optional_text(record, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    settings = record.get("chat_template_kwargs") or {}
    if not isinstance(settings, dict):
        raise DataError(f"field 'chat_template_kwargs' is a {type(settings).__name__}, not an object")
    return replace(_conversation(messages, record.get("tools")), settings=settings)


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
    content = fields.setdefault("content", None)
    # Calls and thoughts may come without any answer.
    if content is None and any(fields.get(name) for name in ("tool_calls", *REASONING)):
        fields["content"] = ""
    elif not isinstance(content, str):
        raise DataError(
            f"message {index} ({fields['role']}): the content is a {type(content).__name__}, not a string"
        )
    return fields


def _from_alpaca(record: dict[str, Any]) -> Conversation:
    for name in ("instruction", "output"):
        if not isinstance(record.get(name), str):
            raise DataError(f"field {name!r} is a {type(record.get(name)).__name__}, not a string")
    question, further, system = (
        record["instruction"],
        *(_optional_text(record, name) for name in ("input", "system")),
    )
    if further:
        question = f"{question}\n\n{further}"
    messages = [("system", system)] if system else []
    history = record.get("history") or []
    for turn in history if isinstance(history, list) else [history]:
        if not isinstance(turn, list) or len(turn) != 2:
            raise DataError("field 'history' is not a list of pairs of question and answer")
        messages += [("user", turn[0]), ("assistant", turn[1])]
    messages += [("user", question), ("assistant", record["output"])]
    # Through `_message` too, because the texts of `history` are not checked yet.
    as_fields = [
        _message({"role": role, "content": content}, index) for index, (role, content) in enumerate(messages)
    ]
    return _conversation(as_fields, None)


def _optional_text(record: dict[str, Any], name: str) -> str:
    """Return a field that may be missing, null or empty; each of these gives an empty string."""
    value = record.get(name) or ""
    if not isinstance(value, str):
        raise DataError(f"field {name!r} is a {type(value).__name__}, not a string")
    return value


def _conversation(messages: list[dict[str, Any]], tools: Any) -> Conversation:
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"no message of the assistant; roles: {', '.join(m['role'] for m in messages)}")
    # Some data sets hold tools as JSON text, because a column of parquet needs one shape for all of its rows.
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except (ValueError, RecursionError) as error:
            raise DataError(f"field 'tools' is not valid JSON: {error}") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"field 'tools' is a {type(tools).__name__}, not a list")
    return Conversation(tuple(messages), tuple(tools or ()))
