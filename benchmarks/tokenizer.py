"""Speed of encoding beside the package tokenizers, with each family's pattern, on one thread.

    python benchmarks/tokenizer.py

Trains a vocabulary of 32 000 tokens for each family on the standard library, checks that both give the same tokens of it,
and prints JSON: million characters per second, the better of three alternating runs each, and the ratio.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from torchround.config import TokenizerTable
from torchround.data import Tokenizer, build_tokenizer
from torchround.data.text.tiktoken_file import LLAMA3, QWEN

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {"llama3": LLAMA3.pattern, "qwen3": QWEN.pattern, "gpt_oss": GPT_OSS_PATTERN}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--vocab-size", type=int, default=32_000)
    options = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    figures = {}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            reference = train(family, options.vocab_size, paths, Path(folder))
            ours = build_tokenizer(TokenizerTable(path=folder))
        figures[family] = speeds(ours, reference, [path.read_text() for path in paths])
    print(json.dumps(figures, indent=2))


def train(family: str, vocab_size: int, paths: list[Path], folder: Path) -> Any:
    """The package's tokenizer with the family's pattern, written to the folder as a release has it."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[family]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if family == "qwen3":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(
        [str(path) for path in paths],
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens(["<|endoftext|>"])
    if family == "qwen3":
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN.in_text()])
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def speeds(ours: Tokenizer, reference: Any, texts: list[str]) -> dict[str, float]:
    """Million characters per second, taking turns, so that a noisy machine disturbs both alike."""
    for text in texts:
        assert ours.encode(text) == reference.encode(text).ids, f"other tokens of {text[:50]!r}"
    ways: dict[str, Callable[[str], object]] = {
        "torchround": ours.encode_array,
        "tokenizers": reference.encode,
    }
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(3):
        for way, encode in ways.items():
            begun_s = time.perf_counter()
            for text in texts:
                encode(text)
            seconds[way] = min(seconds[way], time.perf_counter() - begun_s)
    speed = {way: round(sum(map(len, texts)) / seconds[way] / 1e6, 2) for way in ways}
    return speed | {"ratio": round(seconds["tokenizers"] / seconds["torchround"], 2)}


if __name__ == "__main__":
    main()
