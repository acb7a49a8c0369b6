"""Hostile configs: one message each, and nothing outside the run's folder is touched."""

import os
from pathlib import Path

import pytest

from tests.support.fork_server import ForkServer
from tests.support.hostile_cases import Case, judge
from tests.support.scenarios import prepare


def small(text: str, before: str = ""):
    """Return the harm of more lines at the end of `small.toml`, or at its beginning."""
    return lambda folder: (folder / "small.toml").write_text(before + (folder / "small.toml").read_text() + text)


def only(content: bytes):
    return lambda folder: (folder / "small.toml").write_bytes(content)


def nothing(folder: Path) -> None:
    pass


def many_bases(folder: Path) -> None:
    for number in range(2000):
        (folder / f"base-{number}.toml").write_text(f'base = "base-{number + 1}.toml"\n')
    (folder / "base-2000.toml").write_text("")
    small("", 'base = "base-0.toml"\n')(folder)


def secret_base(folder: Path) -> None:
    (folder / "secret").write_text("root:x:0:0:hunter2\n")
    small("", 'base = "secret"\n')(folder)


def pipe_base(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    small("", 'base = "pipe"\n')(folder)


def linked(name: str):
    """Make a file of the run's folder a link to a file outside."""

    def prepare_link(folder: Path) -> None:
        (folder / "outside").write_text("precious")
        (folder / "outputs" / "run").mkdir(parents=True)
        (folder / "outputs" / "run" / name).symlink_to(folder / "outside")

    return prepare_link


def linked_folder(name: str):
    def prepare_link(folder: Path) -> None:
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "precious").write_text("precious")
        (folder / "outputs" / "run").mkdir(parents=True)
        (folder / "outputs" / "run" / name).symlink_to(folder / "elsewhere")

    return prepare_link


