"""Writes a conversation with a model's own chat template, and finds which parts of the text are learnt.

`turns.py` renders the unchanged template and finds the assistant's turns in the result. Text in a message that looks
like a special token stays text, so no message can fake a turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from torchround.config import ConfigError
from torchround.data.document_types import Conversation, DataError, TextSpan, TokenizerError
from torchround.data.text.tokenizer import Tokenizer, encode_spans, splits_at
from torchround.data.text.turns import TurnSection, TurnTemplate

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names that data sets use for the same thing; the first one with a value counts."""

Message = Mapping[str, Any]

GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Characters that Unicode reserves for use inside a program. One that does not occur in a conversation is inserted into
each text that looks like a special token, and removed after the template's own special tokens have been found."""

MOST_JOINED = 64  # letters of an answer that may be in one token with its header


class ChatTemplate:
    """A tokenizer's chat template, which renders conversations. `loss_on`: `assistant` or `all`.

    Raises `TokenizerError` if there is no template, or if its turns cannot be told apart.
    """

    def __init__(self, tokenizer: Tokenizer, loss_on: str = "assistant") -> None:
        source = tokenizer.template
        if source.text is None:
            raise TokenizerError(
                f"tokenizer {tokenizer.name!r} has no chat template beside it, which conversations need; give "
                "tokenizer.chat_template (docs/data.md has a short one)"
            )
        where = f"chat template {source.file or ''}".rstrip()
        self._template = TurnTemplate(source.text, tokenizer, where, source.settings)
        self._tokenizer = tokenizer
        self._learns_all = loss_on == "all"

    def __call__(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        text, guard = self._write(conversation)
        parts = self._template.parts(text)
        sections = list(self._template.sections(parts))
        texts = ["".join(part.text for part in parts[each.start : each.stop]) for each in sections]
        learn = self._learnt_sections(
            sections, [text.replace(guard or "", "") for text in texts], conversation
        )
        return tuple(self._unguarded(self._spans(parts, sections, learn), guard))

    def prompt(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        """Render a conversation up to where the assistant's next turn begins. Raises `DataError`."""
        text, guard = self._write(conversation, asks=True)
        return tuple(self._unguarded(self._template.parts(text), guard))

    def _learnt_sections(
        self, sections: Sequence[TurnSection], texts: Sequence[str], conversation: Conversation
    ) -> list[bool]:
        """Say which sections are learnt, by assistant message. Raises `DataError` if they are not the messages' turns."""
        learnt = learnt_messages(conversation.messages)
        # The number, from 1, of the turn that each section belongs to.
        turns = list(accumulate(not section.continues for section in sections))
        num_turns = turns[-1] if turns else 0
        # A template with several headers writes neighbouring messages as one turn.
        if num_turns < (min(len(learnt), 1) if self._template.has_several_headers else len(learnt)):
            raise DataError(
                f"the chat template wrote {num_turns} turns of the assistant for {len(learnt)} messages from it"
            )
        if len(set(learnt)) == 1:
            return [learnt[0]] * len(sections)
        if num_turns == len(learnt):
            return [learnt[turn - 1] for turn in turns]
        # Equal counts are no proof: a template may leave one message out and write another one in two sections.
        answers = [message for message in conversation.messages if message["role"] == "assistant"]
        if len(sections) == len(learnt) and all(map(_is_written, answers, texts)):
            return learnt
        raise DataError(
            "the chat template does not write each message of the assistant as a turn of its own, so those with weight "
            "0 or train = false cannot be told from the others"
        )

    def _spans(
        self, parts: Sequence[TextSpan], sections: Sequence[TurnSection], learnt: Sequence[bool]
    ) -> list[TextSpan]:
        """Mark which parts are learnt: the sections that are `learnt`, without the header that begins a turn."""
        spans, index, last = [], 0, False  # `last`: whether the section before is learnt
        for section, learn in zip(sections, learnt, strict=True):
            spans += _marked(parts[index : section.start], self._learns_all)
            if section.continues and last == learn:
                # The model writes this header itself, and it is tokenised with what follows.
                spans += _marked(parts[section.start : section.stop], learn)
            else:
                header, inner = self._at_tokens(*self._template.cut_header(parts, section))
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

    # Text that looks like a special token.

    def _write(self, conversation: Conversation, asks: bool = False) -> tuple[str, str | None]:
        """Write a conversation; if it `asks`, with the header that asks for an answer. Raises `DataError`.

        Returns the text, and the guard that is in all text of messages that looks like a token of the template, None if
        there is no such text.
        """
        strings: list[str] = []

        def seen(text: str) -> str:
            strings.append(text)
            return text

        messages, tools = with_reasoning(conversation.messages), list(conversation.tools) or None
        _mapped([messages, tools], seen)
        # The guards would hide such text from a template's own checks, so the template also sees it as it is.
        plain = self._template.render(messages, tools, asks)
        marks = self._template.marks
        if not any(marks.search(string) for string in strings):
            return plain, None
        guard = next((each for each in GUARDS if not any(each in string for string in strings)), None)
        if guard is None:
            raise DataError("it contains all characters that Unicode reserves for use inside a program")
        messages, tools = _mapped(
            [messages, tools], lambda text: marks.sub(lambda match: match[0][:1] + guard + match[0][1:], text)
        )
        text = self._template.render(messages, tools, asks)
        if text.replace(guard, "") != plain:
            raise DataError(
                "a message holds text that looks like a special token, and the chat template does not write it unchanged; "
                "take such text out of the message, and give reasoning in its own field (reasoning_content)"
            )
        return text, guard

    def _unguarded(self, spans: Sequence[TextSpan], guard: str | None) -> Iterator[TextSpan]:
        unsafe_marks = self._template.unsafe_marks
        for span in spans:
            parts = span.text.split(guard) if guard else [span.text]
            if unsafe_marks and any(mark in "".join(parts) for mark in unsafe_marks):
                # An added token that is not special is recognised in any text: only apart do its letters stay text.
                yield from (replace(span, text=part) for part in parts if part)
            else:
                yield replace(span, text="".join(parts))


def _marked(parts: Sequence[TextSpan], learn: bool) -> list[TextSpan]:
    return [TextSpan(part.text, learn, part.special) for part in parts]


def _is_written(message: Message, text: str) -> bool:
    """Check whether `text` is all that a template wrote of a message: its content and its calls. Reasoning may be apart."""
    if not isinstance(content := message.get("content") or "", str) or any(map(message.get, REASONING)):
        return False
    calls = message.get("tool_calls") or ()
    wanted = [*([content.strip()] if content.strip() else []), *(call["function"]["name"] for call in calls)]
    return bool(wanted) and all(each in text for each in wanted)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Copy nested messages with each string changed, those of keys too."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


# Fields of messages that trainers share: reasoning under three names, and which messages are learnt.


def with_reasoning(messages: Sequence[Message]) -> list[Any]:
    """Copy messages with reasoning under the names of templates: `reasoning_content`, and GPT-OSS's `thinking`."""
    copies = []
    for message in messages:
        # Tables give each row all of their columns: a name may be there without a value.
        reasoning = next((message[name] for name in REASONING if message.get(name)), None)
        if reasoning is not None:
            thinking = message.get("thinking") or reasoning
            message = {**message, "thinking": thinking, "reasoning_content": reasoning}
        copies.append(message)
    return copies


def learnt_messages(messages: Sequence[Message]) -> list[bool]:
    """Say for each message of the assistant whether it is learnt. Raises `DataError` for a weight other than 0 and 1.

    `"weight": 0` (OpenAI's convention) and `"train": false` (axolotl's) take a message out.
    """
    learnt = []
    for index, message in enumerate(messages):
        flags = [message.get(name) for name in ("weight", "train")]
        # JSON's true and false are 1 and 0 here, which some data sets write.
        if any(flag not in (None, 0, 1) for flag in flags):
            raise DataError(
                f"message {index}: weight and train are {flags}; legal: 0 or false (not learnt), 1 or true"
            )
        if message["role"] == "assistant":
            learnt.append(0 not in flags)
    return learnt


@dataclass(frozen=True)
class Prompt:
    """A text to continue: as it is shown, and as token ids."""

    text: str
    tokens: list[int]


def prompts_of(
    texts: Sequence[str], tokenizer: Tokenizer, with_chat: bool, key: str = "--prompt"
) -> list[Prompt]:
    """Encode prompts, with `with_chat` as user's messages. Raises `ConfigError` or `DataError`, which name `key`."""
    if not all(texts):
        raise ConfigError([f"{key}: an empty prompt; legal: some text"])
    if not with_chat or not texts:
        return [Prompt(text, tokenizer.prompt_ids(text)) for text in texts]
    template, prompts = ChatTemplate(tokenizer), []
    for text in texts:
        try:
            spans = template.prompt(Conversation(({"role": "user", "content": text},)))
        except DataError as error:
            raise DataError(f"{key}: {error}") from error
        ids = [int(token) for part in encode_spans(tokenizer, spans) for token in part]
        prompts.append(Prompt(text, ids))
    return prompts
