"""Writes a conversation with a model's own chat template, and finds which parts of the text are learnt.

The unchanged template is rendered in a sandbox. The learnt parts are then found in the result: each begins after the
header that asks the model to speak (the text that `add_generation_prompt` adds), and ends with the token that ends its
turn. Both contain special tokens. Text in a message that looks like a special token stays text, so no message can fake
a turn.
"""

import datetime
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from os.path import commonprefix
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from torchround.data.document_types import Conversation, TextSpan
from torchround.data.errors import DataError, TokenizerError
from torchround.data.text.tokenizer import Tokenizer
from torchround.untrusted.template_sandbox import LimitedEnvironment

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>")
GUARDS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
"""Characters that Unicode reserves for use inside a program. One that does not occur in a conversation is inserted into
each text that looks like a special token, and removed after the template's own special tokens have been found."""

QUESTION, ANSWER, THOUGHT = "a question to probe with", "an answer to probe with", "a thought to probe with"


class ChatTemplate:
    """A tokenizer's chat template, which renders conversations. `loss_on`: `assistant` or `all`.

    Raises `TokenizerError` if there is no template, or if its turns cannot be told apart.
    """

    def __init__(self, tokenizer: Tokenizer, loss_on: str = "assistant") -> None:
        if tokenizer.chat_template is None:
            raise TokenizerError(
                f"a source holds conversations, but tokenizer {tokenizer.name!r} has no chat template beside it; "
                "give tokenizer.chat_template"
            )
        self._where = f"chat template {tokenizer.template_file or ''}".rstrip()
        self._render = compile_template(tokenizer.chat_template, tokenizer.template_tokens)
        names = sorted(tokenizer.special, key=len, reverse=True)
        self._special = re.compile(f"({'|'.join(map(re.escape, names))})")
        self._learns_all = loss_on == "all"
        self._find_turns(tokenizer)

    def __call__(self, conversation: Conversation) -> tuple[TextSpan, ...]:
        """Render a conversation, with special tokens apart from text. Raises `DataError`."""
        guard, messages, tools = self._guarded(conversation)
        parts = self._parts(self._render(messages, tools))
        spans, num_turns = self._marked(parts)
        wanted = sum(message["role"] == "assistant" for message in conversation.messages)
        if num_turns < (1 if self._joins_headers else wanted):
            raise DataError(
                f"the chat template wrote {num_turns} turns of the assistant for {wanted} messages from it"
            )
        if guard is None:
            return tuple(spans)
        return tuple(TextSpan(span.text.replace(guard, ""), span.learn, span.special) for span in spans)

    def _marked(self, parts: Sequence[TextSpan]) -> tuple[list[TextSpan], int]:
        """Mark which parts are learnt, and count the turns of the assistant."""
        spans: list[TextSpan] = []
        index, num_turns, speaking = 0, 0, False  # `speaking`: inside a turn of the assistant
        while index < len(parts):
            part = parts[index]
            if not speaking and self._is_header(parts, index):
                header, rest = self._cut_header(parts, index)
                spans += [TextSpan(part.text, self._learns_all, part.special) for part in header]
                spans += rest
                index, num_turns, speaking = index + len(self._header), num_turns + 1, True
                continue
            spans.append(TextSpan(part.text, speaking or self._learns_all, part.special))
            index += 1
            if speaking and part.special and part.text in self._ends:
                # A template that writes thoughts apart from the answer continues the turn with another header.
                speaking = self._joins_headers and self._is_header(parts, index)
        return spans, num_turns

    def _is_header(self, parts: Sequence[TextSpan], index: int) -> bool:
        found = parts[index : index + len(self._header)]
        if [part.special for part in found] != [part.special for part in self._header]:
            return False
        *inner, last = zip(found, self._header, strict=True)
        same = all(part.text == header.text for part, header in inner)
        return same and (
            last[0].text == last[1].text if last[1].special else last[0].text.startswith(last[1].text)
        )

    def _cut_header(self, parts: Sequence[TextSpan], index: int) -> tuple[list[TextSpan], list[TextSpan]]:
        """Split off the header from the text that follows it in the same part."""
        rest = parts[index + len(self._header) - 1].text[len(self._header[-1].text) :]
        return list(self._header), [TextSpan(rest, True)] if rest else []

    def _parts(self, text: str) -> list[TextSpan]:
        """Split a text into special tokens and the text between them."""
        found = enumerate(self._special.split(text))
        return [TextSpan(part, False, special=index % 2 == 1) for index, part in found if part]

    # How the template writes turns, found out by rendering probes.

    def _find_turns(self, tokenizer: Tokenizer) -> None:
        """Find the header of the assistant's turns, the tokens that end them, and whether a turn has several headers."""
        question, answer = _message("user", QUESTION), _message("assistant", ANSWER)
        asked = self._probe([question], add_generation_prompt=True)
        # The text that asks the model to speak is what the prompt adds to the same conversation without it.
        prompt = asked[len(commonprefix([asked, self._probe([question])])) :]
        dialogue = self._probe([question, answer, question, answer])
        begins = self._special.match(prompt)
        if dialogue.count(ANSWER) != 2:
            raise TokenizerError(
                f"{self._where}: it writes the two answers of a conversation {dialogue.count(ANSWER)} times in all; "
                "legal: each answer once"
            )
        if begins is None:
            raise TokenizerError(
                f"{self._where}: the assistant's header, which it adds for add_generation_prompt, is {prompt!r}; "
                "legal: one that begins with a special token of the tokenizer, because that marks its turns"
            )
        answer_starts = [match.start() for match in re.finditer(re.escape(ANSWER), dialogue)]
        headers = [dialogue[dialogue.rfind(begins[0], 0, place) : place] for place in answer_starts]
        # Prompt and written headers may continue differently (GPT-OSS names a channel): only their common beginning counts.
        self._header = tuple(self._parts(commonprefix([prompt, *headers])))
        after = [self._special.search(dialogue, place) for place in answer_starts]
        ends = {match[0] for match in after if match is not None}
        if not ends or len(self._header) < 2:
            raise TokenizerError(
                f"{self._where}: it begins the assistant's turns with {headers} and ends them with {sorted(ends)}; "
                "needed: the same special token and name, and a special token"
            )
        known = {*TURN_ENDS, tokenizer.template_tokens.get("eos_token", "")}
        self._ends = ends | (known & tokenizer.special.keys())
        self._joins_headers = self._has_several_headers(question)

    def _has_several_headers(self, question: dict[str, Any]) -> bool:
        """Say whether one message is written with several headers: its thoughts apart from its answer."""
        message = _message("assistant", ANSWER) | {"thinking": THOUGHT, "reasoning_content": THOUGHT}
        parts = self._parts(self._probe([question, message]))
        return sum(self._is_header(parts, index) for index in range(len(parts))) > 1

    def _probe(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        try:
            return self._render(messages, None, add_generation_prompt)
        except DataError as error:
            raise TokenizerError(
                f"{self._where}: a plain question and answer cannot be written: {error}"
            ) from error

    # Text that looks like a special token.

    def _guarded(self, conversation: Conversation) -> tuple[str | None, list[Any], list[Any] | None]:
        """Insert a guard into all text that looks like a special token; return the guard, the messages and the tools."""
        messages, tools = list(conversation.messages), list(conversation.tools) or None
        strings = list(_strings([messages, tools]))
        if not any(self._special.search(string) for string in strings):
            return None, messages, tools
        guard = next((guard for guard in GUARDS if not any(guard in string for string in strings)), None)
        if guard is None:
            raise DataError("it contains all characters that Unicode reserves for use inside a program")

        def put_in(text: str) -> str:
            return self._special.sub(lambda match: match[0][:1] + guard + match[0][1:], text)

        return guard, _mapped(messages, put_in), _mapped(tools, put_in)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    """Copy nested messages with each string changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {
            change(key) if isinstance(key, str) else key: _mapped(item, change) for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change) for item in value]
    return value


# Rendering of Jinja templates, with the functions and filters that released templates use.

# `strftime_now` always gives this day, so that a run resumed tomorrow reads the same text as today. Llama 3.1's
# template falls back to it.
FIXED_DAY = datetime.datetime(2024, 7, 26)

RenderTemplate = Callable[..., str]


class GenerationTag(Extension):
    """The tag `{% generation %}`, which marks assistants' turns for other trainers and changes nothing here."""

    tags = {"generation"}  # noqa: RUF012 (a plain attribute of the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Replace the tag by its content."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, tokens: Mapping[str, str]) -> RenderTemplate:
    """Compile a chat template to a function `render(messages, tools, add_generation_prompt=False) -> str`.

    `tokens`: names of the special tokens that the template may ask for, such as `bos_token`. Raises `TokenizerError`
    if the source is not Jinja; `render` raises `DataError` if the template fails or exceeds its limits.
    """
    environment = LimitedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(raise_exception=raise_exception, strftime_now=FIXED_DAY.strftime)
    try:
        template = environment.from_string(environment.metered(source))
    except (TemplateError, RecursionError, ValueError) as error:
        raise TokenizerError(f"the chat template is not valid Jinja: {error}") from error

    def render(
        messages: Sequence[Any], tools: Sequence[Any] | None, add_generation_prompt: bool = False
    ) -> str:
        environment.begin()
        try:
            return template.render(
                messages=messages,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **tokens,
            )
        except Exception as error:  # expressions in a template can raise every Python error
            raise DataError(f"error in the chat template: {type(error).__name__}: {error}") from error

    return render


def to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **further: Any) -> str:
    """Write JSON for a model to read: no HTML escapes, and letters of all scripts unescaped."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **further)


def raise_exception(message: str) -> NoReturn:
    """Raise the error by which a template refuses a conversation."""
    raise TemplateError(message)
