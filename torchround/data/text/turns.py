"""Finds the assistant's turns in what a chat template writes.

A turn begins after the header that asks the model to speak (the text that `add_generation_prompt` adds), and ends with
the token that ends it. Header and end hold tokens that only the template can write. These are the special tokens, and
added tokens that are not special if the template's headers or ends need them.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any

from torchround.data.document_types import DataError, TextSpan, TokenizerError
from torchround.data.text.tokenizer import Tokenizer, names_pattern
from torchround.untrusted.template_sandbox import sandbox

TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>")

QUESTION, ANSWER, THOUGHT = "a question to probe with", "an answer to probe with", "a thought to probe with"


@dataclass(frozen=True)
class TurnSection:
    """The parts from `start` to `stop` that begin with a header. `continues`: it continues the turn of the section before."""

    start: int
    stop: int
    continues: bool


class TurnTemplate:
    """A compiled chat template, and how it marks the assistant's turns.

    `has_several_headers`: one message may be written with several headers, its thoughts apart from its answer. `marks`
    finds the tokens that only the template may write; `unsafe_marks` are the ones that any text would become, because
    they are not special. Raises `TokenizerError` if the turns cannot be told apart.
    """

    def __init__(
        self, source: str, tokenizer: Tokenizer, where: str, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._where = where
        self._settings = {**tokenizer.template_tokens, **(settings or {})}
        try:
            self._template = sandbox().from_string(source)
        except Exception as error:
            raise TokenizerError(f"error in {where}: {type(error).__name__}: {error}") from error
        self.marks = names_pattern(tokenizer.special)
        self.unsafe_marks: frozenset[str] = frozenset()
        try:
            self._find_turns(tokenizer)
        except TokenizerError:
            if not self._tries_added_tokens(tokenizer):
                raise
        message = _message("assistant", ANSWER) | {"thinking": THOUGHT, "reasoning_content": THOUGHT}
        text = self._probe([_message("user", QUESTION), message])
        self.has_several_headers = self._num_headers(text) > 1
        # A template whose prompt opens thoughts closes them by itself in a message that has none. It may write none at all in
        # the answers to earlier questions.
        closed = [self._last_header] if "".join(part.text for part in self._prompt) + THOUGHT in text else []
        self._headers = (*closed, self._prompt, self._header)

    def render(
        self, messages: Sequence[Any], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> str:
        """Write a conversation. Raises `DataError` if the template fails."""
        inputs = {"messages": messages, "tools": tools, "add_generation_prompt": add_generation_prompt}
        try:
            # A copy of what JSON can hold: a template cannot change the record, and a date prints as text.
            inputs = json.loads(json.dumps(inputs, default=str))
            return self._template.render({**self._settings, **inputs, "documents": None})
        except Exception as error:
            raise DataError(f"error in {self._where}: {type(error).__name__}: {error}") from error

    def parts(self, text: str) -> list[TextSpan]:
        found = enumerate(self.marks.split(text))
        return [TextSpan(part, False, special=index % 2 == 1) for index, part in found if part]

    def sections(self, parts: Sequence[TextSpan]) -> Iterator[TurnSection]:
        index, continues = 0, False
        while index < len(parts):
            if not self._is_header(parts, index):
                index += 1
                continue
            stop = index + len(self._header)
            while stop < len(parts) and not (parts[stop - 1].special and parts[stop - 1].text in self._ends):
                stop += 1
            yield TurnSection(index, stop, continues)
            # A template that writes thoughts apart from the answer continues the turn with another header.
            continues = self.has_several_headers and self._is_header(parts, stop)
            index = stop

    def cut_header(
        self, parts: Sequence[TextSpan], section: TurnSection
    ) -> tuple[list[TextSpan], list[TextSpan]]:
        """Split a section into its header and what follows, which may begin inside a part.

        The header is all that the template writes by itself: thoughts that the prompt opens, and their end in a message that
        has none.
        """
        header = next(each for each in self._headers if self._is_header(parts, section.start, each))
        first = section.start + len(header)
        rest = parts[first - 1].text[len(header[-1].text) :]
        inner = [TextSpan(rest, False)] if rest else []
        return list(header), [*inner, *parts[first : section.stop]]

    def _is_header(
        self, parts: Sequence[TextSpan], index: int, wanted: tuple[TextSpan, ...] | None = None
    ) -> bool:
        wanted = wanted or self._header
        found = parts[index : index + len(wanted)]
        if [part.special for part in found] != [part.special for part in wanted]:
            return False
        *inner, last = zip(found, wanted, strict=True)
        same = all(part.text == header.text for part, header in inner)
        return same and (
            last[0].text == last[1].text if last[1].special else last[0].text.startswith(last[1].text)
        )

    # How the template writes turns, found out by rendering probes.

    def _find_turns(self, tokenizer: Tokenizer) -> None:
        question, answer = _message("user", QUESTION), _message("assistant", ANSWER)
        asked = self._probe([question], add_generation_prompt=True)
        # The text that asks the model to speak is what the prompt adds to the same conversation without it.
        alone = self._probe([question])
        prompt = self._rest(asked, alone).lstrip()
        dialogue = self._probe([question, answer, question, answer])
        if dialogue.count(ANSWER) != 2:
            raise TokenizerError(
                f"{self._where}: it writes the two answers of a conversation {dialogue.count(ANSWER)} times in all; "
                "legal: each answer once"
            )
        # Mistral's asks by ending the question, with a token that ends nothing else.
        ends_question = asked == alone and self._common([asked.partition(QUESTION)[2].lstrip()])
        if ends_question and self._num_headers(dialogue, ends_question) == 2:
            prompt = "".join(part.text for part in ends_question)
        begins = self.marks.match(prompt)
        if begins is None:
            raise TokenizerError(
                f"{self._where}: the assistant's header, which it adds for add_generation_prompt, is {prompt!r}; "
                "legal: one that begins with a special token of the tokenizer, or another added one, because that marks its turns"
            )
        answer_starts = [match.start() for match in re.finditer(re.escape(ANSWER), dialogue)]
        headers = [dialogue[dialogue.rfind(begins[0], 0, place) : place] for place in answer_starts]
        # Prompt and written headers may continue differently (GPT-OSS names a channel): only their common beginning counts.
        self._header = self._common([prompt, *headers])
        self._prompt, self._last_header = self._common([prompt]), self._common(headers[-1:])
        after = [self.marks.search(dialogue, place) for place in answer_starts]
        ends = {match[0] for match in after if match is not None}
        if not ends or (asked != alone and self._num_headers(alone)):
            raise TokenizerError(
                f"{self._where}: it begins the assistant's turns with {headers} and ends them with {sorted(ends)}; "
                "needed: the same token and name, which no other turn begins with, and a special or added token"
            )
        known = {*TURN_ENDS, tokenizer.template_tokens.get("eos_token", "")}
        self._ends = ends | (known & tokenizer.special.keys())

    def _tries_added_tokens(self, tokenizer: Tokenizer) -> bool:
        """Look for turns that added tokens mark. Only the ones that headers and ends need are left as marks."""
        if not tokenizer.in_text:
            return False
        self.marks = names_pattern([*tokenizer.special, *tokenizer.in_text])
        try:
            self._find_turns(tokenizer)
        except TokenizerError:
            return False  # the first error says more: it is about the tokens that usually mark turns
        needed = {part.text for part in self._header if part.special} | self._ends
        self.unsafe_marks = frozenset(needed & tokenizer.in_text.keys())
        self.marks = names_pattern([*tokenizer.special, *self.unsafe_marks])
        return True

    def _num_headers(self, text: str, wanted: tuple[TextSpan, ...] | None = None) -> int:
        parts = self.parts(text)
        return sum(self._is_header(parts, index, wanted) for index in range(len(parts)))

    def _rest(self, text: str, shorter: str) -> str:
        """Return what is left of `text` after the beginning that it shares with another text."""
        # By parts first: two tokens may begin with the same letters.
        parts, others = self.parts(text), self.parts(shorter)
        shared = 0
        while shared < min(len(parts), len(others)) and parts[shared] == others[shared]:
            shared += 1
        rest = "".join(part.text for part in parts[shared:])
        if shared < min(len(parts), len(others)) and not (parts[shared].special or others[shared].special):
            rest = rest[len(commonprefix([parts[shared].text, others[shared].text])) :]
        return rest

    def _common(self, texts: Sequence[str]) -> tuple[TextSpan, ...]:
        """Return the parts that all texts begin with; the last one may be the beginning of a part."""
        found = []
        for parts in zip(*map(self.parts, texts), strict=False):
            if len(set(parts)) == 1:
                found.append(parts[0])
                continue
            start = commonprefix([part.text for part in parts])
            if start and not any(part.special for part in parts):
                found.append(TextSpan(start, False))
            break
        return tuple(found)

    def _probe(self, messages: list[dict[str, Any]], add_generation_prompt: bool = False) -> str:
        try:
            return self.render(messages, add_generation_prompt=add_generation_prompt)
        except DataError as error:
            raise TokenizerError(f"a plain question and answer cannot be written: {error}") from error


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
