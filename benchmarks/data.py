"""How fast data comes: encoding text, file to batch, and the share of a step that waits; and what reading holds in memory."""

import argparse
import gzip
import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.frame import ROOT, Benchmark, Report, in_fresh_process, in_turns, resident_bytes, timed
from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Tokenizer, build_loader, build_tokenizer, num_tokens
from torchround.planning.cards import find_device

MIB = 2**20
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


def standard_library() -> list[Path]:
    """Return the files of Python's standard library: text that is on every machine."""
    return sorted(Path(os.__file__).parent.glob("*.py"))


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
    tokenizer.train(
        [str(path) for path in standard_library()],
        trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False),
    )
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    if family == "qwen3":
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in QWEN_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return tokenizer


# Encoding.


def tokenizer_options(parser: argparse.ArgumentParser) -> None:
    """Add the vocabularies and the amount of text."""
    parser.add_argument("--families", nargs="+", choices=PATTERNS, default=list(PATTERNS))
    parser.add_argument("--vocab-size", type=int, default=32_000, help="tokens of the trained vocabularies")
    parser.add_argument("--files", type=int, help="files of the standard library to encode (default: all)")
    parser.add_argument("--turns", type=int, default=3, help="turns, of which the fastest counts")


def tokenizer_speeds(options: argparse.Namespace) -> Report:
    """Measure million characters per second on one thread, for each family's pattern."""
    texts = [path.read_text(encoding="utf-8") for path in standard_library()[: options.files]]
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
    speed = {name: round(characters / min(times) / 1e6, 2) for name, times in seconds.items()}
    return speed | {"ratio": round(min(seconds["tokenizers"]) / min(seconds["torchround"]), 2)}


def tokenizer_headline(figures: Report) -> tuple[str, str]:
    """Name the speeds with each pattern."""
    found = figures["million_characters_per_s"]
    ours = ", ".join(f"{family} {speeds['torchround']:.1f}" for family, speeds in found.items())
    theirs = ", ".join(
        f"{speeds['tokenizers']:.2f} ({speeds['ratio']:.1f} times)" for speeds in found.values()
    )
    return f"{ours} M characters/s", f"tokenizers: {theirs}"


TOKENIZER = Benchmark(
    """Speed of encoding beside the package tokenizers, with each family's pattern, on one thread.

Trains a vocabulary for each family on Python's standard library and checks that both give the same tokens.""",
    tokenizer_options,
    tokenizer_speeds,
    tokenizer_headline,
    "--families llama3 --vocab-size 400 --files 3 --turns 1",
)


# From file to batch.


def loader_options(parser: argparse.ArgumentParser) -> None:
    """Add the time and the workers."""
    parser.add_argument("--workers", type=int, default=0, help="data.num_workers")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each kind of source")
    parser.add_argument("--vocab-size", type=int, default=32_000, help="tokens of the trained vocabulary")


def loader_speeds(options: argparse.Namespace) -> Report:
    """Measure tokens per second of loaders from file to batch, and compare with the most that a card can take."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_vocabulary("llama3", options.vocab_size, folder)
        tokenizer = build_tokenizer(TokenizerTable(path=str(folder)))
        texts = [path.read_text(encoding="utf-8") for path in standard_library()]
        chats = write_chats(folder / "chats.jsonl", texts)
        sources = {
            "python-stdlib, end to end": SourceTable(path="python-stdlib"),
            "conversations, whole": SourceTable(path=str(chats), content="messages"),
        }
        speeds = {
            title: loader_speed(source, tokenizer, options.workers, options.seconds)
            for title, source in sources.items()
        }
    most = most_tokens_per_s()
    return {
        "tokens_per_s": speeds,
        "most_that_the_card_takes": round(most),
        "times_that": {title: round(speed / most, 1) for title, speed in speeds.items()},
        "workers": options.workers,
    }


def most_tokens_per_s() -> float:
    """Return a bound on Llama-3.2-1B's speed on one RTX 4090: 6 FLOPs a parameter and token at the card's bf16 peak.

    Attention, recomputation, transfers and the optimizer are left out; all of them make a step slower.
    """
    card = find_device("rtx4090")
    peak = card and card.flops_per_s("bfloat16")
    assert peak is not None, "the table of cards has the RTX 4090"
    return peak / (6 * LLAMA_3_2_1B_PARAMETERS)


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
    tokens, begun_s = 0, time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        tokens += num_tokens(next(loader), tokenizer.pad_id)
        loader.state_dict()
    took_s = time.perf_counter() - begun_s
    loader.close()
    return tokens / took_s


LOADER = Benchmark(
    """Tokens per second from file to batch, beside the most that Llama-3.2-1B can take on one RTX 4090.

