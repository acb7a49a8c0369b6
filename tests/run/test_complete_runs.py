"""A complete run that is asked for again: it says so only if it is the run that the config asks for."""

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.support.small_run import ASYNC, SmallRuns, small_runs, write_text
from torchround.checkpoint import Checkpointer, Loaded
from torchround.config import load_config
from torchround.run import resume
from torchround.run.run_folder import RunError

__all__ = ["small_runs"]

COMPLETE = "the run is complete after 5 steps; nothing to do"


# What a change says, by the change. A refusal leaves the run as it was, so one run serves all of them.
OTHER_RUNS = {
    "--optimizer.lr=5e-3": "optimizer.lr 0.01 -> 0.005",
    "--lr_schedule.decay=none": "lr_schedule.decay",
    "--run.seed=1": "run.seed 0 -> 1",
    "--model.flavor=tied": "model.flavor 'untied' -> 'tied'",
    "--lora.rank=2": "lora.rank 0 -> 2",
    "--lora.alpha=2.0": "lora.alpha 16.0 -> 2.0",
    "--training.dtype=bfloat16": "training.dtype 'float32' -> 'bfloat16'",
    ASYNC: "engine.update 'sync' -> 'async'",
    "--data.packing=best_fit": "packing was contiguous, is best_fit",
    '--data.sources=[{ path = "other.jsonl" }]': "other data",
    "--checkpoint.load_path=outputs/run/checkpoints/step-5": "checkpoint.load_path None -> ",
}
SAME_RUN = ["--engine.num_devices=3", "--checkpoint.keep_latest_k=1", "--validation.max_batches=3"]


