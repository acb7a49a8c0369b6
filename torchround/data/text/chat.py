"""Writes a conversation with a model's own chat template, and finds which parts of the text are learnt.

The unchanged template is rendered in a sandbox. `turns.py` then finds the assistant's turns in the result. Text in a
message that looks like a special token stays text, so no message can fake a turn. Messages that are marked as not to be
learnt (`weight`, `train`) are found by rendering once more with marks in them.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torchround.data.document_types import Conversation, DataError, TextSpan, TokenizerError
from torchround.data.text.tokenizer import Tokenizer, splits_at
from torchround.data.text.turns import TurnSection, TurnTemplate

logger = logging.getLogger(__name__)

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that data sets use for the same thing; the first one with a value counts."""

FIELDS = {"tool calls": ("tool_calls",), "reasoning": REASONING, "tools": ()}
"""The fields of messages that a template may leave out, by their kind."""
CONVERSATIONS_CHECKED = 100  # for each of these kinds

Message = Mapping[str, Any]

GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Characters that Unicode reserves for use inside a program. One that does not occur in a conversation is inserted into
each text that looks like a special token, and removed after the template's own special tokens have been found."""

MOST_JOINED = 64  # letters of an answer that may be in one token with its header


@dataclass(frozen=True)
class Written:
    """A conversation and its text, both with `guard` in all text of messages that looks like a mark of the template.

    `inputs` are the messages, the tools and the settings. `guard` is None if there is no such text. `spare` is another character that does not occur in the conversation.
    """

    inputs: list[Any]
    guard: str | None
    spare: str
    text: str


