"""Reads tiktoken files, Llama 3's `tokenizer.model` and `qwen.tiktoken`: each line has a token in base64 and its rank.

The file holds neither the pattern that splits text nor the special tokens. The number of ranks tells which vocabulary
it is, and so which pattern and special tokens belong to it.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from torchround.data.errors import TokenizerError
from torchround.untrusted.data_limits import check_token_ids


def _pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class TiktokenVocabulary:
    """Everything about a vocabulary that its file of `num_ranks` ranks does not hold.

    The ids of `added` follow the ranks. Added tokens from index `first_in_text` on are recognised in any text. `bos`
    is None if documents begin without a token of their own.
    """

    name: str
    num_ranks: int
    pattern: str
    added: tuple[str, ...]
    first_in_text: int
    bos: str | None
    eos: str
    pad: str
    end_of_turn: str
    nfc: bool

    def ids(self) -> dict[str, int]:
        """Return the ids of all added tokens."""
        return {name: self.num_ranks + index for index, name in enumerate(self.added)}

    def in_text(self) -> dict[str, int]:
        """Return the ids of the added tokens that are recognised in any text."""
        return {
            name: self.num_ranks + index
            for index, name in enumerate(self.added)
            if index >= self.first_in_text
        }


LLAMA3 = TiktokenVocabulary(
    name="llama3",
    num_ranks=128_000,
    pattern=_pattern(r"\p{N}{1,3}"),
    added=(
        *("<|begin_of_text|>", "<|end_of_text|>"),
        *("<|reserved_special_token_0|>", "<|reserved_special_token_1|>"),
        *("<|finetune_right_pad_id|>", "<|reserved_special_token_2|>"),
        *("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
        *(f"<|reserved_special_token_{number}|>" for number in range(3, 248)),
    ),
    first_in_text=256,
    bos="<|begin_of_text|>",
    eos="<|end_of_text|>",
    pad="<|finetune_right_pad_id|>",
    end_of_turn="<|eot_id|>",
    nfc=False,
)
# The file came with Qwen 1. Qwen3 has the same ranks; the added tokens are Qwen3's, the first three also Qwen 1's.
QWEN = TiktokenVocabulary(
    name="qwen3",
    num_ranks=151_643,
    pattern=_pattern(r"\p{N}"),
    added=(
        *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
        *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>"),
        *("<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
        *("<tool_call>", "</tool_call>"),
        *(
            "<|fim_prefix|>",
            "<|fim_middle|>",
            "<|fim_suffix|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>",
        ),
        *("<tool_response>", "</tool_response>", "<think>", "</think>"),
    ),
    first_in_text=14,
    bos=None,
    eos="<|endoftext|>",
    pad="<|vision_pad|>",
    end_of_turn="<|im_end|>",
    nfc=True,
)


def read_tiktoken_file(path: Path) -> tuple[TiktokenVocabulary, tiktoken.Encoding]:
    """Read a tiktoken file. Raises `TokenizerError` if it is damaged, or its number of ranks is not a known one."""
    ranks = _read_ranks(path)
    for known in (LLAMA3, QWEN):
        if len(ranks) == known.num_ranks:
            return known, tiktoken.Encoding(
                known.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=known.ids()
            )
    raise TokenizerError(
        f"{path}: {len(ranks)} ranks, not the {LLAMA3.num_ranks} of Llama 3 or the {QWEN.num_ranks} of Qwen; its "
        "pattern and special tokens are not known"
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    # Not through tiktoken's own loader: it caches by path, which would hide that a file was replaced.
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        pairs = [line.split() for line in lines if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
        check_token_ids(list(ranks.values()))
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path}: not a tiktoken rank file ({error})") from error
    return ranks