RUN = "--run.name=run"
CASES = {
    "a name that climbs": Case(small('\n[run]\nname = "../x"\n'), r"run.name: given \"../x\""),
    "a name that climbs later": Case(nothing, "run.name", ("--run.name=x/../../y",)),
    "an absolute name": Case(nothing, "run.name", ("--run.name=/etc/x",)),
    "two dots": Case(nothing, "run.name", ("--run.name=..",)),
    "a name with NUL": Case(small('\n[run]\nname = "a\\u0000b"\n'), "run.name"),
    "a name of two lines": Case(small('\n[run]\nname = "a\\nb"\n'), "run.name"),
    "a name too long": Case(nothing, "run.name", (f"--run.name={'a' * 5000}",)),
    "a folder with NUL": Case(small('\n[run]\nfolder = "a\\u0000b"\n'), "run.folder"),
    "a folder of a user that does not exist": Case(nothing, "run.folder", ("--run.folder=~nobody-there/x",)),
    "a folder in a file": Case(lambda folder: (folder / "outputs").touch(), "run.folder: .* cannot be used"),
    "a lock that is a link": Case(linked(".lock"), "run.folder: .*lock.* link", (RUN,)),
    "metrics that are a link": Case(linked("metrics.jsonl"), "run.folder: .*metrics.* link", (RUN,)),
    "a config that is a link": Case(linked("config.toml.tmp"), "run.folder: .*config.* link", (RUN,)),
    "a plan that is a link": Case(linked("plan.json.tmp"), "run.folder: .*plan.* link", (RUN,)),
    "checkpoints that are a link": Case(linked_folder("checkpoints"), "run.folder: .*checkpoints.* link", (RUN,)),
    "traces that are a link": Case(linked_folder("trace"), "run.folder: .*trace.* link", (RUN, "--trace.steps=[1]")),
    "wandb that is a link": Case(linked_folder("wandb"), "run.folder: .*wandb.* link", (RUN,)),
    "a project that climbs": Case(nothing, "metrics.wandb_project", ("--metrics.wandb_project=../x",)),
    "a secret as a base": Case(secret_base, r"secret: not valid TOML: (?!.*hunter2)"),
    "itself as a base": Case(small("", 'base = "small.toml"\n'), "based on this file"),
    "bases without end": Case(many_bases, "base"),
    "deep arrays": Case(only(b"a = " + b"[" * 100_000), "nested too deeply|not valid TOML"),
    "deep tables": Case(only(b"a = " + b"{a = " * 50_000), "nested too deeply|not valid TOML"),
    "deep keys": Case(only(b".".join([b"a"] * 400) + b" = 1"), "unknown|not valid TOML|nested"),
    "a key without end": Case(only(b"x = 1\n" + b".".join([b"a"] * 60_000) + b" = 1"), "over 500 dots"),
    "a file without end": Case(only(b"# comment\n" * 100_000), "longer than 256 KiB"),
    "tables without number": Case(
        only(b"".join(b"[t%d]\n" % number for number in range(20_000))), r"and 199\d\d more(?s:.{0,2500})$"
    ),
    "a long number": Case(only(b"a = " + b"9" * 100_000), "not valid TOML"),
    "a number beyond all": Case(nothing, "training.steps", (f"--training.steps={'9' * 40}",)),
    "no number": Case(nothing, "optimizer.lr", ("--optimizer.lr=nan",)),
    "an infinite number": Case(nothing, "max_norm", ("--training.max_norm=inf",)),
    "no text": Case(only(b"\xff\xfe\x00"), "not UTF-8"),
    "a pipe as the config": Case(pipe_base, "there is no such file"),
    "a key of the class": Case(small("\n[run]\n__class__ = 1\n"), "run.__class__: unknown key"),
    "a key that is a terminal's command": Case(
        small('\n[run]\n"\\u001b]0;pwned" = 1\n'), r"run.\\x1b\]0;pwned: unknown key"
    ),
    "a plan that is a terminal's command": Case(nothing, r"\\x1b\]0;pwned", ('--engine.plan="\\u001b]0;pwned"',)),
    "a key of pydantic's": Case(small("\n[run]\nmodel_config = 1\n"), "run.model_config: unknown key"),
    "a model with NUL": Case(
        only(b'model = { family = "small", hf_path = "a\\u0000b" }\ndata = { sources = [{ path = "a" }] }\n'),
        "model.hf_path",
    ),
    "a tokenizer with NUL": Case(nothing, "tokenizer", ("--tokenizer.name=none", '--tokenizer.path="a\\u0000b"')),
    "data with NUL": Case(nothing, "data.sources", ('--data.sources=[{ path = "a\\u0000b" }]',)),
    "a plan with NUL": Case(nothing, "engine.plan", ('--engine.plan="a\\u0000b"',)),
    "a checkpoint with NUL": Case(nothing, "checkpoint.load_path", ('--checkpoint.load_path="a\\u0000b"',)),
    "adapters with NUL": Case(nothing, "lora.path", ('--lora.path="a\\u0000b"', "--lora.rank=2")),
    "a template with NUL": Case(nothing, "template", ('--tokenizer.chat_template="a\\u0000b"',)),
    "a model that is a program": Case(nothing, "model.family", ("--model.family=__import__('os')",)),
}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_config_is_a_message_and_touches_nothing(fork_server: ForkServer, tmp_path: Path, name: str) -> None:
    prepare(tmp_path)
    judge(CASES[name], fork_server, tmp_path)


def test_a_shell_s_words_in_a_name_are_a_name(fork_server: ForkServer, tmp_path: Path) -> None:
    """The name is not expanded: the folder has exactly that name."""
    prepare(tmp_path)
    folder = "outputs/$HOME $(touch pwned) `touch pwned`;touch pwned"
    child = fork_server.run("meets_harm", [f"--run.folder={folder}", "--training.steps=1"], folder=tmp_path)
    assert child.wait() == 0 and (tmp_path / folder / "small" / "config.toml").exists(), child.text()
    assert not list(tmp_path.rglob("pwned")) and "TOUCHED" not in child.text()


def test_files_are_made_with_the_user_s_mask(fork_server: ForkServer, tmp_path: Path) -> None:
    prepare(tmp_path)
    child = fork_server.run("trains_under_mask", 0o027, ["--run.name=run"], folder=tmp_path)
    assert child.wait() == 0, child.text()
    made = [path for path in (tmp_path / "outputs").rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o750}
