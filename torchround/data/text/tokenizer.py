"""Turns text into token ids and back, through the package tokenizers.

The tokenizer `bytes` has one token per UTF-8 byte and needs no file. Any other one is a `tokenizer.json`: a byte-level BPE,
or SentencePiece's kind (BPE or Unigram), which writes a space as `▁`. Most of that kind also put one before a text. Only
the library knows how, so a text that continues another one is encoded behind a character that no token joins.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from torchround.config import MODEL_FOLDER, TokenizerTable, show
from torchround.data.document_types import (
    DataError,
    MissingTokenizerError,
    TextSpan,
    TokenIds,
    TokenizerError,
)
from torchround.data.text.template_files import SETTINGS_FILE, TemplateSource, find_template, read_settings

if TYPE_CHECKING:
    import tokenizers


SUPPORTED = 'supported: name = "bytes", or a tokenizer.json: a byte-level BPE, or a BPE or Unigram that writes spaces as ▁'
FILES = ("tokenizer.json",)
SENTENCEPIECE_FILE = "tokenizer.model"
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>", "<eos>", "</s>")
KEEPING_STEPS = ("ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts")
"""Pre-tokenizers that cut a text and can keep all of it, unlike `Whitespace`."""
SPACE = "▁"
"""The character of SentencePiece's vocabularies that stands for a space."""
NORMALIZERS = ("NFC", "NFKC", "Precompiled", "Prepend", "Replace")
"""Normalizers of SentencePiece's kind that are read."""
WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)
"""Unicode's white space, which some special tokens take from the text beside them. Python's `strip()` takes four more."""
SEAM_CONTEXT = 128
"""Characters on each side of a place that may be a seam. Longer than any word that a pattern splits by what it begins with."""


