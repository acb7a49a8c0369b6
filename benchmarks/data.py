"""How fast data comes: file to batch, and the share of a step that waits."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from benchmarks.frame import ROOT, Benchmark, Option, Report
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Loader, Tokenizer, build_tokenizer, num_tokens
from torchround.planning.cards import find_device

SEQ_LEN = 2048
LLAMA_3_2_1B_PARAMETERS = 1_235_814_400  # as released, the tied embedding counted once
MOST_WAITING_SHARE = 0.01

LLAMA_3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def standard_library() -> list[str]:
    """Read files of Python's standard library: text that is on every machine."""
    return [path.read_text(encoding="utf-8") for path in sorted(Path(os.__file__).parent.glob("*.py"))]


def train_vocabulary(vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE with Llama 3's pattern on the standard library, and write it as a release has it."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(LLAMA_3_PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(standard_library(), trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


# From file to batch.


def loader_speeds(options: argparse.Namespace) -> Report:
    """Measure tokens per second of loaders from file to batch, and compare with the most that a card can take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_vocabulary(options.vocab_size, folder)
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
    loader = Loader(data, tokenizer, SEQ_LEN, 16, 0)
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
