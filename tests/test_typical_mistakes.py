"""Mistakes that users make: each is one message that says what is wrong, where, and what to do.

Each ends with exit code 2, without a traceback, and leaves the folder as it was.
"""

import json
import re

import pytest

import train
from tests.support.processes import ROOT, run_program
from tests.support.toml import MINIMAL

CONFIG = f"""{MINIMAL.replace("corpus.txt", "text.txt")}[training]
steps = 3
seq_len = 32
global_batch_size = 2
dtype = "float32"
[engine]
devices = "cpu"
"""
CHAT = {"conversation": [{"role": "user", "content": "hello"}]}
PAIR = {"prompt": [{"role": "user", "content": "a"}], "completion": "b"}
FILES = {
    "text.txt": "some text to learn\n" * 50,
    "chats.jsonl": f"{json.dumps(CHAT)}\n" * 50,
    "pairs.jsonl": f"{json.dumps(PAIR)}\n" * 50,
    "ids.jsonl": '{"tokens": [1, 151000]}\n' * 50,
    "broken.jsonl": '{"text": "no end\n{"text": "whole"}\n',
    "empty.txt": "",
    "run.yaml": "model:\n  family: llama3\n",
}
SKIP, BF16 = "--data.on_bad_record=skip", "--training.dtype=bfloat16"
NO_FLAVOR, NO_TOKENIZER = "--model.flavor=none", "--tokenizer.name=none"
VALIDATED = ("--validation.interval_steps=1", "--data.validation_fraction=0.2")
# What the message must match, by what follows `--config run.toml`; if that is one string, `old -> new` changes the file.
# tests/config/test_messages.py has further mistakes in keys.
MISTAKES = {
    "another trainer's flag": ("--max_steps; legal: --config NAME.toml", ["--max_steps", "100"]),
    "a key outside of a table": (
        "run.toml: steps: unknown key outside of a table, given 3.*nearest: training.steps",
        "\n[model] -> steps = 3\n[model]",
    ),
    "a string without quotes": ("run.toml: not valid TOML.*needs quotes", '"llama3" -> llama3'),
    "a key without dashes": ("argument training.steps.*nearest: --training.steps", ["training.steps=5"]),
    "a config in YAML": ("run.yaml: .*TOML", ["--config", "run.yaml"]),
    "an optimizer in 8 bits": ('"adamw_8bit".*nearest: adamw', ["--optimizer.name=adamw_8bit"]),
    "a name on the hub": ("model.hf_path.*meta/Llama.*not downloaded", [NO_FLAVOR, "--model.hf_path=meta/Llama"]),
    # It is to bring the tokenizer.
    "a folder": ('model.hf_path: given "~/nowhere"', [NO_FLAVOR, "--model.hf_path=~/nowhere", NO_TOKENIZER]),
    "a family": ('model.family: given "lama3".*nearest: llama3', ["--model.family=lama3"]),
    "a tokenizer": ('command line: tokenizer.path: given "no"', [NO_TOKENIZER, "--tokenizer.path=no"]),
    "a tokenizer that the file names": ("run.toml: tokenizer.path: given", 'name = "bytes" -> path = "nowhere"'),
    "a chat template": ("tokenizer.chat_template: given", ["--tokenizer.chat_template=nowhere.jinja"]),
    "data that is not there": ("run.toml: data.sources: .*texts/", "text.txt -> texts/*.txt"),
    "chats read as text": ("data.sources: .*chats.jsonl.*line 1.*conversation", "text.txt -> chats.jsonl"),
    "a broken line": ("data.sources: .*broken.jsonl.*line 1", "text.txt -> broken.jsonl"),
    # A mistake of all records is none that may be skipped. tests/data/test_bad_records.py has further ones.
    "records of another kind": (
        "data.sources: .*ids.jsonl, line 1: no field 'text'",
        ["--data.sources=[{ path='ids.jsonl' }]", SKIP],
    ),
    "ids of another vocabulary": (
        "data.sources: .*ids.jsonl.*151000; .* 0 to 258",
        ["--data.sources=[{ path='ids.jsonl', content='tokens' }]", SKIP],
    ),
    "no chat template": (
        "data.sources: .*pairs.jsonl.*no chat template",
        ["--data.sources=[{ path='pairs.jsonl', content='prompt_completion' }]", SKIP],
    ),
    "an empty file": ("data.sources: .*empty.txt", "text.txt -> empty.txt"),
    "a device that is not here": ("PyTorch sees none here", ["--engine.devices=npu"]),
    "a model that does not fit": ("GiB.*engine.device_memory_gib", ["--engine.device_memory_gib=0.001"]),
    "more than the host has": ("GiB are missing.*engine.host_memory_gib", ["--engine.host_memory_gib=1e-4"]),
    "a card without the type": ("no bfloat16 peak is known for t4", ["--machines.card=t4", BF16, "--dry-run"]),
    "a checkpoint that is not there": ("checkpoint.load_path.*nowhere", ["--checkpoint.load_path=nowhere"]),
    "a layer for adapters": ("lora.targets.*query.*q_proj", ["--lora.rank=4", '--lora.targets=["query"]']),
    "an output folder that is a file": ("run.folder: text.txt/run", ["--run.folder=text.txt"]),
    "validation on a file that is not there": (
        "command line: validation.sources: ",
        ["--validation.interval_steps=1", "--validation.sources=[{ path = 'nowhere.txt' }]"],
    ),
    "prompts that no step asks": ("validation.prompts, validation.interval_steps: ", ["--validation.prompts=['a']"]),
    "an empty prompt": (r"validation.prompts\[0\]: ", [*VALIDATED, "--validation.prompts=['']"]),
    "a prompt that is no list": ("input should be a valid tuple", [*VALIDATED, "--validation.prompts=a"]),
    "no tokens for a prompt": (
        "validation.prompt_tokens: given 0",
        [*VALIDATED, "--validation.prompts=['a']", "--validation.prompt_tokens=0"],
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
    for file, content in FILES.items():
        (working_folder / file).write_text(content)
    before = sorted(working_folder.rglob("*"))
    arguments = [] if isinstance(given, str) else given
    for dry in ((), ("--dry-run",)) if "data.sources" in said else ((),):
        assert train.main([*([] if "--config" in arguments else ["--config", "run.toml"]), *arguments, *dry]) == 2
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
