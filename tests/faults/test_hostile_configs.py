"""Hostile configs: one message each, and nothing outside the run's folder is touched."""

import os

from tests.support.hostile_cases import ESCAPED, Case, judge
from tests.support.small_run import SMALL


def small(text, before=""):
    return lambda folder: (folder / "small.toml").write_text(before + SMALL + text)


def only(content):
    return lambda folder: (folder / "small.toml").write_bytes(content)


def many_bases(folder):
    for number in range(2000):
        (folder / f"base-{number}.toml").write_text(f'base = "base-{number + 1}.toml"\n')
    (folder / "base-2000.toml").write_text("")
    small("", 'base = "base-0.toml"\n')(folder)


def secret_base(folder):
    (folder / "secret").write_text("root:x:0:0:hunter2\n")
    small("", 'base = "secret"\n')(folder)


def pipe_base(folder):
    os.mkfifo(folder / "pipe")
    small("", 'base = "pipe"\n')(folder)


def linked(name):
    def link(folder):
        (folder / "elsewhere").mkdir()
        (folder / "elsewhere" / "precious").write_text("precious")
        (folder / "outputs" / "run").mkdir(parents=True)
        outside = "elsewhere/precious" if "." in name else "elsewhere"
        (folder / "outputs" / "run" / name).symlink_to(folder / outside)

    return Case(link, f"run.folder: .*{name.split('.')[0]}.* link", ("--run.name=run", "--trace.steps=[1]"))


def option(argument, says, *others):
    return Case(lambda folder: None, says, (argument, *others))


SHELL = "outputs/$HOME $(touch pwned) `touch pwned`;touch pwned"
CASES = {
    "a name that climbs": Case(small('\n[run]\nname = "../x"\n'), r"run.name: given \"../x\""),
    "a name of two lines": Case(small('\n[run]\nname = "a\\nb"\n'), "run.name"),
    "a name too long": option(f"--run.name={'a' * 5000}", "run.name"),
    "a folder of a user that does not exist": option("--run.folder=~nobody-there/x", "run.folder"),
    "a folder in a file": Case(lambda folder: (folder / "outputs").touch(), "run.folder: .* cannot be used"),
    "a folder of a shell's words": Case(
        lambda folder: None, "the run is complete", (f"--run.folder={SHELL}", "--training.steps=1"), 0
    ),
    **{f"{name}, a link": linked(name) for name in (".lock", "metrics.jsonl", "config.toml.tmp", "plan.json.tmp")},
    **{f"{name}, a link": linked(name) for name in ("checkpoints", "trace", "wandb")},
    "a project that climbs": option("--metrics.wandb_project=../x", "metrics.wandb_project"),
    "a secret as a base": Case(secret_base, r"secret: not valid TOML: (?!.*hunter2)"),
    "itself as a base": Case(small("", 'base = "small.toml"\n'), "at most 20 files in a chain"),
    "bases without end": Case(many_bases, "base"),
    "a pipe as a base": Case(pipe_base, "no such file"),
    "deep arrays": Case(only(b"a = " + b"[" * 100_000), "nested too deeply|not valid TOML"),
    "a key without end": Case(only(b"x = 1\n" + b".".join([b"a"] * 60_000) + b" = 1"), "over 500 dots"),
    "a file without end": Case(only(b"# comment\n" * 100_000), "longer than 256 KiB"),
    "tables without number": Case(
        only(b"".join(b"[t%d]\n" % number for number in range(20_000))), r"and 199\d\d more(?s:.{0,2500})$"
    ),
    "a number beyond all": option(f"--training.steps={'9' * 40}", "training.steps"),
    "no number": option("--optimizer.lr=nan", "optimizer.lr"),
    "no text": Case(only(b"\xff\xfe\x00"), "not valid TOML: 'utf-8'"),
    "a key of pydantic's": Case(small("\n[run]\nmodel_config = 1\n"), "run.model_config: unknown key"),
    "a key that is a terminal's command": Case(small('\n[run]\n"\\u001b]0;pwned" = 1\n'), f"run.{ESCAPED}: unknown"),
    "a plan that is a terminal's command": option('--engine.plan="\\u001b]0;pwned"', ESCAPED),
    "a model with NUL": Case(
        only(b'model = { family = "small", hf_path = "a\\u0000b" }\ndata = { sources = [{ path = "a" }] }\n'),
        "model.hf_path",
    ),
    "data with NUL": option('--data.sources=[{ path = "a\\u0000b" }]', "data.sources"),
    "a checkpoint with NUL": option('--checkpoint.load_path="a\\u0000b"', "checkpoint.load_path"),
    "a template with NUL": option('--tokenizer.chat_template="a\\u0000b"', "template"),
    "a model that is a program": option("--model.family=__import__('os')", "model.family"),
}


def test_a_hostile_config_is_a_message_and_touches_nothing(processes, tmp_path):
    folders = judge(CASES, processes, tmp_path)
    named = folders["a folder of a shell's words"]
    assert (named / SHELL / "small" / "config.toml").exists() and not list(tmp_path.rglob("pwned"))


def test_files_are_made_with_the_user_s_mask(small_runs):
    before = os.umask(0o027)
    try:
        assert small_runs("run", "--training.steps=1") == 0
    finally:
        os.umask(before)
    made = [*small_runs.path("run").rglob("*"), small_runs.path("run")]
    assert {path.stat().st_mode & 0o777 for path in made if path.is_file()} == {0o640}
    assert {path.stat().st_mode & 0o777 for path in made if path.is_dir()} == {0o750}
