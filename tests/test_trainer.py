"""What a run does besides training: its files, its end, validation, data and disks at fault. In this process."""

import itertools
import logging
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch

import train
from tests.small_run import (
    ASYNC,
    STEPS,
    SmallRuns,
    before_step,
    files_of,
    interrupt,
    small_runs,
    wrap_layer,
    write_text,
)
from torchround.config import load_config
from torchround.layer import LayeredModel
from torchround.pipeline.plan import Plan

__all__ = ["small_runs"]

# DESIGN section 11.
KEYS = [
    "step",
    "loss",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_s",
    "mfu",
    "step_s",
    "data_s",
    "optimizer_s",
    "bubble",
    "device_peak_gib",
    "host_gib",
    "skipped_steps",
]


# Files.


def test_metrics_have_exactly_the_documented_keys_and_add_up(small_runs: SmallRuns) -> None:
    started_s = time.monotonic()
    assert small_runs("run") == 0
    elapsed_s = time.monotonic() - started_s
    steps = small_runs.steps("run")
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5]
    for line in steps:
        assert list(line) == KEYS
        assert line["bubble"] < 1 and line["mfu"] is None and line["skipped_steps"] == 0
        assert line["optimizer_s"] > 0 and 0 <= line["data_s"] < line["step_s"]
        assert 0 < line["device_peak_gib"] < line["host_gib"]
    assert sum(line["step_s"] for line in steps) < elapsed_s
    counted = [later["tokens"] - earlier["tokens"] for earlier, later in itertools.pairwise(steps)]
    assert all(0 < tokens <= 7 * 16 for tokens in counted)
    per_second = [line["tokens_per_s"] * line["step_s"] for line in steps[1:]]
    assert per_second == pytest.approx(counted)


