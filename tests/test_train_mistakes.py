"""A user's mistake ends `train.py` with exit code 2 and one message that names the key; no traceback, no files."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import train

ROOT = Path(__file__).parents[1]
MISTAKES = {
    "a file": (["--config", "nowhere.toml"], "nowhere.toml: no such file"),
    "a flag": (["--config", "debug.toml", "--steps", "3"], "nearest: --training.steps"),
    "a table": (["--config", "debug.toml", "--trainig.steps=3"], "nearest: training"),
    "a key": (["--config", "debug.toml", "--training.step=3"], "training.step: unknown key"),
    "a type": (["--config", "debug.toml", "--training.steps=1.5"], "training.steps: given 1.5"),
    "a range": (["--config", "debug.toml", "--training.steps=0"], "training.steps: given 0"),
    "a combination": (["--config", "debug.toml", "--training.micro_batch_size=99"], "given 99 and 16"),
    "a family": (["--config", "debug.toml", "--model.family=lama3"], "nearest: llama3"),
    "a flavor": (["--config", "debug.toml", "--model.flavor=debugg"], "nearest: debug"),
    "a model's folder": (
        ["--config", "debug.toml", "--model.flavor=none", "--model.hf_path=nowhere"],
        'command line: model.hf_path: given "nowhere", but there is no such folder; legal: a local folder',
    ),
    "a tokenizer": (
        ["--config", "debug.toml", "--tokenizer.name=none", "--tokenizer.path=nowhere"],
        'command line: tokenizer.path: given "nowhere", but there is no such file or folder; legal: ',
    ),
    "a model's folder that brings the tokenizer": (
        ["--config", "debug.toml", "--model.flavor=none", "--model.hf_path=~/nowhere", "--tokenizer.name=none"],
        'command line: model.hf_path: given "~/nowhere", but there is no such folder; legal: a local folder',
    ),
    "a tokenizer that the file names": (
        ["--config", "llama3_1_8b.toml"],
        'configs/llama3_1_8b.toml: tokenizer.path: given "Llama-3.1-8B", but there is no such file or folder',
    ),
    "a chat template": (
        ["--config", "debug.toml", "--tokenizer.chat_template=nowhere.jinja"],
        'command line: tokenizer.chat_template: given "nowhere.jinja", but there is no such file; legal: a file with',
    ),
    "a template's variable": (
        ["--config", "debug.toml", "--tokenizer.chat_template_kwargs={tools = []}"],
        "tokenizer.chat_template_kwargs: given {tools = []}; legal: a table of variables, none of them messages, ",
    ),
    "a plan": (
        ["--config", "debug.toml", "--engine.plan={forward = [1], fused = 1, backward = [1]}"],
        "engine.plan covers 2 layers",
    ),
    "a plan's file": (["--config", "debug.toml", "--engine.plan=nowhere.json"], "engine.plan"),
}


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """Restore the number of threads: `engine.cpu_threads` sets it for the whole process, which runs other tests too."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_ends_with_exit_code_2_and_a_message(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, expected = MISTAKES[mistake]
    assert train.main(arguments) == 2
    printed = capsys.readouterr()
    assert expected in printed.err and printed.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "code"),
    [
        ([sys.executable], 2),
        # torchrun's own code is always 1, after a report of its own that says 2.
        ([sys.executable, "-m", "torch.distributed.run", "--standalone"], 1),
    ],
    ids=["python", "torchrun"],
)
def test_the_message_comes_first_and_without_a_traceback(launcher: list[str], code: int, tmp_path: Path) -> None:
    arguments = [*launcher, str(ROOT / "train.py"), "--config", "debug.toml", "--training.stepps", "3"]
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run(arguments, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith("command line: training.stepps: unknown key, given 3; ")
    ours = done.stderr.partition("torch/distributed")[0]
    assert "Traceback" not in ours
    if code == 1:
        # torchrun quotes the message at the end of its own report, where a reader looks first.
        report = done.stderr.partition("Root Cause")[2]
        assert "exitcode  : 2 " in report and "traceback : command line: training.stepps: unknown key" in report
    assert list(tmp_path.iterdir()) == []