Reads text end to end and conversations packed whole, with a vocabulary trained on the standard library.""",
    loader_options,
    loader_speeds,
    lambda figures: (
        ", ".join(
            f"{title}: {speed / 1e6:.2f} M tokens/s" for title, speed in figures["tokens_per_s"].items()
        ),
        f"{figures['most_that_the_card_takes']} tokens/s, the card's bound: {list(figures['times_that'].values())} times",
    ),
    "--seconds 0.1 --vocab-size 400",
)


# Waiting.


def wait_options(parser: argparse.ArgumentParser) -> None:
    """Add the length of the runs."""
    parser.add_argument("--steps", type=int, default=40, help="steps of each run")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1], help="data.num_workers of each run")


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
    wait_options,
    waiting_shares,
    lambda figures: (
        ", ".join(f"{name}: {100 * found['waiting_share']:.2f} %" for name, found in figures.items()),
        f"bound: {100 * MOST_WAITING_SHARE:g} %",
    ),
    "--steps 3 --workers 0",
    lambda figures: [
        f"{name} wait {100 * found['waiting_share']:.2f} % of a step"
        for name, found in figures.items()
        if found["waiting_share"] > MOST_WAITING_SHARE
    ],
)


# Memory.


def memory_options(parser: argparse.ArgumentParser) -> None:
    """Add the amount of data and the kinds of files."""
    parser.add_argument("--documents", type=int, default=10_000_000, help="documents of about 100 bytes")
    kinds = ["jsonl", "jsonl.gz", "jsonl.zst", "parquet"]
    parser.add_argument("--kinds", nargs="+", choices=kinds, default=kinds, help="kinds of file")
    parser.add_argument("--workers", type=int, default=0, help="data.num_workers")


def memory_by_kind(options: argparse.Namespace) -> Report:
    """Measure each kind of file in a process of its own."""
    found: Report = {"documents": options.documents}
    with tempfile.TemporaryDirectory() as folder:
        for kind in options.kinds:
            path = Path(folder) / f"x.{kind}"
            write_records(path, options.documents)
            found[kind] = in_fresh_process(
                memory_while_reading, str(path), options.documents, options.workers
            )
            path.unlink()
    return found


def write_records(path: Path, documents: int) -> None:
    """Write records of about 100 bytes, in the format and compression that the file's name asks for."""
    records = (
        b'{"text": "document %d of many, with a few words in it, as it is %d"}\n' % (n, n * 7919)
        for n in range(documents)
    )
    if path.suffix == ".parquet":
        write_parquet(path, records)
        return
    with open_for_bytes(path) as file:
        while block := b"".join(islice(records, 10_000)):
            file.write(block)


def open_for_bytes(path: Path) -> Any:
    """Open a file to write bytes to, compressed as its name says."""
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "wb")
    return gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb")


def write_parquet(path: Path, records: Iterator[bytes]) -> None:
    """Write row groups of 100 000 rows."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("text", pyarrow.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        while rows := [json.loads(line) for line in islice(records, 100_000)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def memory_while_reading(path: str, documents: int, workers: int) -> Report:
    """Measure resident MiB beyond what the imports take, after the first batch and at each tenth of the documents."""
    if path.endswith(".parquet"):
        importlib.import_module("pyarrow.parquet")  # 30 MiB that hold no documents
    data = DataTable(sources=(SourceTable(path=path),), epochs=1, num_workers=workers, shuffle_sequences=0)
    before = resident_bytes()
    begun_s = time.perf_counter()
    loader = build_loader(data, build_tokenizer(TokenizerTable(name="bytes")), SEQ_LEN, 16, 0)
    seen: list[int] = []
    for _ in loader:
        drawn = loader.state_dict()["position"]["reader"]["sources"][0]["drawn"]
        if drawn * 10 >= documents * max(1, len(seen)) or not seen:
            seen.append(round((resident_bytes() - before) / MIB))
    seconds = time.perf_counter() - begun_s
    return {"mib_by_tenth": seen, "documents_per_s": round(documents / seconds)}


MEMORY = Benchmark(
    """Resident memory at each tenth of many documents, by kind of file.

Each kind is read in a process of its own; what its imports hold is not counted. Growth after the first tenths would
mean that documents are kept.""",
    memory_options,
    memory_by_kind,
    lambda figures: (
        ", ".join(
            f"{kind}: {found['mib_by_tenth'][0]} to {max(found['mib_by_tenth'])} MiB"
            for kind, found in figures.items()
            if kind != "documents"
        ),
        f"{figures['documents']} documents",
    ),
    "--documents 2000 --kinds jsonl",
)