def test_metrics_go_on_after_a_resume_without_repeating_steps(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint is older than the last logged steps, as after a kill."""
    every_second = "--metrics.log_every_steps=2"
    assert small_runs("run", "--checkpoint.interval_steps=3", "--checkpoint.keep_latest_k=0") == 0
    (small_runs.path("run") / "checkpoints" / "step-5").rename(small_runs.folder / "gone")
    assert small_runs("run", every_second) == 0
    assert [line["step"] for line in small_runs.steps("run")] == [1, 2, 3, 4, 5]
    assert small_runs("sparse", every_second) == 0
    assert [line["step"] for line in small_runs.steps("sparse")] == [2, 4, 5]
    assert small_runs.losses("sparse").items() <= small_runs.losses("run").items()


def test_the_resolved_config_can_be_run_again_and_is_the_same(small_runs: SmallRuns) -> None:
    overrides = ["--run.name=run", "--training.max_norm=0.5", ASYNC]
    assert small_runs("run", *overrides) == 0
    resolved = small_runs.path("run") / "config.toml"
    assert load_config(resolved) == load_config("small.toml", overrides)
    assert small_runs("again", config=str(resolved)) == 0
    small_runs.assert_same("again", "run")


def test_the_plan_can_be_given_back(small_runs: SmallRuns) -> None:
    assert small_runs("planned", "--engine.plan=none") == 0
    given = small_runs.path("planned") / "plan.json"
    assert small_runs("given", f"--engine.plan={given}") == 0
    plans = [Plan.from_json(path.read_text()) for path in (given, small_runs.path("given") / "plan.json")]
    assert plans[0].partition == plans[1].partition and plans[0].rounds == plans[1].rounds
    small_runs.assert_same("given", "planned")


def test_a_dry_run_prints_config_plan_and_memory_and_leaves_nothing(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files_of(small_runs.folder)
    assert small_runs("run", "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "[training]" in printed and "parameters in 5 layers" in printed and "optimizer state" in printed
    assert files_of(small_runs.folder) == before and not small_runs.path("run").exists()


# The end.


def test_a_complete_run_says_so_and_more_steps_go_on(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    constant = "--lr_schedule.decay=none"
    assert small_runs("run", constant) == 0
    before = files_of(small_runs.path("run"))
    capsys.readouterr()
    assert small_runs("run", constant) == 0
    assert "complete after 5 steps" in capsys.readouterr().out
    assert files_of(small_runs.path("run")) == before
    assert small_runs("run", constant, "--training.steps=7") == 0
    assert small_runs("whole", constant, "--training.steps=7") == 0
    small_runs.assert_same("run", "whole", step=7)


def test_a_signal_in_the_last_step_changes_nothing(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_step(monkeypatch, STEPS, partial(interrupt, signal.SIGINT))
    assert small_runs("run") == 0
    assert small_runs.saved("run") == [STEPS]


def test_control_c_before_the_first_step_is_no_traceback(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrap_layer(monkeypatch, lambda model: interrupt(signal.SIGINT))
    assert small_runs("run") == 128 + signal.SIGINT
    assert capsys.readouterr().err == "interrupted before the first step\n"


def test_signals_mean_again_what_they_meant_before(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    before_step(monkeypatch, 2, interrupt)
    assert small_runs("run") == 128 + signal.SIGTERM
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


# Data.


def test_data_that_ends_ends_the_run_with_a_checkpoint(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(small_runs.folder / "text.jsonl", lines=3)
    more_than_there_is = ["--training.steps=100", "--data.epochs=1"]
    for _ in range(2):
        assert small_runs("run", *more_than_there_is) == 0
        assert "the data has come to its end" in capsys.readouterr().out
        [last] = small_runs.saved("run")
        assert list(small_runs.losses("run")) == list(range(1, last + 1)) and 1 < last < 100


@pytest.mark.parametrize("workers", [0, 2])
def test_a_record_at_fault_ends_the_run_after_a_save_and_a_repair_lets_it_go_on(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str], workers: int
) -> None:
    overrides = ["--data.shuffle=false", "--training.steps=20", f"--data.num_workers={workers}"]
    assert small_runs("whole", *overrides) == 0
    text = small_runs.folder / "text.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    text.write_text("".join([*lines[:14], lines[14].replace('"text"', "'text'"), *lines[15:]]))
    capsys.readouterr()
    assert small_runs("run", *overrides) == 1
    printed = capsys.readouterr()
    [last] = small_runs.saved("run")
    assert 0 < last < 20 and list(small_runs.losses("run")) == list(range(1, last + 1))
    assert f"step-{last}" in printed.out.splitlines()[-1]
    [message] = printed.err.splitlines()
    assert message.startswith("DataError: ") and "text.jsonl, line 15" in message
    text.write_text("".join(lines))
    assert small_runs("run", *overrides) == 0
    small_runs.assert_same("run", "whole", step=20)


def test_records_that_are_skipped_are_counted_over_a_resume(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = small_runs.folder / "text.jsonl"
    lines = text.read_text().splitlines(keepends=True)
    text.write_text("".join(["no JSON\n", *lines[:20], "none either\n", *lines[20:]]))
    overrides = ["--data.shuffle=false", "--data.on_bad_record=skip", "--training.steps=20"]
    before_step(monkeypatch, 1, interrupt)
    assert small_runs("run", *overrides) == 128 + signal.SIGTERM
    assert "bad records skipped: 1" in capsys.readouterr().out
    assert small_runs("run", *overrides) == 0
    assert "bad records skipped: 2" in capsys.readouterr().out


# Validation.


def test_validation_is_logged_at_its_interval_and_changes_no_training_loss(small_runs: SmallRuns) -> None:
    write_text(small_runs.folder / "held-out.jsonl", lines=4, seed=1)
    sources = '--validation.sources=[{ path = "held-out.jsonl" }]'
    for update in ("sync", "async"):
        overrides = [f"--engine.update={update}", sources]
        assert small_runs(f"without-{update}", *overrides) == 0
        assert small_runs(update, *overrides, "--validation.interval_steps=2") == 0
        small_runs.assert_same(update, f"without-{update}")
        validated = [line["step"] for line in small_runs.steps(update) if "validation_loss" in line]
        assert validated == [2, 4]


def test_the_validation_loss_is_that_of_the_newest_weights(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_text(small_runs.folder / "held-out.jsonl", lines=4, seed=1)
    models: list[LayeredModel] = []
    wrap_layer(monkeypatch, models.append)
    batches: list = []
    build = train.build_validation_loader
    monkeypatch.setattr(
        train,
        "build_validation_loader",
        lambda *arguments: batches.append(list(build(*arguments))) or build(*arguments),
    )
    validation = ["--validation.interval_steps=5", '--validation.sources=[{ path = "held-out.jsonl" }]']
    assert small_runs("run", ASYNC, *validation) == 0
    assert len(batches[0]) > 1
    expected = plain_loss(models[0], small_runs.state("run"), batches[0])
    assert small_runs.steps("run")[-1]["validation_loss"] == pytest.approx(expected, rel=1e-6)


def plain_loss(model: LayeredModel, state: dict[str, torch.Tensor], batches: list) -> float:
    """Mean loss per label of the layers called one after the other."""
    for name, layer in zip(model.names, model.layers, strict=True):
        layer.to_empty(device="cpu")
        for path, parameter in layer.named_parameters():
            parameter.data.copy_(state[f"weights/{name}.{path}"])
    loss_sum = labels = 0.0
    for batch in batches:
        hidden = None
        for layer in model.layers:
            hidden = layer(hidden, batch)
        loss_sum += hidden.item()
        labels += batch.num_labels()
    return loss_sum / labels


# Faults.


def test_a_checkpoint_that_cannot_be_written_is_a_warning_and_the_next_one_works(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    obstacle = small_runs.path("run") / "checkpoints"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("a file where the folder should be")
    before_step(monkeypatch, 4, obstacle.unlink)
    assert small_runs("run", "--checkpoint.interval_steps=2", "--checkpoint.keep_latest_k=0") == 0
    [warning] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "step 2 could not be written" in warning.getMessage()
    assert "training goes on" in warning.getMessage()
    assert small_runs.saved("run") == [4, 5]


def test_a_last_checkpoint_that_cannot_be_written_is_a_fault(
    small_runs: SmallRuns, capsys: pytest.CaptureFixture[str]
) -> None:
    obstacle = small_runs.path("run") / "checkpoints"
    obstacle.parent.mkdir(parents=True)
    obstacle.write_text("a file where the folder should be")
    assert small_runs("run") == 1
    message = capsys.readouterr().err
    assert message.startswith("CheckpointError: the checkpoint of step 5 could not be written")
    assert "Traceback" not in message
    assert len(small_runs.steps("run")) == STEPS


def test_a_stage_that_hangs_is_reported_after_the_timeout_and_the_state_is_saved(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = []

    def wrap(model: LayeredModel) -> None:
        kind = type(model.layers[0])
        forward = kind.forward

        def slow(self, hidden, micro_batch):
            calls.append(None)
            if len(calls) == 18:  # step 3: eight calls a step
                time.sleep(2.5)
            return forward(self, hidden, micro_batch)

        monkeypatch.setattr(kind, "forward", slow)

    assert small_runs("whole") == 0  # the first step of a process imports what torch needs for it
    wrap_layer(monkeypatch, wrap)
    assert small_runs("run", "--engine.hang_timeout_s=1.0") == 1
    message = capsys.readouterr().err.splitlines()[-1]
    assert "no thread made progress for 1 s" in message and "engine.hang_timeout_s" in message
    assert small_runs.saved("run") == [2]


def test_a_gradient_that_is_not_finite_is_skipped_counted_and_still_counted_after_a_resume(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = []

    def wrap(model: LayeredModel) -> None:
        kind = type(model.layers[-1])
        forward = kind.forward

        def overflowing(self, hidden, micro_batch):
            calls.append(None)
            return forward(self, hidden, micro_batch) * (float("inf") if len(calls) == 5 else 1.0)

        monkeypatch.setattr(kind, "forward", overflowing)

    wrap_layer(monkeypatch, wrap)
    before_step(monkeypatch, 3, interrupt)
    assert small_runs("run") == 128 + signal.SIGTERM
    assert "step 2: the gradient is not finite" in caplog.text
    state = small_runs.saved_state("run", 3)
    assert (state["step"], state["applied_updates"], state["skipped_steps"]) == (3, 2, 1)
    assert small_runs("run") == 0
    assert [line["skipped_steps"] for line in small_runs.steps("run")] == [0, 1, 1, 1, 1]


def test_a_console_that_is_closed_does_not_end_the_run(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed:
        def write(self, text: str) -> int:
            raise BrokenPipeError

        flush = write

    before_step(monkeypatch, 2, lambda: monkeypatch.setattr("sys.stdout", Closed()))
    assert small_runs("run", "--checkpoint.interval_steps=2") == 0
    assert len(small_runs.steps("run")) == STEPS


# Mistakes that need a machine or a folder to be found.


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["--engine.device_memory_gib=1e-6"], "GiB"),
        (["--engine.devices=cuda"], "PyTorch sees no GPU"),
        (['--data.sources=[{ path = "nowhere.txt" }]'], "command line: data.sources: "),
        (["--run.folder=text.jsonl"], "run.folder: text.jsonl/run cannot be used"),
        (
            ["--validation.interval_steps=1", '--validation.sources=[{ path = "nowhere.txt" }]'],
            "command line: validation.sources: ",
        ),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_message(
    small_runs: SmallRuns,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    overrides: list[str],
    expected: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert small_runs("run", *overrides) == 2
    message = capsys.readouterr().err
    assert expected in message and "Traceback" not in message
    assert not small_runs.path("run").exists()


def test_a_model_too_large_for_the_host_is_refused_before_it_is_allocated(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "available_host_bytes", lambda: 2**17)
    assert small_runs("run") == 2
    message = capsys.readouterr().err
    assert "MiB are missing" in message and "training.dtype" in message
    assert not Path("outputs").exists()


def test_more_than_one_node_is_refused(
    small_runs: SmallRuns, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert small_runs("run") == 2
    assert "several nodes" in capsys.readouterr().err
