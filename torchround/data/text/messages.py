"""Reads the fields of chat messages that trainers share: reasoning under three names, and which messages are learnt."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torchround.data.document_types import Conversation
from torchround.data.errors import DataError

logger = logging.getLogger(__name__)

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that data sets use for the same thing; the first one with a value counts."""

CONVERSATIONS_CHECKED = 100
Message = Mapping[str, Any]
Render = Callable[[list[Any], list[Any] | None], str]


def with_reasoning(messages: Sequence[Message]) -> list[Any]:
    """Copy the messages with reasoning under the names that templates read, as transformers does.

    Most templates read `reasoning_content`; GPT-OSS's reads `thinking`.
    """
    copies = []
    for message in messages:
        # Tables give each row all of their columns: a name may be there without a value.
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        if reasoning is not None:
            thinking = message.get("thinking") or reasoning
            message = {**message, "thinking": thinking, "reasoning_content": reasoning}
        copies.append(message)
    return copies


# Which messages are learnt.


def learnt_messages(messages: Sequence[Message], learns_all: bool) -> list[bool]:
    """Say for each message of the assistant whether it is learnt.

    `"weight": 0` (OpenAI's convention) and `"train": false` (axolotl's) take a message out. Raises `DataError` for any
    other weight, and for messages of other roles without weight if `learns_all`: only the assistant's can be told apart.
    """
    learnt = []
    for index, message in enumerate(messages):
        is_learnt = _is_learnt(message, f"message {index} ({message['role']})")
        if message["role"] == "assistant":
            learnt.append(is_learnt)
        elif learns_all and not is_learnt:
            raise DataError(
                f'message {index} ({message["role"]}) has weight 0 or train = false, and data.loss_on = "all" learns '
                'every role; legal with it: messages of the assistant alone, or data.loss_on = "assistant"'
            )
    return learnt


def _is_learnt(message: Message, where: str) -> bool:
    weight, train = message.get("weight"), message.get("train")
    # JSON's true and false are 1 and 0 here, which some data sets write.
    if weight not in (None, 0, 1):
        raise DataError(f"{where}: weight = {weight!r}; legal: 0 (not learnt) or 1")
    if train not in (None, 0, 1):
        raise DataError(f"{where}: train = {train!r}; legal: true, or false (not learnt)")
    for name in ("train_detail", "training_detail"):
        if message.get(name):
            raise DataError(
                f"{where}: {name} is not supported; legal: train = true or false for a whole message"
            )
    if weight is not None and train is not None and bool(weight) != bool(train):
        raise DataError(f"{where}: weight = {weight!r} and train = {train!r} contradict each other")
    return bool(weight if weight is not None else train if train is not None else True)


def with_marks(message: Message, mark: str) -> dict[str, Any]:
    """Copy a message with a mark in each of its texts: content, reasoning, and arguments of calls.

    A mark comes before the last visible character, so that neither trimming nor a look at how a text begins changes what
    a template writes.
    """
    marked = dict(message)
    for name in ("content", *REASONING):
        if name in marked:
            marked[name] = _texts_marked(marked[name], mark)
    if isinstance(calls := message.get("tool_calls"), (list, tuple)):
        marked["tool_calls"] = [_call_marked(call, mark) for call in calls]
    return marked


def _texts_marked(value: Any, mark: str, inside: bool = False) -> Any:
    if isinstance(value, str):
        text = value.rstrip()
        return f"{text[:-1]}{mark}{value[len(text) - 1 :]}" if text else value
    if isinstance(value, (list, tuple)):
        return [_texts_marked(item, mark, inside) for item in value]
    if isinstance(
        value, Mapping
    ):  # a part of the content, of which only the text is text, or the arguments of a call
        return {
            key: _texts_marked(item, mark, inside) if inside or key == "text" else item
            for key, item in value.items()
        }
    return value


def _call_marked(call: Any, mark: str) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": _call_marked(call["function"], mark)}
    marked = dict(call)
    if "arguments" in call:
        marked["arguments"] = _texts_marked(call["arguments"], mark, inside=True)
    if marked.get("arguments") == call.get("arguments") and isinstance(call.get("name"), str):
        marked["name"] = _texts_marked(call["name"], mark)  # arguments without any text
    return marked


# Fields that a template drops.


class DroppedFields:
    """Looks for tool calls, tools and reasoning that a template does not write, and warns once about each.

    Each of the first conversations that have such a field is written again without it. If the text is the same, the
    template has dropped it.
    """

    def __init__(self) -> None:
        self._left = {kind: CONVERSATIONS_CHECKED for kind in ("tool calls", "tools", "reasoning")}

    def look_for(self, conversation: Conversation, render: Render) -> None:
        """Check a conversation. `render` writes messages and tools."""
        messages, tools = with_reasoning(conversation.messages), list(conversation.tools) or None
        written: str | None = None
        for kind, fewer_messages, fewer_tools in self._variants(messages, tools):
            if not self._left[kind]:
                continue
            try:
                written = render(messages, tools) if written is None else written
                is_dropped = render(fewer_messages, fewer_tools) == written
            except DataError:
                is_dropped = False  # a template that fails without the field has looked at it
            if is_dropped:
                self._left[kind] = 0
                logger.warning(
                    "the chat template leaves out %s of a conversation, which the model then never sees; another template "
                    "may write it (tokenizer.chat_template); this is said once",
                    kind,
                )
        for kind in self._left:
            self._left[kind] -= bool(self._left[kind] and self._has(kind, messages, tools))

    @staticmethod
    def _has(kind: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> bool:
        if kind == "tools":
            return bool(tools)
        names = REASONING if kind == "reasoning" else ("tool_calls",)
        return any(message.get(name) for message in messages for name in names)

    def _variants(
        self, messages: list[Any], tools: list[Any] | None
    ) -> Iterator[tuple[str, list[Any], list[Any] | None]]:
        if self._left["reasoning"] and self._has("reasoning", messages, tools):
            # All at once: templates write only the reasoning after the last question.
            yield "reasoning", [_without(message, *REASONING) for message in messages], tools
        if self._left["tools"] and tools:
            yield "tools", messages, None
        if not self._left["tool calls"]:
            return
        for index, message in enumerate(messages):
            calls = message.get("tool_calls")
            for number in range(len(calls) if isinstance(calls, (list, tuple)) else 0):
                fewer = [*calls[:number], *calls[number + 1 :]]
                changed = message | {"tool_calls": fewer} if fewer else _without(message, "tool_calls")
                yield "tool calls", [*messages[:index], changed, *messages[index + 1 :]], tools


def _without(message: Message, *names: str) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in names}
