"""Turns text into token ids and back, through tiktoken.

The tokenizer `bytes` has one token per UTF-8 byte and needs no file. `tokenizer_json.py` reads a byte-level BPE
`tokenizer.json`, `tiktoken_file.py` the tiktoken files of Llama 3 and Qwen.
"""

import logging
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from torchround.config import MODEL_FOLDER, TokenizerTable, show
from torchround.data.document_types import TokenIds
from torchround.data.errors import DataError, MissingTokenizerError, TokenizerError
from torchround.data.text.missing_bytes import MissingBytes
from torchround.data.text.template_files import SETTINGS_FILE, TemplateSources, find_templates, read_settings
from torchround.data.text.tiktoken_file import read_tiktoken_file
from torchround.data.text.tokenizer_json import read_tokenizer_json

logger = logging.getLogger(__name__)

SUPPORTED = (
    'supported: name = "bytes", a byte-level BPE tokenizer.json, and the tiktoken rank files of Llama 3 '
    "(tokenizer.model) and Qwen (qwen.tiktoken)"
)
FILES = ("tokenizer.json", "tokenizer.model", "qwen.tiktoken", "original/tokenizer.model")
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>")


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken encoding and the ids that documents are framed and padded with.

    `bos_id` is None if documents begin without a token of their own. `in_text` holds the added tokens that are not
    special, so that they are recognised in any text (`<think>`). `nfc`: text is normalised first. `missing` is about bytes
    that have no token; it is None if all have one. `template_tokens` are the names that chat templates may ask for, such
    as `bos_token`.
    """

    encoding: tiktoken.Encoding
    bos_id: int | None
    eos_id: int
    pad_id: int
    special: dict[str, int] = field(default_factory=dict)
    in_text: dict[str, int] = field(default_factory=dict)
    nfc: bool = False
    missing: MissingBytes | None = None
    templates: TemplateSources = field(default_factory=TemplateSources)
    template_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the encoding. A saved data position is valid only for the same one."""
        return self.encoding.name

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, special tokens included; the model's vocabulary must be at least this."""
        return self.encoding.n_vocab

    def special_id(self, name: str) -> int:
        """Return the id of a special or added token."""
        return self.special[name] if name in self.special else self.in_text[name]

    def encode(self, text: str) -> list[int]:
        """Encode `text` alone. Text that looks like a special token is encoded as plain text."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> TokenIds:
        """Encode as an array `[n]`, without a Python object per token (twice as fast for `bytes`)."""
        if self._in_text is None:
            return self._encode_plain(text)
        parts = self._in_text.split(text)  # added tokens are at the odd indices
        if len(parts) == 1:
            return self._encode_plain(text)
        return np.concatenate(
            [
                np.array([self.in_text[part]], dtype=np.int64) if index % 2 else self._encode_plain(part)
                for index, part in enumerate(parts)
            ]
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`: special tokens by name, invalid UTF-8 as U+FFFD."""
        return self.encoding.decode(list(ids))

    def decode_known(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` of a model's vocabulary. An id that the tokenizer does not know becomes `<id N>`."""
        try:
            return self.decode(ids)
        except KeyError:
            # A vocabulary may have gaps, too.
            if len(ids) == 1:
                return f"<id {ids[0]}>"
            return "".join(self.decode_known([number]) for number in ids)

    def prompt_ids(self, text: str) -> list[int]:
        """Return the tokens of a document that begins with `text`, BOS included if the vocabulary has one."""
        before = [] if self.bos_id is None else [self.bos_id]
        return [*before, *self.encode(text)]

    def _encode_plain(self, text: str) -> TokenIds:
        if self.nfc:
            text = nfc(text)
        if self.missing is not None and (found := self.missing.encode(self.encoding, text)) is not None:
            return np.array(found, dtype=np.int64)
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate, legal in JSON; this replaces it with U+FFFD
            return np.array(self.encoding.encode_ordinary(text), dtype=np.int64)
        except BaseException as error:
            # A pattern that backtracks without end, or one whose empty match makes the Rust code panic.
            if not isinstance(error, ValueError) and type(error).__name__ != "PanicException":
                raise
            raise DataError(
                f"the tokenizer's pattern cannot split a text of {len(text)} characters: {error}"
            ) from error
        return ids.astype(np.int64)

    @cached_property
    def special_pattern(self) -> re.Pattern[str]:
        """Pattern, with one group, of the names of special tokens. The longest name at a place is found."""
        longest_first = sorted(self.special, key=len, reverse=True)
        # A name is not empty; without any name, the pattern matches nowhere.
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    @cached_property
    def _in_text(self) -> re.Pattern[str] | None:
        """Pattern of the added tokens in text. The longest come first, so that the longest one at a place is found."""
        longest_first = sorted(self.in_text, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def build_tokenizer(table: TokenizerTable, hf_path: str | Path | None = None) -> Tokenizer:
    """Build the tokenizer that the table names, otherwise the one in the model's folder `hf_path`.

    Raises `TokenizerError` if there is none, or none that is supported.
    """
    if table.name == "bytes":
        _warn_of_another_vocabulary(hf_path)
        tokenizer, folder = _byte_tokenizer(), None
    else:
        path = table.path or hf_path
        if path is None:
            raise TokenizerError(
                f"no tokenizer: give tokenizer.path, tokenizer.name or model.hf_path; {SUPPORTED}"
            )
        _refuse_missing(table, hf_path)
        file = _find_file(Path(os.path.expanduser(path)))
        folder = file.parent.parent if file.parent.name == "original" else file.parent
        settings = read_settings(folder / SETTINGS_FILE)
        tokenizer = _from_json(file, settings) if file.suffix == ".json" else _from_tiktoken_file(file)
    templates = find_templates(table.chat_template, folder, table.chat_template_kwargs)
    return replace(tokenizer, templates=templates)


def _refuse_missing(table: TokenizerTable, hf_path: str | Path | None) -> None:
    if table.path is not None and not os.path.exists(os.path.expanduser(table.path)):
        raise MissingTokenizerError(
            "tokenizer.path",
            f"given {show(table.path)}, but there is no such file or folder; legal: a local tokenizer file or the "
            "folder of a model's release (a name on the Hugging Face hub is not downloaded)",
        )
    if table.path is None and hf_path is not None and not os.path.isdir(os.path.expanduser(hf_path)):
        raise MissingTokenizerError(
            "model.hf_path", f"given {show(str(hf_path))}, but there is no such folder; {MODEL_FOLDER}"
        )


def _warn_of_another_vocabulary(hf_path: str | Path | None) -> None:
    """Warn if the weights know another vocabulary. That is legal, but they then begin as if they were random."""
    folder = Path(os.path.expanduser(hf_path)) if hf_path is not None else None
    if folder is not None and any((folder / name).is_file() for name in FILES):
        logger.warning(
            'tokenizer.name = "bytes", but the weights of model.hf_path = "%s" know the vocabulary of the tokenizer '
            'in that folder; tokenizer.name = "none" takes that one',
            hf_path,
        )


def _byte_tokenizer() -> Tokenizer:
    special = {"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258}
    encoding = tiktoken.Encoding(
        "bytes",
        # No merges exist, so the pattern decides only how much text one match takes: 60 M bytes/s
        # with 64 characters, 13 M with one.
        pat_str=r"[\s\S]{1,64}",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens=special,
    )
    names = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    return Tokenizer(encoding, 256, 257, 258, special, template_tokens=names)


def _from_json(path: Path, settings: dict[str, Any]) -> Tokenizer:
    # The vocabulary's own end-of-document token comes first: the eos_token of a chat model ends a turn.
    bpe = read_tokenizer_json(path)
    names = {key: _token_name(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token")}
    known = {key: name for key, name in names.items() if name in bpe.special}
    ends = [name for name in (*DOCUMENT_ENDS, known.get("eos_token")) if name in bpe.special]
    if not ends:
        raise TokenizerError(
            f"{path}: no token ends a document: none of {', '.join(DOCUMENT_ENDS)}, and no eos_token in "
            f"{path.parent / 'tokenizer_config.json'}"
        )
    bos = known.get("bos_token") if bpe.adds_bos or settings.get("add_bos_token") else None
    paddings = [known.get("pad_token"), *(name for name in bpe.special if "pad" in name)]
    unused = [name for name in paddings if name and name not in (ends[0], bos)]
    return Tokenizer(
        bpe.encoding,
        bos_id=bpe.special[bos] if bos else None,
        eos_id=bpe.special[ends[0]],
        pad_id=bpe.special[(unused or ends)[0]],
        special=bpe.special,
        in_text=bpe.in_text,
        nfc=bpe.nfc,
        missing=bpe.missing,
        template_tokens=known,
    )


def _token_name(value: Any) -> str:
    """Return the name of a token, which older files give as an object with its `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _from_tiktoken_file(path: Path) -> Tokenizer:
    known, encoding = read_tiktoken_file(path)
    ids, in_text = known.ids(), known.in_text()
    names = {"bos_token": known.bos, "eos_token": known.end_of_turn}
    return Tokenizer(
        encoding,
        bos_id=ids[known.bos] if known.bos else None,
        eos_id=ids[known.eos],
        pad_id=ids[known.pad],
        special={name: number for name, number in ids.items() if name not in in_text},
        in_text=in_text,
        nfc=known.nfc,
        template_tokens={key: name for key, name in names.items() if name},
    )


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    for name in FILES:
        if (path / name).is_file():
            return path / name
    found = sorted(entry.name for entry in path.glob("*token*"))
    raise TokenizerError(
        f"no {', '.join(FILES[:-2])} or {FILES[-2]} in {path} (there: {', '.join(found) or 'nothing'}); {SUPPORTED}"
    )


# Normalisation form C by the tables of Unicode 9, which the package tokenizers uses.
#
# Python's tables are newer. They know marks that Unicode 9 does not, and move them past other marks. Released models
# were trained on text in which those marks stayed in place.

# Combining marks from Unicode 10 on, and letters with new compositions: in Unicode 9 none of them combines. The list
# comes from asking the package about each mark in the tables of the package regex 2026.11.15 (newer than Unicode 16).
NEWER = re.compile(
    "(["
    "\u05c8\u05c9\u07fd\u0897-\u089f\u08ca-\u08d3\u09fe\u0c3c\u0d3b\u0d3c\u0eba\u0ece\u1715\u1abf-\u1af0\u1df6-\u1dfa\ua82c"
    "\U000105c9\U000105d2\U000105da\U000105e4"
    "\U00010d24-\U00010d27\U00010d69-\U00010d6d\U00010eab\U00010eac\U00010ecb-\U00010eff\U00010f46-\U00010f50"
    "\U00010f82-\U00010f85\U00011070\U0001133b\U00011380-\U000113ff\U0001145e\U00011839\U0001183a\U00011930"
    "\U0001193d\U0001193e\U00011943\U000119e0\U00011a34\U00011a47\U00011a99\U00011d42\U00011d44\U00011d45\U00011d97"
    "\U00011f41\U00011f42\U00016100-\U0001613f\U00016d40-\U00016d7f\U00016ff0\U00016ff1"
    "\U0001d127\U0001d128\U0001d250-\U0001d281\U0001e08f\U0001e130-\U0001e136"
    "\U0001e2ae\U0001e2ec-\U0001e2ef\U0001e4ec-\U0001e4ef\U0001e5ee\U0001e5ef\U0001e6e3-\U0001e6f5"
    "])"
)


def nfc(text: str) -> str:
    """Return `text` normalised to form C of Unicode 9."""
    # Text that newer tables leave unchanged is normalised for Unicode 9 too, which combines less.
    if unicodedata.is_normalized("NFC", text):
        return text
    parts = NEWER.split(text)  # newer marks are at the odd indices
    return "".join(
        part if index % 2 else unicodedata.normalize("NFC", part) for index, part in enumerate(parts)
    )
