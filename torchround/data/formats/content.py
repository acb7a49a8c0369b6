"""Turns the fields of one record into its content: text, token ids, a conversation, or a prompt with its completion.

The shapes of conversations are messages with `role` and `content`, ShareGPT's with `from` and `value`, and Alpaca's
instruction and output. Each fault of a record is a `DataError` that says where the record is.
"""

import json
import re
from collections.abc import Callable
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
from torchround.data.formats.files import BYTE_ORDER_MARK, SplitsAt
from torchround.data.text.chat import REASONING

Spans = tuple[TextSpan, ...]
Render = Callable[[Conversation], Spans]
RenderPair = Callable[[str, str], Spans]

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "observation": "tool"}
DEFAULT_FIELDS = {"text": ("text",), "messages": ("messages", "conversations"), "tokens": ("tokens",)}
ALPACA_FIELDS = ("instruction", "input", "output", "system", "history")
PAIR_FIELDS = {"prompt": ("question",), "completion": ("response", "answer")}
"""The fields of a pair, each with other names that are read if it is missing."""

LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")


@dataclass(frozen=True)
class RecordReader:
    """Reader of the records of one source. Token ids must be below `vocab_size`. `learns_all`: prompts are learnt too.

    `render` writes conversations, and `render_pair` a prompt and its completion that are plain text. `splits_at` says whether
    cutting a text at a place leaves its tokens as they are; without it, the usual places are taken.
    """

    table: SourceTable
    render: Render | None = None
    vocab_size: int | None = None
    render_pair: RenderPair | None = None
    learns_all: bool = False
    splits_at: SplitsAt | None = None

    def columns(self, names: list[str]) -> list[str]:
        """Return those of a table's columns that have to be read: all of them, if a field is missing or fields vary."""
        if self.table.content in ("messages", "prompt_completion"):
            return names
        if self.table.content == "alpaca":
            # If one is missing, the error lists the fields that there are.
            is_whole = {"instruction", "output"} <= set(names)
            return [name for name in names if name in ALPACA_FIELDS] if is_whole else names
        wanted = (self.table.field,) if self.table.field else DEFAULT_FIELDS[self.table.content]
        return [name for name in names if name in wanted] or names

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
        if self.table.content == "prompt_completion":
            return self._pair(record)
        value = self._value(record)
        if self.table.content == "messages":
            return self._rendered(_from_messages(_unpacked(value), record))
        if self.table.content == "tokens":
            return _ids(value, self.vocab_size)
        if not isinstance(value, str):
            raise DataError(f"the text is {_kind(value)}, not a string")
        return value

    def _pair(self, record: dict[str, Any]) -> Spans:
        """Return a prompt and its completion, of which only the completion is learnt."""
        prompt, completion = (_unpacked(_pair_field(record, name)) for name in PAIR_FIELDS)
        if isinstance(prompt, str) and isinstance(completion, str):
            assert self.render_pair is not None, f"source {self.table.path} has no tokenizer for its pairs"
            if not completion:
                raise DataError("field 'completion' is an empty string")
            return self.render_pair(prompt, completion)
        return self._rendered(_from_pair(prompt, completion, record, self.learns_all))

    def _value(self, record: dict[str, Any]) -> Any:
        names = (self.table.field,) if self.table.field else DEFAULT_FIELDS[self.table.content]
        for name in names:
            if name in record:
                return record[name]
        raise DataError(_no_field(record, names) + " (source keys: field, content)")

    def _rendered(self, conversation: Conversation) -> Spans:
        assert self.render is not None, f"source {self.table.path} holds conversations and has no template"
        return self.render(conversation)


def _no_field(record: dict[str, Any], names: tuple[str, ...]) -> str:
    wanted = " or ".join(repr(name) for name in names)
    known = sorted(map(str, record))
    return f"no field {wanted}; fields: {', '.join(known) or 'none'}{nearest(names[0], known)}"


def _pair_field(record: dict[str, Any], name: str) -> Any:
    """Return the prompt or the completion of a record. Raises `DataError` if two fields could be meant."""
    found = [name] if name in record else [other for other in PAIR_FIELDS[name] if other in record]
    if not found:
        raise DataError(_no_field(record, (name, *PAIR_FIELDS[name])))
    if len(found) > 1:
        raise DataError(
            f"fields {' and '.join(map(repr, found))} may both be the {name}; rename the one to read to {name!r}"
        )
    return record[found[0]]


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def _unpacked(value: Any) -> Any:
    """Return messages that a column of text holds as JSON, as CSV does. Other text stays text, lists of calls too."""
    if isinstance(value, str) and LIST_OF_OBJECTS.match(value):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return value
        # A prompt or an answer may itself be JSON: only messages have these fields.
        if isinstance(found, list) and all(
            isinstance(item, dict) and {"role", "from"} & item.keys() for item in found
        ):
            return found
    return value


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


