"""How fast data comes, and what it holds in memory.

    python benchmarks/data.py                         # tokens/s: tokenizer alone, and from file to batch
    python benchmarks/data.py --waiting                # share of debug.toml's steps that waits for data
    python benchmarks/data.py --documents 10000000    # memory while that many documents are read, by kind of file

Prints JSON. For tokens/s, a vocabulary is trained on the standard library with the package tokenizers, and what is
encoded with it is compared: a speed of other tokens would say nothing. One thread, unless `--workers` says otherwise.
"""

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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import psutil

from torchround.config import DataTable, SourceTable, TokenizerTable
from torchround.data import Tokenizer, build_loader, build_tokenizer, num_tokens
from torchround.pipeline.devices import find_device

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SEQ_LEN = 2048
LLAMA_3_2_1B_PARAMETERS = 1_235_814_400  # as released, the tied embedding counted once
MIB = 2**20


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description="Measure the data pipeline.")
    parser.add_argument("--documents", type=int, default=0, help="measure memory over this many documents")
    parser.add_argument(
        "--kinds",
        nargs="+",
        default=["jsonl", "jsonl.gz", "jsonl.zst", "parquet"],
        help="kinds of file for --documents (default: all four)",
    )
    parser.add_argument(
        "--waiting", action="store_true", help="train debug.toml, without workers and with one"
    )
    parser.add_argument("--workers", type=int, default=0, help="data.num_workers (default 0)")
    parser.add_argument("--seconds", type=float, default=5.0, help="time for each throughput (default 5)")
    parser.add_argument("--read", help="(used by the script itself) read one file and report memory")
    options = parser.parse_args()
    if options.read:
        print(json.dumps(memory_while_reading(options.read, options.documents, options.workers)))
    elif options.waiting:
        print(json.dumps({f"{workers} workers": waiting_share(workers) for workers in (0, 1)}, indent=2))
    elif options.documents:
        print(json.dumps(memory_by_kind(options.documents, options.kinds, options.workers), indent=2))
    else:
        print(json.dumps(throughput(options.workers, options.seconds), indent=2))


# Throughput.


def throughput(workers: int, seconds: float) -> dict[str, object]:
    """Tokens per second of the tokenizer beside the package tokenizers, and of loaders from file to batch."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference = train_vocabulary(folder)
        tokenizer = build_tokenizer(TokenizerTable(path=str(folder)))
        texts = [path.read_text() for path in sorted(Path(os.__file__).parent.glob("*.py"))]
        chats = write_chats(folder / "chats.jsonl", texts)
        sources = {
            "python-stdlib, end to end": SourceTable(path="python-stdlib"),
            "conversations, whole": SourceTable(path=str(chats), content="messages"),
        }
        figures = {
            title: loader_speed(source, tokenizer, workers, seconds) for title, source in sources.items()
        }
        return {
            "tokenizer": tokenizer_speeds(tokenizer, reference, texts),
            "file to batch, tokens/s": figures,
            "the most that the card takes, tokens/s": round(most_tokens_per_s()),
            "times that": {
                title: round(figure / most_tokens_per_s(), 1) for title, figure in figures.items()
            },
            "workers": workers,
        }


def most_tokens_per_s() -> float:
    """No step of Llama-3.2-1B on one RTX 4090 can be faster: 6 FLOPs a parameter and token at the card's bf16 peak.

    Attention, recomputation, transfers and the optimizer are left out; all of them make a step slower.
    """
    card = find_device("rtx4090")
    assert card is not None, "the table of cards has the RTX 4090"
    return card.flops_per_s("bfloat16") / (6 * LLAMA_3_2_1B_PARAMETERS)


def train_vocabulary(folder: Path) -> "object":
    """A byte-level BPE of 32 000 tokens with Llama 3's pattern, on disk as released models have it."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(path) for path in sorted(Path(os.__file__).parent.glob("*.py"))], trainer)
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return tokenizer


def write_chats(path: Path, texts: list[str]) -> Path:
    """Conversations of two turns out of real text, 100 to 3000 characters a message."""
    joined = "".join(texts)
    with path.open("w") as file:
        place = 0
        for number in range(4000):
            messages = []
            for role in ("user", "assistant") * 2:
                length = 100 + number * 2654435761 % 2900 // (1 + (role == "user") * 3)
                place = (place + length) % (len(joined) - 4000)
                messages.append({"role": role, "content": joined[place : place + length]})
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def tokenizer_speeds(tokenizer: Tokenizer, reference: "object", texts: list[str]) -> dict[str, float]:
    """Million characters per second on one thread, the better of three alternating runs each."""
    assert all(tokenizer.encode(text) == reference.encode(text).ids for text in texts[:20]), "the same tokens"
    ways: dict[str, Callable[[str], object]] = {
        "torchround": tokenizer.encode_array,
        "tokenizers": reference.encode,
    }
    seconds = {way: float("inf") for way in ways}
    for _ in range(3):
        for way, encode in ways.items():
            begun_s = time.perf_counter()
            for text in texts:
                encode(text)
            seconds[way] = min(seconds[way], time.perf_counter() - begun_s)
    speeds = {f"{way}, M characters/s": sum(map(len, texts)) / seconds[way] / 1e6 for way in ways}
    return speeds | {"ratio": seconds["tokenizers"] / seconds["torchround"]}