class ChatTemplate:
    """A tokenizer's chat templates, which render conversations. `loss_on`: `assistant` or `all`.

    Conversations that offer tools are written by the template named `tool_use`, if there is one. Raises
    `TokenizerError` if there is no template, or if its turns cannot be told apart.
    """

    def __init__(self, tokenizer: Tokenizer, loss_on: str = "assistant") -> None:
        sources = tokenizer.templates
        if sources.default is None and sources.with_tools is None:
            has = (
                f'no template named "default" in {sources.file}'
                if sources.file
                else "no chat template beside it"
            )
            raise TokenizerError(
                f"a source holds conversations, but tokenizer {tokenizer.name!r} has {has}; give tokenizer.chat_template "
                "(docs/data.md has a short one)"
            )
        where = f"chat template {sources.file or ''}".rstrip()

        def compiled(source: str | None, name: str) -> TurnTemplate | None:
            return None if source is None else TurnTemplate(source, tokenizer, where + name, sources.settings)

        self._plain = compiled(sources.default, "")
        self._with_tools = compiled(sources.with_tools, " (tool_use)") or self._plain
        self._tokenizer = tokenizer
        self._learns_all = loss_on == "all"
        self._unchecked = dict.fromkeys(FIELDS, CONVERSATIONS_CHECKED)

    def __call__(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        learnt = learnt_messages(conversation.messages, self._learns_all)
        template = self._template_of(conversation)
        written = _write(template, conversation)
        parts = template.parts(written.text)
        sections = list(template.sections(parts))
        num_turns = sum(not section.continues for section in sections)
        if num_turns < (min(len(learnt), 1) if template.has_several_headers else len(learnt)):
            raise DataError(
                f"the chat template wrote {num_turns} turns of the assistant for {len(learnt)} messages from it"
            )
        self._warn_of_fields_left_out(template, written)
        wanted = [True] * len(sections)
        if not all(learnt):
            wanted = _wanted_sections(template, written, learnt, len(sections))
        return tuple(_unguarded(template, self._spans(template, parts, sections, wanted), written.guard))

    def _warn_of_fields_left_out(self, template: TurnTemplate, written: Written) -> None:
        """Warn once for each kind of field that has none of its marks in the text, or for tool calls not all."""
        messages, tools, settings = written.inputs
        for kind in [kind for kind, left in self._unchecked.items() if left]:
            marked = [{**each, **_fields_marked(each, FIELDS[kind], written.spare)} for each in messages]
            if kind == "tools":
                offered = _fields_marked({"tool_calls": tools}, ("tool_calls",), written.spare)
                tools = offered.get("tool_calls")
            num_marks = json.dumps([marked, tools], ensure_ascii=False, default=str).count(written.spare)
            if not num_marks:
                continue
            self._unchecked[kind] -= 1
            try:
                found = template.render(marked, tools, settings=settings).count(written.spare)
            except DataError:
                continue  # a template that fails at a mark has looked at the field
            if found < (num_marks if kind == "tool calls" else 1):
                self._unchecked[kind] = 0
                logger.warning(
                    "the chat template leaves out %s of a conversation, which the model then never sees; another template "
                    "may write it (tokenizer.chat_template)",
                    kind,
                )

    def prompt(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        """Render a conversation up to where the assistant's next turn begins. Raises `DataError`."""
        template = self._template_of(conversation)
        written = _write(template, conversation, asks=True)
        return tuple(_unguarded(template, _marked(template.parts(written.text), False), written.guard))

    def _template_of(self, conversation: Conversation) -> TurnTemplate:
        template = self._with_tools if conversation.tools else self._plain
        if template is None:
            raise DataError(
                "it offers no tools, and the only chat template is for conversations that do (tool_use)"
            )
        return template

    def _spans(
        self,
        template: TurnTemplate,
        parts: Sequence[TextSpan],
        sections: Sequence[TurnSection],
        wanted: Sequence[bool],
    ) -> list[TextSpan]:
        """Mark which parts are learnt: the sections that are `wanted`, without the header that begins a turn."""
        spans, index, last = [], 0, False  # `last`: whether the section before is learnt
        for section, learn in zip(sections, wanted, strict=True):
            spans += _marked(parts[index : section.start], self._learns_all)
            if section.continues and last == learn:
                # The model writes this header itself, and it is tokenised with what follows.
                spans += _marked(parts[section.start : section.stop], learn)
            else:
                header, inner = self._at_tokens(*template.cut_header(parts, section))
                spans += [*_marked(header, learn and self._learns_all), *_marked(inner, learn)]
            index, last = section.stop, learn
        return [*spans, *_marked(parts[index:], self._learns_all)]

    def _at_tokens(
        self, header: list[TextSpan], inner: list[TextSpan]
    ) -> tuple[list[TextSpan], list[TextSpan]]:
        """Move the end of a header to where a token ends, if its last letters and the first of the answer are one token."""
        if not inner or header[-1].special or inner[0].special:
            return header, inner
        begins, text = len(header[-1].text), header[-1].text + inner[0].text
        places = range(begins, min(len(text), begins + MOST_JOINED))
        end = next((place for place in places if splits_at(self._tokenizer, text, place)), begins)
        spans = [replace(header[-1], text=text[:end]), replace(inner[0], text=text[end:])]
        return [*header[:-1], spans[0]], [spans[1], *inner[1:]]


def _marked(parts: Sequence[TextSpan], learn: bool) -> list[TextSpan]:
    return [TextSpan(part.text, learn, part.special) for part in parts]


# Fields of messages that trainers share: reasoning under three names, and which messages are learnt.


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
    for name, value in (("weight", weight), ("train", train)):
        if value not in (None, 0, 1):
            raise DataError(f"{where}: {name} = {value!r}; legal: 0 or false (not learnt), 1 or true")
    for name in ("train_detail", "training_detail"):
        if message.get(name):
            raise DataError(
                f"{where}: {name} is not supported; legal: train = true or false for a whole message"
            )
    if None not in (weight, train) and bool(weight) != bool(train):
        raise DataError(f"{where}: weight = {weight!r} and train = {train!r} contradict each other")
    return weight not in (0, False) and train not in (0, False)


def with_marks(message: Message, mark: str) -> dict[str, Any]:
    """Copy a message with a mark in each of its texts: content, reasoning, and arguments of calls.

    A mark comes before the last visible character, so that neither trimming nor a look at how a text begins changes what
    a template writes.
    """

    def put_in(text: str) -> str:
        begins = text.rstrip()
        return f"{begins[:-1]}{mark}{text[len(begins) - 1 :]}" if begins else text

    def put_in_call(call: Any) -> Any:
        if not isinstance(call, Mapping):
            return call
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": put_in_call(call["function"])}
        arguments = _mapped(call.get("arguments"), put_in, keys=False)
        if "arguments" in call and arguments != call["arguments"]:
            return {**call, "arguments": arguments}
        return {**call, "name": _mapped(call.get("name"), put_in)}  # arguments without any text

    texts = {name: _mapped(message[name], put_in) for name in ("content", *REASONING) if name in message}
    calls = message.get("tool_calls")
    if isinstance(calls, (list, tuple)):
        texts["tool_calls"] = [put_in_call(call) for call in calls]
    return {**message, **texts}


def _fields_marked(message: Message, names: Sequence[str], mark: str) -> dict[str, Any]:
    """Return the message's fields of these names with marks. Of several calls, the last one is marked."""
    fields = {name: message[name] for name in names if message.get(name)}
    calls = fields.get("tool_calls")
    if not isinstance(calls, (list, tuple)):
        return with_marks(fields, mark)
    return {"tool_calls": [*calls[:-1], *with_marks({"tool_calls": calls[-1:]}, mark)["tool_calls"]]}


def _wanted_sections(
    template: TurnTemplate, written: Written, learnt: Sequence[bool], num_sections: int
) -> list[bool]:
    """Say which sections are learnt, if only some of the assistant's messages are. Raises `DataError`.

    `learnt` has an element for each message of the assistant. One message may be written in several sections, so the
    text is written twice more: with a mark in the messages that are learnt, and with one in the others.
    """
    if not any(learnt):
        return [False] * num_sections
    found = [
        _sections_with(template, written, [flag == chosen for flag in learnt]) for chosen in (True, False)
    ]
    if None not in found:
        yes, no = (list(each or ()) for each in found)
        if len(yes) == len(no) == num_sections and all(a != b for a, b in zip(yes, no, strict=True)):
            return yes
    if num_sections == len(learnt):
        return list(learnt)
    raise DataError(
        "the chat template does not write each message of the assistant as a turn of its own, so those with weight 0 "
        "or train = false cannot be told from the others"
    )


def _sections_with(template: TurnTemplate, written: Written, chosen: Sequence[bool]) -> list[bool] | None:
    """Say which sections hold the chosen messages, or None if marks in them change what the template writes."""
    flags = iter(chosen)
    messages, tools, settings = written.inputs
    messages = [
        with_marks(message, written.spare) if message["role"] == "assistant" and next(flags) else message
        for message in messages
    ]
    try:
        marked = template.render(messages, tools, settings=settings)
    except DataError:
        return None
    if marked.replace(written.spare, "") != written.text:
        return None
    parts = template.parts(marked)
    return [
        any(written.spare in part.text for part in parts[section.start : section.stop])
        for section in template.sections(parts)
    ]


# Text that looks like a special token.


def _write(template: TurnTemplate, conversation: Conversation, asks: bool = False) -> Written:
    """Write a conversation; if it `asks`, with the header that asks for an answer. Raises `DataError`.

    A guard is inserted into all text that looks like a token that only the template may write.
    """

    def render(values: list[Any]) -> str:
        return template.render(values[0], values[1], asks, settings=values[2])

    def seen(text: str) -> str:
        strings.append(text)
        return text

    values: list[Any] = [
        with_reasoning(conversation.messages),
        list(conversation.tools) or None,
        conversation.settings,
    ]
    strings: list[str] = []
    _mapped(values, seen)
    free = list(islice((guard for guard in GUARDS if not any(guard in string for string in strings)), 2))
    if len(free) < 2:
        raise DataError("it contains all characters that Unicode reserves for use inside a program")
    guard, spare = free
    # The guards would hide such text from a template's own checks, so the template also sees it as it is.
    plain = render(values)
    if not any(template.marks.search(string) for string in strings):
        return Written(values, None, spare, plain)
    guarded = _mapped(
        values, lambda text: template.marks.sub(lambda match: match[0][:1] + guard + match[0][1:], text)
    )
    text = render(guarded)
    if text.replace(guard, "") != plain:
        raise DataError(
            "a message holds text that looks like a special token, and the chat template does not write it unchanged; "
            "take such text out of the message, and give reasoning in its own field (reasoning_content)"
        )
    return Written(guarded, guard, spare, text)


def _unguarded(template: TurnTemplate, spans: Sequence[TextSpan], guard: str | None) -> Iterator[TextSpan]:
    for span in spans:
        parts = span.text.split(guard) if guard else [span.text]
        if template.unsafe_marks and any(mark in "".join(parts) for mark in template.unsafe_marks):
            # An added token that is not special is recognised in any text: only apart do its letters stay text.
            yield from (replace(span, text=part) for part in parts if part)
        else:
            yield replace(span, text="".join(parts))


def _mapped(value: Any, change: Callable[[str], str], keys: bool = True) -> Any:
    """Copy nested messages with each string changed, and with `keys` those of tables too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if keys and isinstance(key, str) else key: _mapped(item, change, keys)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change, keys) for item in value]
    return value