def _from_messages(value: Any, record: dict[str, Any]) -> Conversation:
    if not isinstance(value, list) or not value:
        given = "text that is no such list in JSON" if isinstance(value, str) else _kind(value)
        given = "an empty one" if value == [] else given
        raise DataError(f"the messages are not a list with at least one message, but {given}")
    messages = [_message(message, index) for index, message in enumerate(value)]
    # ShareGPT and others keep the system prompt beside the messages.
    system = _optional_text(record, "system")
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, record)


def _from_pair(prompt: Any, completion: Any, record: dict[str, Any], learns_all: bool) -> Conversation:
    """Return the conversation of a prompt and its completion. A plain text is a message of the user or the assistant."""
    turns = []
    for name, value, role in (("prompt", prompt, "user"), ("completion", completion, "assistant")):
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        if not isinstance(value, list) or not value:
            given = "an empty list" if value == [] else _kind(value)
            raise DataError(f"field {name!r} is {given}, not a string or a list of messages")
        turns.append([_message(message, index) for index, message in enumerate(value)])
    if not any(message["role"] == "assistant" for message in turns[1]):
        raise DataError("field 'completion' has no message of the assistant")
    for message in turns[0]:
        if message["role"] == "assistant" and not learns_all:
            message["train"] = False  # answers in the prompt are examples for the model to read
            message.pop("weight", None)
    return _conversation([*turns[0], *turns[1]], record)


def _joined_parts(parts: list[Any], where: str) -> str:
    """Return the text of a message whose content is a list of parts, `{type: "text", text: ...}`."""
    texts = []
    for number, part in enumerate(parts):
        kind, text = (part.get("type"), part.get("text")) if isinstance(part, dict) else ("text", part)
        if kind != "text" or not isinstance(text, str):
            given = f"of type {kind!r}" if kind != "text" else f"{_kind(text)} and no string"
            raise DataError(f"{where}: part {number} of the content is {given}; legal: parts of type 'text'")
        texts.append(text)
    return "".join(texts)


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
    if isinstance(content, list):
        content = fields["content"] = _joined_parts(content, f"message {index} ({fields['role']})")
    # Calls and thoughts may come without any answer.
    if content is None and any(fields.get(name) for name in ("tool_calls", *REASONING)):
        fields["content"] = ""
    elif not message.keys() & {"content", "value"}:
        given = ", ".join(map(str, message))
        raise DataError(f"message {index} ({fields['role']}) has no content; fields: {given}")
    elif not isinstance(content, str):
        raise DataError(f"message {index} ({fields['role']}): the content is {_kind(content)}, not a string")
    return fields


def _from_alpaca(record: dict[str, Any]) -> Conversation:
    for name in ("instruction", "output"):
        if name not in record:
            raise DataError(_no_field(record, (name,)))
        if not isinstance(record[name], str):
            raise DataError(f"field {name!r} is {_kind(record[name])}, not a string")
    question = record["instruction"]
    further, system = (_optional_text(record, name) for name in ("input", "system"))
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
    return _conversation(as_fields, {})


def _optional_text(record: dict[str, Any], name: str) -> str:
    """Return a field that may be missing, null or empty; each of these gives an empty string."""
    value = record.get(name) or ""
    if not isinstance(value, str):
        raise DataError(f"field {name!r} is a {type(value).__name__}, not a string")
    return value


def _conversation(messages: list[dict[str, Any]], record: dict[str, Any]) -> Conversation:
    """Return the conversation of these messages, with the tools and the template's variables of the record."""
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"no message of the assistant; roles: {', '.join(m['role'] for m in messages)}")
    tools, settings = _from_json(record, "tools"), _from_json(record, "chat_template_kwargs")
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"field 'tools' is a {type(tools).__name__}, not a list")
    if settings is not None and not isinstance(settings, dict):
        raise DataError(f"field 'chat_template_kwargs' is a {type(settings).__name__}, not an object")
    # A column of parquet gives each row all names, with null for the ones that a record does not have.
    given = {name: value for name, value in (settings or {}).items() if value is not None}
    return Conversation(tuple(messages), tuple(tools or ()), given)


def _from_json(record: dict[str, Any], name: str) -> Any:
    """Return a field that some data sets hold as JSON text, because a column of parquet needs one shape for all rows."""
    value = record.get(name)
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise DataError(f"field {name!r} is not valid JSON: {error}") from error