def test_a_complete_run_of_other_settings_is_refused_and_left_as_it_is(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(small_runs.folder / "other.jsonl", lines=150, seed=7)
    assert small_runs("run") == 0
    lock = small_runs.path("run") / ".lock"
    before = {path: path.stat().st_mtime_ns for path in small_runs.path("run").rglob("*") if path != lock}
    capsys.readouterr()
    for change, said in OTHER_RUNS.items():
        assert small_runs("run", change) == 2, change
        printed = capsys.readouterr()
        assert said in printed.err and "the run is complete" in printed.err, printed.err
        assert "--run.name NAME" in printed.err and COMPLETE not in printed.out
    assert all(path.stat().st_mtime_ns == time for path, time in before.items())
    # Settings that decide no weight leave it complete.
    for change in SAME_RUN:
        assert small_runs("run", change) == 0, change
        assert COMPLETE in capsys.readouterr().out


def test_other_adapters_to_start_from_are_refused_and_may_be_left_out_later(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters that a run began with, and the sums of its products, are part of what it trained."""
    assert small_runs("run") == 0
    folder = small_runs.path("run") / "checkpoints" / "step-5"
    before = load_config("small.toml")
    before = before.model_copy(update={"lora": before.lora.model_copy(update={"path": "first"})})

    state = {**Checkpointer(folder.parent).read_state(5), "config": before.model_dump(mode="json")}
    loaded = Loaded(5, state, folder, frozenset())

    def require(**changes: object) -> None:
        config = before.model_copy(update=changes)
        resume.require_complete_as_asked(loaded, config, SimpleNamespace(load_state_dict=lambda state: None))

    require()
    require(lora=before.lora.model_copy(update={"path": None}))
    with pytest.raises(RunError, match="lora.path 'first' -> 'second'"):
        require(lora=before.lora.model_copy(update={"path": "second"}))
    with pytest.raises(RunError, match="training.fp16_accumulation False -> True"):
        require(training=before.training.model_copy(update={"fp16_accumulation": True}))
    with pytest.raises(RunError, match="raise training.steps or data.epochs to continue"):
        require(
            optimizer=before.optimizer.model_copy(update={"lr": 1.0}), data=before.data.model_copy(update={"epochs": 2})
        )


def test_fewer_steps_leave_it_complete_with_a_warning_and_more_steps_train_on(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert small_runs("run") == 0
    assert small_runs("run", "--training.steps=3") == 0
    assert COMPLETE in capsys.readouterr().out and "training.steps 5 -> 3" in caplog.text
    assert small_runs("run", "--training.steps=6", "--optimizer.lr=5e-3") == 0
    assert small_runs.saved("run")[-1] == 6 and "optimizer.lr 0.01 -> 0.005" in caplog.text
    assert "rate jumps" not in caplog.text  # the last of six steps has the lowest rate too
    assert small_runs("run", "--training.steps=12", "--optimizer.lr=5e-3") == 0
    first, second = (line["lr"] for line in small_runs.steps("run")[5:7])
    assert f"rate jumps from {first:.2e} to {second:.2e}" in caplog.text


def test_a_checkpoint_to_start_from_that_is_not_used_is_named(
    small_runs: SmallRuns, caplog: pytest.LogCaptureFixture
) -> None:
    assert small_runs("first") == 0 and small_runs("second") == 0
    other = "--checkpoint.load_path=outputs/first/checkpoints/step-5"
    assert small_runs("second", "--training.steps=6", other) == 0
    assert re.search(r"load_path = outputs/first\S+ is not used, because .* from its own .*second", caplog.text)
    caplog.clear()
    assert small_runs("second", "--training.steps=7", other) == 0, "said once: from now on it is the run's own setting"
    assert "is not used" not in caplog.text


# Which config file a run belongs to.


class ConfigFiles:
    """Config files in folders of their own, which all run in the same working directory."""

    def __init__(self, runs: SmallRuns) -> None:
        self.runs = runs
        self.text = (runs.folder / "small.toml").read_text()

    def write(self, path: str, lr: str = "1e-2") -> str:
        file = self.runs.folder / path
        file.parent.mkdir(exist_ok=True)
        file.write_text(self.text.replace("lr = 1e-2", f"lr = {lr}"))
        return path

    def train(self, path: str, *overrides: str) -> int:
        from train import main

        return main(["--config", path, *overrides])


@pytest.fixture
def files(small_runs: SmallRuns) -> ConfigFiles:
    return ConfigFiles(small_runs)


@pytest.mark.parametrize(
    ("first", "second", "name"), [("lr 1e-4.toml", "lr+1e-4.toml", "lr-1e-4"), ("a/exp.toml", "b/exp.toml", "exp")]
)
def test_another_file_does_not_continue_a_run_of_the_same_name(
    files: ConfigFiles, capsys: pytest.CaptureFixture[str], first: str, second: str, name: str
) -> None:
    assert files.train(files.write(first)) == 0
    capsys.readouterr()
    for overrides in ([], ["--training.steps=6"], ["--dry-run"]):
        assert files.train(files.write(second, lr="1e-3"), *overrides) == 2
        printed = capsys.readouterr()
        folder = files.runs.folder
        assert f"is the run of {folder / first}, and {folder / second} is another file" in printed.err
        assert f"--run.name {name}" in printed.err and printed.out == ""
    assert files.runs.saved(name) == [5]
    # The first file continues, and the second one does under a name of its own.
    assert files.train(first, "--training.steps=6") == 0
    assert files.train(second, "--run.name=second") == 0


def test_a_file_that_was_edited_or_moved_or_seen_in_a_container_is_still_the_run_s(files: ConfigFiles) -> None:
    def moved(path: str, to: str) -> str:
        (files.runs.folder / to).parent.mkdir(exist_ok=True)
        (files.runs.folder / path).rename(files.runs.folder / to)
        return to

    path = files.write("a/exp.toml")
    assert files.train(path) == 0
    steps: list[Callable[[], str]] = [
        lambda: moved(path, "b/exp.toml"),
        lambda: files.write("b/exp.toml", lr="1e-3"),  # edited where it is now
        lambda: moved("b/exp.toml", "c/exp.toml"),
        lambda: "outputs/exp/config.toml",
        lambda: "c/exp.toml",
    ]
    for number, change in enumerate(steps, 6):
        assert files.train(change(), f"--training.steps={number}") == 0, number
    assert files.runs.saved("exp")[-1] == 10


def test_a_name_on_the_command_line_says_that_it_is_the_same_run(files: ConfigFiles) -> None:
    assert files.train(files.write("a/exp.toml")) == 0
    other = files.write("b/exp.toml", lr="1e-3")
    assert files.train(other, "--training.steps=6") == 2
    assert files.train(other, "--training.steps=6", "--run.name=exp") == 0
    assert files.train(other, "--training.steps=7") == 0, "the run is now this file's"


def test_two_files_that_name_their_run_themselves_do_not_share_it_either(
    files: ConfigFiles, capsys: pytest.CaptureFixture[str]
) -> None:
    named = '[run]\nname = "shared"\n'
    files.text = named + files.text
    assert files.train(files.write("a/one.toml")) == 0
    assert files.train(files.write("a/two.toml", lr="1e-3")) == 2
    assert "one.toml, and " in capsys.readouterr().err


@pytest.mark.parametrize("content", ["", "[]", '{"path": 1}', "[" * 100_000, "\x00"])
def test_a_record_of_the_file_that_cannot_be_read_is_no_record(files: ConfigFiles, content: str) -> None:
    path = files.write("a/exp.toml")
    folder = files.runs.path("exp")
    folder.mkdir(parents=True)
    (folder / "config_source.json").write_text(content)
    assert files.train(path) == 0
    assert str(Path(files.runs.folder / path)) in (folder / "config_source.json").read_text()
