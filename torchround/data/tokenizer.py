"""Text to token ids and back, through tiktoken.

`bytes` has one token per UTF-8 byte and needs no file. Llama 3's `tokenizer.model` is a tiktoken rank file
(each line a token in base64 and its rank); the pattern and the special tokens that go with it are known here.
Another kind of file is one more function that returns a `Tokenizer`.
"""

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tiktoken

from torchround.config import TokenizerTable
from torchround.data.errors import TokenizerError

SUPPORTED = 'supported: name = "bytes", and Llama 3\'s tokenizer.model (a tiktoken rank file)'


@dataclass(frozen=True)
class Tokenizer:
    """A tiktoken encoding and the ids that documents are framed and padded with.

    `bos_id` is `None` where the vocabulary has no token that begins a document.
    """

    encoding: tiktoken.Encoding
    bos_id: int | None
    eos_id: int
    pad_id: int

    @property
    def name(self) -> str:
        """Name of the encoding; a saved data position is only good for the same one."""
        return self.encoding.name

    @property
    def vocab_size(self) -> int:
        """Largest id + 1, special tokens included; the model's vocabulary must be at least this."""
        return self.encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        """Ids of `text` alone. Text that looks like a special token is encoded as text."""
        return self.encoding.encode_ordinary(text)

    def encode_array(self, text: str) -> npt.NDArray[np.int64]:
        """`encode` as an array `[n]`, without a Python object per token (twice as fast for `bytes`)."""
        try:
            ids = self.encoding.encode_to_numpy(text, disallowed_special=())
        except UnicodeEncodeError:  # a lone surrogate, legal in JSON; `encode` replaces it with U+FFFD
            return np.array(self.encode(text), dtype=np.int64)
        return ids.astype(np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`: special tokens by name, bytes that are no UTF-8 as U+FFFD."""
        return self.encoding.decode(list(ids))


def build_tokenizer(table: TokenizerTable, hf_path: str | Path | None = None) -> Tokenizer:
    """The tokenizer that the table names; `hf_path` (the model's folder) where it names none.

    Raises `TokenizerError` where there is none, or none that is supported.
    """
    if table.name == "bytes":
        return _byte_tokenizer()
    path = table.path or hf_path
    if path is None:
        raise TokenizerError(
            f"no tokenizer: give tokenizer.path, tokenizer.name or model.hf_path; {SUPPORTED}"
        )
    return _llama3_tokenizer(_find_rank_file(Path(path).expanduser()))


def _byte_tokenizer() -> Tokenizer:
    return Tokenizer(
        tiktoken.Encoding(
            "bytes",
            # No merges exist, so the pattern decides only how much text one match takes: 60 M bytes/s
            # with 64 characters, 13 M with one.
            pat_str=r"[\s\S]{1,64}",
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={"<|bos|>": 256, "<|eos|>": 257, "<|pad|>": 258},
        ),
        bos_id=256,
        eos_id=257,
        pad_id=258,
    )


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
    )


def _find_rank_file(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise TokenizerError(f"tokenizer path {path} does not exist")
    for name in ("tokenizer.model", "original/tokenizer.model"):
        if (path / name).is_file():
            return path / name
    found = sorted(entry.name for entry in path.glob("*token*"))
    raise TokenizerError(
        f"no tokenizer.model in {path} (there: {', '.join(found) or 'nothing'}); {SUPPORTED}"
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
