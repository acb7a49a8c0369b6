"""tiktoken rank files: each line a token in base64 and its rank. Llama 3's `tokenizer.model` and `qwen.tiktoken`.

The file holds neither the pattern that text is split by nor the special tokens. Which ones belong to it is known by its
number of ranks.
"""

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

import tiktoken

from torchround.data.errors import TokenizerError


def _pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


@dataclass(frozen=True)
class TiktokenVocabulary:
    """What belongs to a rank file of `num_ranks`. Ids of `added` follow the ranks; from `first_in_text` on they are
    recognised in any text. `bos` is None where documents begin with no token of their own."""

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
        """All added tokens."""
        return {name: self.num_ranks + index for index, name in enumerate(self.added)}

    def in_text(self) -> dict[str, int]:
        """Those that are recognised in any text."""
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
# The file came with Qwen 1; added tokens are those of Qwen3, whose ranks are the same. The first three are in both.
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
    """Raises `TokenizerError` where the file is damaged, or has a number of ranks that nothing is known for."""
    ranks = _read_ranks(path)
    for known in (LLAMA3, QWEN):
        if len(ranks) == known.num_ranks:
            return known, tiktoken.Encoding(
                known.name, pat_str=known.pattern, mergeable_ranks=ranks, special_tokens=known.ids()
            )
    raise TokenizerError(
        f"{path}: {len(ranks)} ranks, not the {LLAMA3.num_ranks} of Llama 3 or the {QWEN.num_ranks} of Qwen; which "
        "pattern and special tokens belong to it is not known"
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    """tiktoken's own loader keeps a copy by path in a cache, which would hide a file that was replaced."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        pairs = [line.split() for line in lines if line]
        return {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error) as error:
        raise TokenizerError(f"{path}: not a tiktoken rank file ({error})") from error
