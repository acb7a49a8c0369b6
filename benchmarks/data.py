"""How fast data comes: encoding text, file to batch, and the share of a step that waits."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.frame import ROOT, Benchmark, Option, Report, in_turns, timed
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Tokenizer, build_loader, build_tokenizer, num_tokens
from torchround.planning.cards import find_device

SEQ_LEN = 2048
LLAMA_3_2_1B_PARAMETERS = 1_235_814_400  # as released, the tied embedding counted once
MOST_WAITING_SHARE = 0.01

UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
GPT_OSS_PATTERN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{ENDING}|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{ENDING}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
USUAL_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama3": USUAL_PATTERN.replace("DIGITS", r"\p{N}{1,3}"),
    "qwen3": USUAL_PATTERN.replace("DIGITS", r"\p{N}"),
    "gpt_oss": GPT_OSS_PATTERN,
}
QWEN_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def standard_library(files: int | None = None) -> list[str]:
    """Read files of Python's standard library: text that is on every machine."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))
    return [path.read_text(encoding="utf-8") for path in paths[:files]]


def train_vocabulary(family: str, vocab_size: int, folder: Path) -> Any:
    """Train a byte-level BPE with the family's pattern on the standard library, and write it as a release has it.

    Returns the tokenizer of the package tokenizers.
    """
    from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

    # Each process of the package would otherwise use all cores, and ours one.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERNS[family]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    if family == "qwen3":
        tokenizer.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(standard_library(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if family == "qwen3":
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tokenizer


# Encoding.


def tokenizer_speeds(options: argparse.Namespace) -> Report:
    """Measure million characters per second on one thread, for each family's pattern."""
    texts = standard_library(options.files)
    figures: Report = {}
    for family in options.families:
        with tempfile.TemporaryDirectory() as folder:
            reference = train_vocabulary(family, options.vocab_size, Path(folder))
            ours = build_tokenizer(TokenizerTable(path=folder))
        # The speed of other tokens would say nothing.
        for text in texts:
            assert ours.encode(text) == reference.encode(text).ids, f"other tokens of {text[:50]!r}"
        figures[family] = encoding_speeds(ours, reference, texts, options.turns)
    return {"million_characters_per_s": figures}


def encoding_speeds(ours: Tokenizer, reference: Any, texts: list[str], turns: int) -> dict[str, float]:
    """Encode the texts with both in turns; the fastest turn of each counts."""

    def encode_all(encode: Callable[[str], object]) -> float:
        return timed(lambda: [encode(text) for text in texts])

    seconds = in_turns(
        {
            "torchround": lambda: encode_all(ours.encode_array),
            "tokenizers": lambda: encode_all(reference.encode),
        },
        turns,
    )
    characters = sum(map(len, texts))
    return {name: characters / min(times) / 1e6 for name, times in seconds.items()}


def tokenizer_headline(figures: Report) -> tuple[str, str]:
    """Name the speeds with each pattern."""
    found = figures["million_characters_per_s"]
    ours, theirs = (
        ", ".join(f"{family} {speeds[side]:.2f}" for family, speeds in found.items())
        for side in ("torchround", "tokenizers")
    )
    return f"{ours} M characters/s", f"tokenizers: {theirs}"


TOKENIZER = Benchmark(
    """Speed of encoding beside the package tokenizers, with each family's pattern, on one thread.

Trains a vocabulary for each family on Python's standard library and checks that both give the same tokens.""",
    {
        "--families": Option(list(PATTERNS), "families", list(PATTERNS)),
        "--vocab-size": Option(32_000, "tokens of the trained vocabularies"),
        "--files": Option(None, "files of the standard library to encode (default: all)", type=int),
        "--turns": Option(3, "turns, of which the fastest counts"),
    },
    tokenizer_speeds,
    tokenizer_headline,
    "--families llama3 --vocab-size 400 --files 3 --turns 1",
)


# From file to batch.


def loader_speeds(options: argparse.Namespace) -> Report:
    """Measure tokens per second of loaders from file to batch, and compare with the most that a card can take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_vocabulary("llama3", options.vocab_size, folder)
        tokenizer = build_tokenizer(TokenizerTable(path=str(folder)))
        chats = write_chats(folder / "chats.jsonl", standard_library())
        sources = {
            "python-stdlib, end to end": SourceTable(path="python-stdlib"),
            "conversations, whole": SourceTable(path=str(chats), content="messages"),
        }
        speeds = {
            title: loader_speed(source, tokenizer, options.workers, options.seconds)
            for title, source in sources.items()
        }
    # 6 FLOPs a parameter and token at the card's bf16 peak. Attention, recomputation, transfers and the optimizer are left
    # out; all of them make a step slower.
    card = find_device("rtx4090")
    peak = card and card.flops_per_s("bfloat16")
    assert peak is not None, "the table of cards has the RTX 4090"
    return {"tokens_per_s": speeds, "most_that_the_card_takes": round(peak / (6 * LLAMA_3_2_1B_PARAMETERS))}


def write_chats(path: Path, texts: list[str]) -> Path:
    """Write conversations of two turns out of real text, with 100 to 3000 characters in a message."""
    joined = "".join(texts)
    with path.open("w", encoding="utf-8") as file:
        start = 0
        for number in range(4000):
            messages = []
            for role in ("user", "assistant") * 2:
                # Knuth's multiplier scatters the lengths; a question is a quarter as long as an answer.
                length = 100 + number * 2654435761 % 2900 // (1 + (role == "user") * 3)
                start = (start + length) % (len(joined) - 4000)
                messages.append({"role": role, "content": joined[start : start + length]})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def loader_speed(source: SourceTable, tokenizer: Tokenizer, workers: int, seconds: float) -> float:
    """Measure tokens per second after the first batch. The saved position is taken each time, as in a run."""
    data = DataTable(sources=(source,), num_workers=workers)
    loader = build_loader(data, tokenizer, SEQ_LEN, 16, 0)
    next(loader)
    tokens, start_s = 0, time.perf_counter()
    while time.perf_counter() - start_s < seconds:
        tokens += num_tokens(next(loader), tokenizer.pad_id)
        loader.state_dict()
    took_s = time.perf_counter() - start_s
    loader.close()
    return tokens / took_s


LOADER = Benchmark(
    """Tokens per second from file to batch, beside the most that Llama-3.2-1B can take on one RTX 4090.

Reads text end to end and conversations packed whole, with a vocabulary trained on the standard library.""",
    {
        "--workers": Option(0, "data.num_workers"),
        "--seconds": Option(5.0, "time for each kind of source"),
        "--vocab-size": Option(32_000, "tokens of the trained vocabulary"),
    },
    loader_speeds,
    lambda figures: (
        ", ".join(f"{title}: {speed:.3g} tokens/s" for title, speed in figures["tokens_per_s"].items()),
        f"the card's bound: {figures['most_that_the_card_takes']} tokens/s",
    ),
    "--seconds 0.1 --vocab-size 400",
)


# Waiting.


def waiting_shares(options: argparse.Namespace) -> Report:
    """Train debug.toml with each number of workers."""
    return {f"{workers} workers": waiting_share(options.steps, workers) for workers in options.workers}


def waiting_share(steps: int, workers: int) -> dict[str, float]:
    """Measure seconds of a step and of waiting for data, means without the first two steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--config", str(ROOT / "configs" / "debug.toml")]
        command += [
            f"--training.steps={steps}",
            "--lr_schedule.warmup_steps=1",
            f"--run.folder={folder}",
            "--run.name=run",
            f"--data.num_workers={workers}",
            "--checkpoint.interval_steps=0",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    measured = [json.loads(line) for line in lines[2:]]
    step_s, data_s = (sum(step[key] for step in measured) / len(measured) for key in ("step_s", "data_s"))
    return {"step_s": step_s, "waiting_s": data_s, "waiting_share": data_s / step_s}


WAIT = Benchmark(
    """Share of a step of debug.toml that waits for data, without workers and with one.

Real computation on the CPU. --check asks for at most 1 %.""",
    {
        "--steps": Option(40, "steps of each run"),
        "--workers": Option([0, 1], "data.num_workers of each run"),
    },
    waiting_shares,
    lambda figures: (
        ", ".join(f"{name}: {found['waiting_share']:.2%}" for name, found in figures.items()),
        f"bound: {MOST_WAITING_SHARE:.0%}",
    ),
    "--steps 3 --workers 0",
    lambda figures: [
        f"{name} wait {found['waiting_share']:.2%} of a step"
        for name, found in figures.items()
        if found["waiting_share"] > MOST_WAITING_SHARE
    ],
)