def loader_speed(source: SourceTable, tokenizer: Tokenizer, workers: int, seconds: float) -> float:
    """Tokens per second from file to batch, after the first batch, saved position included."""
    data = DataTable(sources=(source,), num_workers=workers)
    loader = build_loader(data, tokenizer, SEQ_LEN, 16, 0)
    next(loader)
    tokens, begun_s = 0, time.perf_counter()
    while time.perf_counter() - begun_s < seconds:
        tokens += num_tokens(next(loader), tokenizer.pad_id)
        loader.state_dict()
    loader.close()
    return tokens / (time.perf_counter() - begun_s)


# Waiting.


def waiting_share(workers: int) -> dict[str, float]:
    """Seconds of a step of debug.toml with real compute, and of waiting for data, without the first two steps."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "train.py"), "--config", "debug.toml", "--training.steps=40"]
        command += [
            f"--run.folder={folder}",
            f"--data.num_workers={workers}",
            "--checkpoint.interval_steps=0",
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(folder) / "debug" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines[2:]]
    step_s, data_s = (sum(step[key] for step in steps) / len(steps) for key in ("step_s", "data_s"))
    return {"step_s": step_s, "waiting_s": data_s, "waiting_share": data_s / step_s}


# Memory.


def memory_by_kind(documents: int, kinds: list[str], workers: int) -> dict[str, object]:
    """For each kind of file, what a process of its own holds while it reads."""
    found: dict[str, object] = {"documents": documents}
    with tempfile.TemporaryDirectory() as name:
        for kind in kinds:
            path = Path(name) / f"x.{kind}"
            write_records(path, documents)
            command = [sys.executable, __file__, "--read", str(path)]
            command += ["--documents", str(documents), "--workers", str(workers)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[kind] = json.loads(done.stdout)
            path.unlink()
    return found


def write_records(path: Path, documents: int) -> None:
    """Records of about 100 bytes."""
    records = (
        b'{"text": "document %d of many, with a few words in it, as it is %d"}\n' % (n, n * 7919)
        for n in range(documents)
    )
    if path.suffix == ".parquet":
        write_parquet(path, records)
        return
    with opened(path) as file:
        while block := b"".join(islice(records, 10_000)):
            file.write(block)


def opened(path: Path) -> Any:
    """A file to write bytes to, compressed as its name says."""
    if path.suffix == ".zst":
        import zstandard

        return zstandard.open(path, "wb")
    return gzip.open(path, "wb", 1) if path.suffix == ".gz" else path.open("wb")


def write_parquet(path: Path, records: Iterator[bytes]) -> None:
    """Row groups of 100 000 rows."""
    import pyarrow
    from pyarrow import parquet

    schema = pyarrow.schema([("text", pyarrow.string())])
    with parquet.ParquetWriter(path, schema) as writer:
        while rows := [json.loads(line) for line in islice(records, 100_000)]:
            writer.write_table(pyarrow.Table.from_pylist(rows, schema))


def memory_while_reading(path: str, documents: int, workers: int) -> dict[str, object]:
    """Resident MiB above that of the imports: after the first batch, and at each tenth of the documents."""
    if path.endswith(".parquet"):
        importlib.import_module("pyarrow.parquet")  # 30 MiB that are no documents
    process = psutil.Process()
    data = DataTable(sources=(SourceTable(path=path),), epochs=1, num_workers=workers)
    before = process.memory_info().rss
    begun_s = time.perf_counter()
    loader = build_loader(data, build_tokenizer(TokenizerTable(name="bytes")), SEQ_LEN, 16, 0)
    seen: list[int] = []
    for _ in loader:
        drawn = loader.state_dict()["position"]["reader"]["sources"][0]["drawn"]
        if drawn * 10 >= documents * max(1, len(seen)) or not seen:
            seen.append(round((process.memory_info().rss - before) / MIB))
    seconds = time.perf_counter() - begun_s
    return {"mib_by_tenth": seen, "documents_per_s": round(documents / seconds)}


if __name__ == "__main__":
    main()
