"""Text to token ids and back, through tiktoken.

`bytes` has one token per UTF-8 byte and needs no file. A byte-level BPE `tokenizer.json` is read in
`tokenizer_json.py`. Llama 3's `tokenizer.model` is a tiktoken rank file (each line a token in base64 and its rank);
the pattern and the special tokens that go with it are known here.
"""

import base64
import binascii
import json
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

from torchround.config import TokenizerTable
from torchround.data.documents import Ids
from torchround.data.errors import TokenizerError
from torchround.data.tokenizer_json import read_tokenizer_json

SUPPORTED = 'supported: name = "bytes", a byte-level BPE tokenizer.json, and Llama 3\'s tokenizer.model (a tiktoken rank file)'
DOCUMENT_ENDS = ("<|end_of_text|>", "<|endoftext|>")


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken encoding and the ids that documents are framed and padded with.

    `bos_id` is `None` where documents begin with no token of their own. `in_text`: added tokens that are no special
    ones, so that they are recognised in any text (`<think>`). `nfc`: text is normalised first. `chat_template`:
    Jinja source, where there is one; `template_tokens`: names that it may ask for, such as `bos_token`.
    """

    encoding: tiktoken.Encoding
    bos_id: int | None
    eos_id: int
    pad_id: int
    special: dict[str, int] = field(default_factory=dict)
    in_text: dict[str, int] = field(default_factory=dict)
    nfc: bool = False
    chat_template: str | None = None
    template_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the encoding; a saved data position is only good for the same one."""
        return self.encoding.name

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, special tokens included; the model's vocabulary must be at least this."""
        return self.encoding.n_vocab

    def special_id(self, name: str) -> int:
        """Id of a special token."""
        return self.special[name]

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone. Text that looks like a special token is encoded as text."""
        ids: list[int] = self.encode_array(text).tolist()
        return ids

    def encode_array(self, text: str) -> Ids:
        """`encode` as an array `[n]`, without a Python object per token (twice as fast for `bytes`)."""
        if self._in_text is None:
            return self._encode_plain(text)
        parts = self._in_text.split(text)
        if len(parts) == 1:
            return self._encode_plain(text)
        return np.concatenate(
            [
                np.array([self.in_text[part]], dtype=np.int64) if index % 2 else self._encode_plain(part)
                for index, part in enumerate(parts)
            ]
        )

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`: special tokens by name, bytes that are no UTF-8 as U+FFFD."""
        return self.encoding.decode(list(ids))

    def _encode_plain(self, text: str) -> Ids:
        if self.nfc:
            text = unicodedata.normalize("NFC", text)
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate, legal in JSON; this replaces it with U+FFFD
            return np.array(self.encoding.encode_ordinary(text), dtype=np.int64)
        return ids.astype(np.int64)

    @cached_property
    def _in_text(self) -> re.Pattern[str] | None:
        """The longest of the added tokens that begin at a place."""
        longest_first = sorted(self.in_text, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None


def build_tokenizer(table: TokenizerTable, hf_path: str | Path | None = None) -> Tokenizer:
    """The tokenizer that the table names; `hf_path` (the model's folder) where it names none.

    Raises `TokenizerError` where there is none, or none that is supported.
    """
    if table.name == "bytes":
        tokenizer, folder = _byte_tokenizer(), None
    else:
        path = table.path or hf_path
        if path is None:
            raise TokenizerError(
                f"no tokenizer: give tokenizer.path, tokenizer.name or model.hf_path; {SUPPORTED}"
            )
        file = _find_file(Path(os.path.expanduser(path)))
        folder = file.parent.parent if file.parent.name == "original" else file.parent
        settings = _read_settings(folder / "tokenizer_config.json")
        tokenizer = _from_json(file, settings) if file.suffix == ".json" else _llama3_tokenizer(file)
    return replace(tokenizer, chat_template=_chat_template(table, folder))


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
    """A document ends with the token that the vocabulary has for it; that of chats ends a turn."""
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
        template_tokens=known,
    )


def _token_name(value: Any) -> str:
    """Older files say a token as an object with its `content`."""
    found = value.get("content") if isinstance(value, dict) else value
    return found if isinstance(found, str) else ""


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise TokenizerError(f"{path}: a JSON {type(settings).__name__}, not an object")
    return settings


def _chat_template(table: TokenizerTable, folder: Path | None) -> str | None:
    if table.chat_template is not None:
        return _read_template(Path(os.path.expanduser(table.chat_template)))
    if folder is None:
        return None
    if (folder / "chat_template.jinja").is_file():
        return _read_template(folder / "chat_template.jinja")
    template = _read_settings(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry.get("name"): entry.get("template") for entry in template}.get("default")
    return template if isinstance(template, str) else None


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"chat template {path}: cannot be read: {error}") from error


LLAMA3_NUM_RANKS = 128_000
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
)


def _llama3_tokenizer(path: Path) -> Tokenizer:
    ranks = _read_rank_file(path)
    if len(ranks) != LLAMA3_NUM_RANKS:
        raise TokenizerError(
            f"{path}: {len(ranks)} ranks, not the {LLAMA3_NUM_RANKS} of Llama 3; which pattern and special "
            f"tokens belong to it is not known; {SUPPORTED}"
        )
    special = {name: LLAMA3_NUM_RANKS + index for index, name in enumerate(LLAMA3_SPECIAL_TOKENS)}
    return Tokenizer(
        tiktoken.Encoding("llama3", pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special),
        bos_id=special["<|begin_of_text|>"],
        eos_id=special["<|end_of_text|>"],
        pad_id=special["<|finetune_right_pad_id|>"],
        special=special,
        template_tokens={"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
    )


def _find_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise TokenizerError(f"tokenizer path {path} does not exist")
    for name in ("tokenizer.json", "tokenizer.model", "original/tokenizer.model"):
        if (path / name).is_file():
            return path / name
    found = sorted(entry.name for entry in path.glob("*token*"))
    raise TokenizerError(
        f"no tokenizer.json or tokenizer.model in {path} (there: {', '.join(found) or 'nothing'}); {SUPPORTED}"
    )


def _read_rank_file(path: Path) -> dict[bytes, int]:
    """tiktoken's own loader keeps a copy by path in a cache, which would hide a file that was replaced."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        pairs = [line.split() for line in lines if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path}: not a tiktoken rank file ({error}); {SUPPORTED}") from error
