"""Special tokens by their names in plain text: read as tokens if a source asks for it, otherwise found and warned about.

Text is encoded as text by default, so that no document can fake the turn of a conversation. A source whose text was
rendered with a chat template before asks for the tokens with `special_tokens = true`.
"""

from dataclasses import dataclass

import numpy as np

from torchround.data.document_types import TextSpan, TokenIds
from torchround.data.text.tokenizer import Tokenizer

SEAM_CONTEXT = 128
"""Characters on each side of a place that may be a seam. Longer than any word that a pattern splits by what it begins with."""


def split_special(tokenizer: Tokenizer, text: str, learn: bool) -> list[TextSpan]:
    parts = enumerate(tokenizer.special_pattern.split(text))
    return [TextSpan(part, learn, special=index % 2 == 1) for index, part in parts if part]


def encode_spans(tokenizer: Tokenizer, spans: list[TextSpan] | tuple[TextSpan, ...]) -> list[TokenIds]:
    """Encode each span apart, as `[n]` int64."""
    return [
        np.array([tokenizer.special_id(span.text)], dtype=np.int64)
        if span.special
        else tokenizer.encode_array(span.text)
        for span in spans
    ]


def encode_text(tokenizer: Tokenizer, text: str, reads_special: bool = False) -> TokenIds:
    """Encode a text, in which the names of special tokens are tokens if the source reads them."""
    if not reads_special:
        return tokenizer.encode_array(text)
    parts = encode_spans(tokenizer, split_special(tokenizer, text, True))
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def splits_at(tokenizer: Tokenizer, text: str, place: int, reads_special: bool = False) -> bool:
    """Say whether a text may be encoded in two parts, up to `place` and from there on, without a change of its tokens.

    Only the text around the place is encoded. It begins at three places in a row, because a pattern that takes three digits
    at once counts them from the first one.
    """
    after = text[place : place + SEAM_CONTEXT]
    if not after.strip():
        return False  # white space may join the text behind it, which is not seen here
    for more in range(3 if place > SEAM_CONTEXT else 1):
        before = text[max(0, place - SEAM_CONTEXT - more) : place]
        parts = [encode_text(tokenizer, part, reads_special) for part in (before, after)]
        if not np.array_equal(np.concatenate(parts), encode_text(tokenizer, before + after, reads_special)):
            return False
    return True


def opens_with(tokenizer: Tokenizer, text: str, token_id: int | None) -> bool:
    found = tokenizer.special_pattern.match(text)
    return found is not None and tokenizer.special_id(found[0]) == token_id


def ends_with_special(tokenizer: Tokenizer, text: str) -> bool:
    """Say whether a text ends with a special token, white space aside."""
    return text.rstrip().endswith(tuple(tokenizer.special))


@dataclass(frozen=True)
class PairFormat:
    """Writer of a prompt and its completion, both plain text: BOS if the tokenizer puts one, both texts, and EOS.

    The completion and EOS are learnt, and with `learns_all` the prompt too. The two are tokenised apart, as in generation.
    With `reads_special`, names of special tokens are tokens, and BOS and EOS are not written twice.
    """

    tokenizer: Tokenizer
    learns_all: bool = False
    reads_special: bool = False

    def __call__(self, prompt: str, completion: str) -> tuple[TextSpan, ...]:
        bos_id, eos_id = self.tokenizer.bos_id, self.tokenizer.eos_id
        begun = self.reads_special and opens_with(self.tokenizer, prompt, bos_id)
        ended = self.reads_special and ends_with_special(self.tokenizer, completion)
        before = [] if bos_id is None or begun else [self._named(bos_id, self.learns_all)]
        after = [] if ended else [self._named(eos_id, True)]
        return (*before, *self._spans(prompt, self.learns_all), *self._spans(completion, True), *after)

    def _spans(self, text: str, learn: bool) -> list[TextSpan]:
        if self.reads_special:
            return split_special(self.tokenizer, text, learn)
        return [TextSpan(text, learn)] if text else []

    def _named(self, token_id: int, learn: bool) -> TextSpan:
        name = next(name for name, known in self.tokenizer.special.items() if known == token_id)
        return TextSpan(name, learn, special=True)
