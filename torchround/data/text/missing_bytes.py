"""Encodes text with a byte-level vocabulary that lacks tokens for some bytes, as the package tokenizers does.

A vocabulary trained on clean text has no token for bytes that its text did not hold: the 13 bytes that UTF-8 never uses,
often some control characters, and the first bytes of planes that are almost empty. tiktoken cannot encode such a byte.
The package tokenizers puts the vocabulary's `unk_token` in its place, or leaves it out if there is none.
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import regex
import tiktoken

logger = logging.getLogger(__name__)

NEWER_NUMERALS = "\U00011de0-\U00011de9\U00016ff4-\U00016ff6"
"""Numerals of Unicode 17, which the splitter `Digits` of tokenizers 0.23 knows. All else there and in tiktoken is of
Unicode 16."""

UNASSIGNED = "\u0378"  # by every version of Unicode so far


@dataclass
class MissingBytes:
    """The bytes without a token. `pattern` splits text into pieces, and bytes are merged inside a piece.

    `unknown` is the id of `unk_token`, or None. With `fused`, neighbours in a piece share one such id.
    """

    values: bytes
    pattern: str
    unknown: int | None = None
    fused: bool = False
    _has_warned: bool = field(default=False, init=False, repr=False)

    def encode(self, encoding: tiktoken.Encoding, text: str) -> list[int] | None:
        """Encode a text that needs a missing byte. Returns None for any other text, which tiktoken can encode."""
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold; tiktoken replaces it too
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            data = text.encode()
        if len(data.translate(None, self.values)) == len(data):
            return None
        self._warn(encoding.name)
        # The package regex knows newer characters than tiktoken, which takes them for unassigned ones.
        newer = self._unassigned.decode(self._unassigned.encode_ordinary(text))
        as_unassigned = text.translate({ord(character): UNASSIGNED for character in newer})
        pieces = (text[match.start() : match.end()] for match in self._pieces.finditer(as_unassigned))
        return [token for piece in pieces for token in self._piece(encoding, piece.encode())]

    def _piece(self, encoding: tiktoken.Encoding, piece: bytes) -> Iterator[int]:
        # Without an unknown token, the bytes around a missing one become neighbours before merging.
        parts = [piece.translate(None, self.values)] if self.unknown is None else self._gaps.split(piece)
        for index, part in enumerate(parts):
            if index and self.unknown is not None:
                yield self.unknown
            if part:
                yield from encoding._encode_single_piece(part)

    def _warn(self, name: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        becomes = "is left out" if self.unknown is None else f"becomes token {self.unknown}"
        shown = " ".join(f"{value:02X}" for value in self.values)
        logger.warning(
            "a text holds a byte that has no token in the vocabulary %s; each such byte %s, as in the model's own "
            "tokenizer (bytes without a token: %s; this is said once)",
            *(name, becomes, shown),
        )

    @cached_property
    def _pieces(self) -> "regex.Pattern[str]":
        return regex.compile(self.pattern)

    @cached_property
    def _unassigned(self) -> tiktoken.Encoding:
        """Encoding that keeps only the characters without a meaning in tiktoken's version of Unicode."""
        return tiktoken.Encoding(
            "unassigned",
            pat_str=rf"[\p{{Cn}}&&[^{NEWER_NUMERALS}]]",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={},
        )

    @cached_property
    def _gaps(self) -> "regex.Pattern[bytes]":
        values = b"".join(regex.escape(bytes([value])) for value in self.values)
        return regex.compile(b"[" + values + b"]" + (b"+" if self.fused else b""))