@dataclass(frozen=True)
class Tokenizer:
    """A vocabulary, and the ids that documents are framed and padded with.

    `vocab_size` is the largest id + 1, special tokens included; the model's vocabulary must be at least this. `bpe` is
    None for the tokenizer `bytes`. `bos_id` is None if documents begin without a token of their own. `special` and
    `in_text` have the ids of added tokens by name: no text becomes a special one, but every text may hold the others
    (`<think>`). `template_tokens` are the names that chat templates may ask for, such as `bos_token`. `strips_before` and
    `strips_after` are the special tokens that take the white space on that side of them.

    `space_before` is None for bytes. Otherwise it says what the library puts a space before: `first`, the beginning of a
    document; `always`, also a text behind an added token; or `never`.
    """

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int
    pad_id: int
    special: dict[str, int]
    in_text: dict[str, int] = field(default_factory=dict)
    bpe: "tokenizers.Tokenizer | None" = None
    template: TemplateSource = field(default_factory=TemplateSource)
    template_tokens: dict[str, str] = field(default_factory=dict)
    space_before: str | None = None
    strips_before: frozenset[str] = frozenset()
    strips_after: frozenset[str] = frozenset()

    def special_id(self, name: str) -> int:
        return self.special[name] if name in self.special else self.in_text[name]

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone. Text that looks like a special token is encoded as plain text."""
        return list(self.encode_array(text).tolist())

    def encode_array(self, text: str, continues: bool = False) -> TokenIds:
        """Encode as an array `[n]`; a text that `continues` another one gets no space before it.

        Raises `DataError` for a text that the vocabulary's pattern cannot split.
        """
        try:
            data = text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, which JSON can hold, becomes U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            data = text.encode()
        if self.bpe is None:
            return np.frombuffer(data, dtype=np.uint8).astype(np.int64)
        ids = self._encode(text, continues)
        names = [] if self.space_before is None else list(self.special_pattern.finditer(text))
        if not {self.special[found[0]] for found in names}.isdisjoint(ids):
            # Such a vocabulary may have the name as one of its own tokens, too. Cut after its first letter, it stays text.
            places = [0, *(found.start() + 1 for found in names), len(text)]
            parts = [text[start:end] for start, end in pairwise(places)]
            encoded = (self._encode(part, continues or index > 0) for index, part in enumerate(parts))
            ids = [token for found in encoded for token in found]
        return np.array(ids, dtype=np.int64)

    def _encode(self, text: str, continues: bool) -> list[int]:
        assert self.bpe is not None, "the tokenizer `bytes` encodes by itself"
        before, taken = self._anchor if continues else ("", [])
        try:
            # Unlike `encode`, this lets other threads of Python work, and finds no offsets of characters.
            (found,) = self.bpe.encode_batch_fast([before + text], add_special_tokens=False)
        except BaseException as error:
            # A pattern that backtracks without end makes the Rust code panic, which is no `Exception`.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"the tokenizer's pattern cannot split a text of {len(text)} characters: {error}"
            ) from error
        ids: list[int] = found.ids
        return ids[len(taken) :]

    @cached_property
    def _anchor(self) -> tuple[str, list[int]]:
        """A letter that no token joins with a character behind it, and its tokens at the beginning of a text.

        Empty if the library puts no space before a text.
        """
        if self.bpe is None or self.space_before in (None, "never"):
            return "", []
        joined = {pair[0] for pair in self.pairs}
        alone = [token for token in self.bpe.get_vocab() if len(token) == 1 and token.isalnum()]
        # Ideographs first: no normalizer joins them with what follows.
        free = (token for token in alone if token not in joined)
        anchor = max(free, key=lambda token: ("\u4e00" <= token <= "\u9fff", token), default="")
        if not anchor:
            raise TokenizerError(
                f"{self.name}: its vocabulary joins each of its letters with others; a text that continues another one "
                "needs one letter that is always alone"
            )
        return anchor, self._encode(anchor, continues=False)

    @cached_property
    def pairs(self) -> frozenset[str]:
        """Each two characters that are neighbours in a token."""
        assert self.bpe is not None, "the tokenizer `bytes` joins no characters"
        return frozenset(token[i : i + 2] for token in self.bpe.get_vocab() for i in range(len(token) - 1))

    def may_join(self, text: str, place: int) -> bool:
        """Say whether a token may hold the characters before and behind a place. Byte-level vocabularies: not known here."""
        if self.bpe is None or self.space_before is None:
            return False
        before, both = (self._normal(text[place - 1 : end]) for end in (place, place + 1))
        here = len(before)
        return not before or not both.startswith(before) or both[here - 1 : here + 1] in self.pairs

    def _normal(self, text: str) -> str:
        normalizer = None if self.bpe is None else self.bpe.normalizer
        return (normalizer.normalize_str(text) if normalizer else text).replace(" ", SPACE)

    def decode(self, ids: Sequence[int], continues: bool = False) -> str:
        """Return the text of `ids`: special tokens by name, invalid UTF-8 as U+FFFD, unknown ids as `<id N>`.

        If it `continues` another text, a space at its beginning stays.
        """
        texts: list[str] = []
        for known, group in groupby(ids, self._is_known):
            numbers = list(group)
            text = self._decode(numbers, continues or bool(texts)) if known else ""
            texts.append(text if known else "".join(f"<id {n}>" for n in numbers))
        return "".join(texts)

    def decode_after(self, before: Sequence[int], ids: Sequence[int]) -> str:
        """Return the text that `ids` add to other tokens. The space that the library puts behind a token is none of it."""
        added = (*before[-1:], None)[0] in (*self.special.values(), *self.in_text.values())
        return self.decode(ids, continues=len(before) > 0 and not (added and self.space_before == "always"))

    def _is_known(self, number: int) -> bool:
        is_id = 0 <= number < self.vocab_size
        return is_id and (self.bpe is None or self.bpe.id_to_token(number) is not None)

    def _decode(self, ids: list[int], continues: bool) -> str:
        if self.bpe is not None:
            before, taken = self._anchor if continues else ("", [])
            return self.bpe.decode([*taken, *ids], skip_special_tokens=False).removeprefix(before)
        names = {number: name.encode() for name, number in self.special.items()}
        return b"".join(names.get(number) or bytes([number]) for number in ids).decode(errors="replace")

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a document that begins with `text`, BOS included if the vocabulary has one."""
        before = [] if self.bos_id is None else [self.bos_id]
        return [*before, *self.encode(text)]

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        return names_pattern(self.special)


