"""Mistakes that users make: each is one message that says what is wrong, where, and what to do.

Each ends with exit code 2, without a traceback, and leaves the folder as it was.
"""

import json
import re

import pytest

import train
from tests.support.processes import ROOT, run_program
from tests.support.small_run import working_folder

__all__ = ["working_folder"]

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
# What the message must match, by what follows `--config run.toml`; if that is one string, `old -> new` changes the file.
# tests/config/test_messages.py has further mistakes in keys.
MISTAKES = {
    "another trainer's key": ("run.toml: training.learning_rate.*nearest: optimizer.lr", "steps -> learning_rate"),
    "another trainer's flag": ("--max_steps.*nearest: --training.steps", ["--max_steps", "100"]),
    "another trainer's value": ('training.dtype: given "bf16".*nearest: bfloat16', ["--training.dtype=bf16"]),
    "no TOML": ("run.toml: .*line 3", 'family = "llama3" -> family: llama3'),
    "a key outside of a table": (
        "run.toml: steps: given 3 outside.*nearest: training.steps",
        "\n[model] -> steps = 3\n[model]",
    ),
    "a string without quotes": ("run.toml: not valid TOML.*needs quotes", '"llama3" -> llama3'),
    "a key without dashes": ("argument training.steps=5.*--training.steps 5", ["training.steps=5"]),
    "a config in YAML": ("run.yaml: .*TOML", ["--config", "run.yaml"]),
    "a config that is not there": ("runn.toml: no such file", ["--config", "runn.toml"]),
    "an optimizer in 8 bits": ('"adamw_8bit".*optimizer.state = "compact"', ["--optimizer.name=adamw_8bit"]),
    "weights in 4 bits": ("model.load_in_4bit.*lora.map_base", ["--model.load_in_4bit=true"]),
    "a name on the hub": (
        "model.hf_path.*meta-llama/Llama-3.*not downloaded",
        ["--model.flavor=none", "--model.hf_path=meta-llama/Llama-3"],
    ),
    "a model's folder that is to bring the tokenizer": (
        'model.hf_path: given "~/nowhere"',
        ["--model.flavor=none", "--model.hf_path=~/nowhere", "--tokenizer.name=none"],
    ),
    "a family": ('model.family: given "lama3".*nearest: llama3', ["--model.family=lama3"]),
    "no tokenizer": ("tokenizer.path, tokenizer.name, model.hf_path: ", 'name = "bytes" -> '),
    "a tokenizer that is not there": (
        'command line: tokenizer.path: given "nowhere"',
        ["--tokenizer.name=none", "--tokenizer.path=nowhere"],
    ),
    "a tokenizer that the file names": ("run.toml: tokenizer.path: given", 'name = "bytes" -> path = "nowhere"'),
    "a chat template": ("tokenizer.chat_template: given", ["--tokenizer.chat_template=nowhere.jinja"]),
    "a template's variable": ("tokenizer.chat_template_kwargs: ", ["--tokenizer.chat_template_kwargs={tools = []}"]),
    "data that is not there": ("run.toml: data.sources: .*texts/", "text.txt -> texts/*.txt"),
    "chats read as text": ("data.sources: .*chats.jsonl.*line 1.*conversation", "text.txt -> chats.jsonl"),
    "a broken line": ("data.sources: .*broken.jsonl.*line 1", "text.txt -> broken.jsonl"),
    "an empty file": ("data.sources: .*empty.txt", "text.txt -> empty.txt"),
    "a warm-up longer than the run": (
        "warmup_steps, training.steps: given 100 and 3",
        ["--lr_schedule.warmup_steps=100"],
    ),
    "a large micro-batch": ("micro_batch_size.*given 16 and 2", ["--training.micro_batch_size=16"]),
    "a device that is not here": ("PyTorch sees none here", ["--engine.devices=npu"]),
    "a model that does not fit": ("GiB.*engine.device_memory_gib", ["--engine.device_memory_gib=0.001"]),
    "a card without the run's type": (
        "no bfloat16 peak is known for t4",
        ["--machines.card=t4", "--training.dtype=bfloat16", "--dry-run"],
    ),
    "a checkpoint that is not there": ("checkpoint.load_path.*nowhere", ["--checkpoint.load_path=nowhere"]),
    "a layer for adapters": ("lora.targets.*query.*q_proj", ["--lora.rank=4", '--lora.targets=["query"]']),
    "an output folder that is a file": ("run.folder: text.txt/run", ["--run.folder=text.txt"]),
    "validation on nothing": ("validation.interval_steps, validation.sources", ["--validation.interval_steps=1"]),
    "validation on a file that is not there": (
        "command line: validation.sources: ",
        ["--validation.interval_steps=1", "--validation.sources=[{ path = 'nowhere.txt' }]"],
    ),
    "a plan": ("covers 2 layers", ["--engine.plan={forward = [1], fused = 1, backward = [1]}"]),
    "a plan's file": ("engine.plan", ["--engine.plan=nowhere.json"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_typical_mistake_is_one_message_and_nothing_is_written(name, working_folder, capsys):
    said, given = MISTAKES[name]
    old, new = given.split(" -> ") if isinstance(given, str) else ("", "")
    assert old in CONFIG
    (working_folder / "run.toml").write_text(CONFIG.replace(old, new, 1))
    (working_folder / "text.txt").write_text("some text to learn\n" * 50)
    (working_folder / "chats.jsonl").write_text(f"{json.dumps(CHAT)}\n" * 50)
    (working_folder / "broken.jsonl").write_text('{"text": "no end\n{"text": "whole"}\n')
    (working_folder / "empty.txt").write_text("")
    (working_folder / "run.yaml").write_text("model:\n  family: llama3\n")
    before = sorted(working_folder.rglob("*"))
    arguments = [] if isinstance(given, str) else given
    assert train.main([*([] if "--config" in arguments else ["--config", "run.toml"]), *arguments]) == 2
    message = capsys.readouterr().err
    assert re.search(said, message, re.DOTALL), message
    assert "Traceback" not in message and sorted(working_folder.rglob("*")) == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("launcher", "code"),
    # torchrun's own code is always 1, after a report of its own that says 2.
    [((), 2), (("-m", "torch.distributed.run", "--standalone"), 1)],
    ids=["python", "torchrun"],
)
def test_the_message_of_a_program_comes_first_and_without_a_traceback(launcher, code, tmp_path):
    arguments = [*launcher, ROOT / "train.py", "--config", "debug.toml", "--training.stepps", "3"]
    done = run_program(*arguments, folder=tmp_path, code=code, PYTHONWARNINGS="error")
    assert done.stderr.startswith("command line: training.stepps: unknown key, given 3; ")
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]
    if launcher:
        # torchrun quotes the message at the end of its own report, where a reader looks first.
        report = done.stderr.partition("Root Cause")[2]
        assert "exitcode  : 2 " in report and "training.stepps: unknown key" in report
    assert list(tmp_path.iterdir()) == []
