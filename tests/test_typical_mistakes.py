"""Mistakes that new users make: each gives one message that says what is wrong, where, and what to do.

Each ends with exit code 2, without a traceback, and leaves the folder as it was.
"""

import json
from pathlib import Path
from typing import NamedTuple

import pytest

import train

CONFIG = """
[model]
family = "llama3"
flavor = "debug"

[tokenizer]
name = "bytes"

[data]
sources = [{ path = "text.txt" }]

[training]
steps = 3
seq_len = 32
global_batch_size = 2
dtype = "float32"

[engine]
devices = "cpu"
"""
CHAT = {"conversation": [{"role": "user", "content": "hello"}]}


class Mistake(NamedTuple):
    """What a user types after `--config run.toml`, or writes in that file, and the parts of the message in its order."""

    message: tuple[str, ...]
    arguments: tuple[str, ...] = ()
    config: str = CONFIG


MISTAKES = {
    "another trainer's key in the file": Mistake(
        ("run.toml: training.learning_rate: unknown key, given 0.001; ", "nearest: optimizer.lr"),
        config=CONFIG.replace("steps = 3", "learning_rate = 1e-3"),
    ),
    "another trainer's flag": Mistake(
        ("command line: unknown flag --max_steps", "nearest: --training.steps"), ("--max_steps", "100")
    ),
    "another trainer's value": Mistake(
        ('command line: training.dtype: given "bf16"; legal: ', "nearest: bfloat16"), ("--training.dtype=bf16",)
    ),
    "a file that is no TOML": Mistake(
        ("run.toml: ", "line 3"), config=CONFIG.replace('family = "llama3"', "family: llama3")
    ),
    "a key outside of a table": Mistake(
        ("run.toml: steps: given 3 outside of a table", "nearest: training.steps"), config="steps = 3\n" + CONFIG
    ),
    "a string without quotes": Mistake(
        ("run.toml: not valid TOML", "needs quotes"), config=CONFIG.replace('"llama3"', "llama3")
    ),
    "a key without dashes": Mistake(
        ("command line: unexpected argument training.steps=5", "--training.steps 5"), ("training.steps=5",)
    ),
    "a config in YAML": Mistake(("run.yaml: ", "TOML, not YAML"), ("--config", "run.yaml"), config=""),
    "an optimizer in 8 bits": Mistake(
        ('optimizer.name: given "adamw_8bit"', 'optimizer.state = "compact"'), ("--optimizer.name=adamw_8bit",)
    ),
    "weights in 4 bits": Mistake(("model.load_in_4bit: unknown key", "lora.map_base"), ("--model.load_in_4bit=true",)),
    "a config that is not there": Mistake(("runn.toml: no such file",), ("--config", "runn.toml"), config=""),
    "a name on the hub": Mistake(
        ("command line: model.hf_path: ", "meta-llama/Llama-3.1-8B", "not downloaded"),
        ("--model.flavor=none", "--model.hf_path=meta-llama/Llama-3.1-8B"),
    ),
    "a family that is not here": Mistake(
        ('command line: model.family: given "mistral"; legal: ', "llama3"), ("--model.family=mistral",)
    ),
    "no tokenizer": Mistake(
        ("tokenizer.path, tokenizer.name, model.hf_path: no tokenizer is given; legal: ", 'name = "bytes"'),
        config=CONFIG.replace('name = "bytes"', ""),
    ),
    "data that is not there": Mistake(
        ("run.toml: data.sources: ", "texts/*.txt"), config=CONFIG.replace("text.txt", "texts/*.txt")
    ),
    "chats read as text": Mistake(
        ("data.sources: ", "chats.jsonl", "line 1", "conversation"), config=CONFIG.replace("text.txt", "chats.jsonl")
    ),
    "a broken line": Mistake(
        ("data.sources: ", "broken.jsonl", "line 1"), config=CONFIG.replace("text.txt", "broken.jsonl")
    ),
    "an empty file": Mistake(("data.sources: ", "empty.txt"), config=CONFIG.replace("text.txt", "empty.txt")),
    "a warm-up longer than the run": Mistake(
        ("command line and run.toml: lr_schedule.warmup_steps, training.steps: given 100 and 3; ", "for example"),
        ("--lr_schedule.warmup_steps=100",),
    ),
    "a micro-batch larger than the batch": Mistake(
        ("training.micro_batch_size, training.global_batch_size: given 16 and 2; legal: ",),
        ("--training.micro_batch_size=16",),
    ),
    "a kind of device that PyTorch does not know": Mistake(
        ('engine.devices = "gpu": no such kind is known; nearest: auto; legal: "auto", "cpu"',),
        ("--engine.devices=gpu",),
    ),
    "a model that does not fit": Mistake(("GiB", "engine.device_memory_gib"), ("--engine.device_memory_gib=0.001",)),
    "a checkpoint that is not there": Mistake(("checkpoint.load_path", "nowhere"), ("--checkpoint.load_path=nowhere",)),
    "a layer for adapters that no block has": Mistake(
        ("lora.targets", "query", "q_proj"), ("--lora.rank=4", '--lora.targets=["query"]')
    ),
    "an output folder that is a file": Mistake(
        ("run.folder: text.txt/run cannot be used",), ("--run.folder=text.txt",)
    ),
    "validation on nothing": Mistake(
        ("validation.interval_steps, validation.sources, data.validation_fraction: ", "legal: at least one source"),
        ("--validation.interval_steps=1",),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typical_mistake_gives_what_where_and_what_to_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mistake = MISTAKES[name]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("some text to learn\n" * 50)
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 50)
    (tmp_path / "broken.jsonl").write_text('{"text": "no end\n{"text": "whole"}\n')
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "run.yaml").write_text("model:\n  family: llama3\n")
    if mistake.config:
        (tmp_path / "run.toml").write_text(mistake.config)
    before = sorted(tmp_path.rglob("*"))
    config = ("--config", "run.toml") if mistake.config else ()
    assert train.main([*config, *mistake.arguments]) == 2
    printed = capsys.readouterr()
    position = 0
    for part in mistake.message:
        position = printed.err.find(part, position)
        assert position >= 0, f"{part!r} is not in its place in {printed.err}"
    assert "Traceback" not in printed.err
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