def names_pattern(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern, with one group, of some tokens' names. The longest name at a place is found."""
    longest_first = sorted(names, key=len, reverse=True)
    # A name is not empty; without any name, the pattern matches nowhere.
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def build_tokenizer(table: TokenizerTable, hf_path: str | Path | None = None) -> Tokenizer:
    """Build the tokenizer of the table, otherwise of the model's folder `hf_path`. Raises `TokenizerError`."""
    if table.name == "bytes":
        tokenizer, folder = _byte_tokenizer(), None
    else:
        file = _find_file(table, hf_path)
        tokenizer, folder = read_tokenizer(file), file.parent
    template = find_template(table.chat_template, folder, table.chat_template_kwargs)
    return replace(tokenizer, template=template)


def _find_file(table: TokenizerTable, hf_path: str | Path | None) -> Path:
    given = table.path or hf_path
    if given is None:
        raise TokenizerError(
            f"no tokenizer: give tokenizer.path, tokenizer.name or model.hf_path; {SUPPORTED}"
        )
    path = Path(os.path.expanduser(given))
    if table.path is not None and not path.exists():
        raise MissingTokenizerError(
            "tokenizer.path",
            f"given {show(table.path)}, but there is no such file or folder; legal: a local tokenizer file or the "
            "folder of a model's release (a name on the Hugging Face hub is not downloaded)",
        )
    if table.path is None and not path.is_dir():
        raise MissingTokenizerError(
            "model.hf_path", f"given {show(str(hf_path))}, but there is no such folder; {MODEL_FOLDER}"
        )
    file = path / FILES[0] if path.is_dir() else path
    if not file.is_file():
        found = sorted(entry.name for entry in path.glob("*token*"))
        text = f"no {FILES[0]} in {path} (there: {', '.join(found) or 'nothing'}); {SUPPORTED}"
        if SENTENCEPIECE_FILE in found:
            text += (
                f". {SENTENCEPIECE_FILE} becomes a {FILES[0]} with pip install transformers sentencepiece protobuf, and in "
                f"Python: transformers.AutoTokenizer.from_pretrained({str(path)!r}).save_pretrained({str(path)!r})"
            )
        raise TokenizerError(text)
    return file


def _byte_tokenizer() -> Tokenizer:
    special = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    return Tokenizer("bytes", 259, 256, 257, 258, special, template_tokens=names)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a `tokenizer.json`, and the names of tokens beside it. Raises `TokenizerError`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    import tokenizers  # here: the benchmark of a bare machine reads no text

    try:
        content = json.loads(data)
        space_before = _space_before(content)
        bpe = tokenizers.Tokenizer.from_buffer(data)
        vocabulary = bpe.get_vocab()
        if len(set(vocabulary.values())) < len(vocabulary):
            raise TokenizerError("several tokens have the same id")
    except TokenizerError as error:
        raise TokenizerError(f"{path}: {error}") from error
    except Exception as error:  # the package raises plain `Exception`
        raise TokenizerError(f"{path}: not a tokenizer.json ({error})") from error
    bpe.decoder = bpe.decoder or (
        tokenizers.decoders.ByteLevel() if space_before is None else tokenizers.decoders.Metaspace()
    )
    # The file may limit or pad texts, for other programs. Names of special tokens in a text must stay text.
    bpe.no_truncation()
    bpe.no_padding()
    bpe.encode_special_tokens = True
    added = sorted(bpe.get_added_tokens_decoder().items())
    special = {token.content: number for number, token in added if token.special}
    in_text = {token.content: number for number, token in added if not token.special}
    settings = read_settings(path.parent / SETTINGS_FILE)
    names = {key: _token_name(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    known = {key: name for key, name in names.items() if name in special}
    # The vocabulary's own end-of-document token comes first: the eos_token of a chat model ends a turn.
    ends = [name for name in (*DOCUMENT_ENDS, known.get("eos_token")) if name in special]
    if not ends:
        raise TokenizerError(
            f"{path}: no token ends a document: none of {', '.join(DOCUMENT_ENDS)}, and no eos_token in "
            f"{path.parent / SETTINGS_FILE}"
        )
    (first, *_) = bpe.encode("a").tokens
    bos: str | None = first if first in special else None
    if isinstance(settings.get("add_bos_token"), bool):  # programs that read both files follow this one
        bos = known.get("bos_token", bos) if settings["add_bos_token"] else None
    paddings = [known.get("pad_token"), *(name for name in special if "pad" in name)]
    unused = [name for name in paddings if name and name not in (ends[0], bos)]
    kind = (
        "byte-level BPE" if space_before is None else f"SentencePiece {content['model'].get('type', 'BPE')}"
    )
    return Tokenizer(
        name=f"{kind} {hashlib.sha256(data).hexdigest()[:12]}",
        vocab_size=max(vocabulary.values()) + 1,
        bos_id=special[bos] if bos else None,
        eos_id=special[ends[0]],
        pad_id=special[(unused or ends)[0]],
        special=special,
        in_text=in_text,
        bpe=bpe,
        template_tokens=known,
        space_before=space_before,
        strips_before=frozenset(token.content for _, token in added if token.lstrip and token.special),
        strips_after=frozenset(token.content for _, token in added if token.rstrip and token.special),
    )


def _space_before(content: dict[str, Any]) -> str | None:
    """Find what a tokenizer puts a space before, None for a byte-level BPE. Raises `TokenizerError` for other kinds.

    Text is encoded in pieces, and conversations in spans. A tokenizer that removes a part of a text would lose it, and one
    with dropout would give other tokens in each pass.
    """
    model = content["model"]
    steps = _steps(content.get("pre_tokenizer"), "pretokenizers")
    normalizers = _steps(content.get("normalizer"), "normalizers")
    kinds = [step.get("type") for step in normalizers]
    writes_marks = any(step.get("content") == SPACE for step in normalizers)
    is_byte_level = not writes_marks and not (steps and steps[-1].get("type") == "Metaspace")
    wrong = [step for step in steps if _changes_text(step, is_byte_level)]
    if is_byte_level and (not steps or steps[-1].get("type") != "ByteLevel"):
        wrong.append(steps[-1] if steps else {})
    if wrong or model.get("type", "BPE") not in (("BPE",) if is_byte_level else ("BPE", "Unigram")):
        raise TokenizerError(
            f"its model is {model.get('type')!r} and its pre_tokenizer has {next(iter([*wrong, *steps]), None)}; {SUPPORTED}, without a "
            "step that puts a space before a text in bytes, or removes a part of it"
        )
    odd = next((key for key in ("continuing_subword_prefix", "end_of_word_suffix") if model.get(key)), None)
    allowed = kinds in ([], ["NFC"]) if is_byte_level else set(kinds) <= set(NORMALIZERS) and not odd
    if not allowed or model.get("dropout"):
        legal = (
            "none, or NFC" if is_byte_level else f"none, {', '.join(NORMALIZERS)}, and no {odd or 'dropout'}"
        )
        raise TokenizerError(
            f"it has normalizers {kinds}, dropout {model.get('dropout')}; supported: {legal}"
        )
    if is_byte_level:
        return None
    schemes = ["always"] * ("Prepend" in kinds)
    for step in (step for step in steps if step.get("type") == "Metaspace"):
        old = "always" if step.get("add_prefix_space", True) else "never"
        schemes.append(step.get("prepend_scheme", old))
    return next((scheme for scheme in ("always", "first") if scheme in schemes), "never")


def _steps(part: dict[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    part = part or {}
    return list(part.get(inner, [part] if part else []))


def _changes_text(step: dict[str, Any], is_byte_level: bool) -> bool:
    if not is_byte_level and step.get("type") == "Metaspace":
        return step.get("replacement") != SPACE
    removes = step.get("behavior") == "Removed" and not step.get("invert")
    return removes or step.get("type") not in KEEPING_STEPS or bool(step.get("add_prefix_space"))


def _token_name(value: Any) -> str:
    """Return the name of a token, which older files give as an object with its `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


# Special tokens by their names in text: a source whose text a chat template wrote before reads them (`special_tokens`).


def split_special(tokenizer: Tokenizer, text: str, learn: bool) -> list[TextSpan]:
    parts = enumerate(tokenizer.special_pattern.split(text))
    return [TextSpan(part, learn, special=index % 2 == 1) for index, part in parts if part]


def encode_spans(tokenizer: Tokenizer, spans: Sequence[TextSpan], continues: bool = False) -> list[TokenIds]:
    """Encode each span apart, as `[n]` int64: together they have the tokens of the whole.

    `continues`: the first span continues a text. Special tokens may take the white space beside them.
    """
    found, strips = [], False
    for index, span in enumerate(spans):
        if span.special:
            found.append(np.array([tokenizer.special_id(span.text)], dtype=np.int64))
            strips = span.text in tokenizer.strips_after
            continues = tokenizer.space_before != "always"
            continue
        text = span.text.lstrip(WHITE_SPACE) if strips else span.text
        if any(
            after.special and after.text in tokenizer.strips_before for after in spans[index + 1 : index + 2]
        ):
            text = text.rstrip(WHITE_SPACE)
        found.append(tokenizer.encode_array(text, continues and not span.begins))
        if text:
            continues, strips = True, False
    return found


def encode_text(
    tokenizer: Tokenizer, text: str, reads_special: bool = False, continues: bool = False
) -> TokenIds:
    """Encode a text, in which the names of special tokens are tokens if the source reads them."""
    if not reads_special:
        return tokenizer.encode_array(text, continues)
    parts = encode_spans(tokenizer, split_special(tokenizer, text, True), continues)
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def splits_at(tokenizer: Tokenizer, text: str, place: int, reads_special: bool = False) -> bool:
    """Say whether a text may be encoded in two parts, up to `place` and from there on, without a change of its tokens.

    Only the text around the place is encoded. It begins at three places in a row, because a pattern that takes three digits
    at once counts them from the first one. A vocabulary of SentencePiece's kind may join any characters, over any distance:
    there no token may hold the two beside the place.
    """
    after = text[place : place + SEAM_CONTEXT]
    if not after.strip() or tokenizer.may_join(text, place):
        return False  # white space may join the text behind it, which is not seen here
    for more in range(3 if place > SEAM_CONTEXT else 1):
        before = text[max(0, place - SEAM_CONTEXT - more) : place]
        first, second, whole = (
            encode_text(tokenizer, part, reads_special, continues=True)
            for part in (before, after, before + after)
        )
        if not np.array_equal(np.concatenate([first, second]), whole):
            return False
    return True


def opens_with(tokenizer: Tokenizer, text: str, token_id: int | None) -> bool:
    found = tokenizer.special_pattern.match(text)
    return found is not None and tokenizer.special_id(found[0]) == token_id


def ends_with_special(tokenizer: Tokenizer, text: str) -> bool:
    """Say whether a text ends with a special token, white space aside."""
    return text.rstrip().endswith(tuple(tokenizer.special))


def pair_spans(
    tokenizer: Tokenizer, prompt: str, completion: str, learns_all: bool, reads_special: bool
) -> tuple[TextSpan, ...]:
    """Write a prompt and its completion, both plain text: BOS if the tokenizer puts one, both texts, and EOS.

    The completion and EOS are learnt, and with `learns_all` the prompt too. The two are tokenised apart, as in generation.
    With `reads_special`, names of special tokens are tokens, and BOS and EOS are not written twice.
    """

    def written(text: str, learn: bool) -> list[TextSpan]:
        if reads_special:
            return split_special(tokenizer, text, learn)
        return [TextSpan(text, learn)] if text else []

    def begin(spans: list[TextSpan]) -> list[TextSpan]:
        return [replace(spans[0], begins=True), *spans[1:]] if spans else []

    names = {number: name for name, number in reversed(tokenizer.special.items())}
    before, after = [], []
    if tokenizer.bos_id is not None and not (
        reads_special and opens_with(tokenizer, prompt, tokenizer.bos_id)
    ):
        before = [TextSpan(names[tokenizer.bos_id], learns_all, special=True)]
    if not (reads_special and ends_with_special(tokenizer, completion)):
        after = [TextSpan(names[tokenizer.eos_id], True, special=True)]
    return (*before, *begin([*written(prompt, learns_all), *written(completion, True)]), *after)
