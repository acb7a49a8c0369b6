"""A complete run that is asked for again: it says so only if it is the run that the config asks for."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.support.small_run import ASYNC, small_runs, write_text
from torchround.checkpoint import Loaded
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
# In the same way, the adapters that a run began with and the sums of its products; the path may be left out later.
FIRST = {"lora": {"path": "first"}}
CHANGES = [
    ({}, ""),
    ({"lora": {"path": None}}, ""),
    ({"lora": {"path": "second"}}, "lora.path 'first' -> 'second'"),
    ({"training": {"fp16_accumulation": True}}, "training.fp16_accumulation False -> True"),
    ({"optimizer": {"lr": 1.0}, "data": {"epochs": 2}}, "raise training.steps or data.epochs"),
]


def test_a_complete_run_of_other_settings_is_refused_and_left_as_it_is(small_runs, capsys):
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
    state, given = small_runs.saved_state("run"), changed(load_config("small.toml"), FIRST)
    loaded = Loaded(5, {**state, "config": given.model_dump(mode="json")}, lock.parent, frozenset())
    for tables, said in CHANGES:
        refused = pytest.raises(RunError, match=said) if said else nullcontext()
        with refused:
            loader = SimpleNamespace(load_state_dict=lambda state: None)
            resume.require_complete_as_asked(loaded, changed(given, tables), loader)


def changed(config, tables):
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=keys) for name, keys in tables.items()}
    )


def test_fewer_steps_leave_it_complete_with_a_warning_and_more_steps_train_on(small_runs, capsys, caplog):
    assert small_runs("run") == 0
    assert small_runs("run", "--training.steps=3") == 0
    assert COMPLETE in capsys.readouterr().out and "training.steps 5 -> 3" in caplog.text
    assert small_runs("run", "--training.steps=6", "--optimizer.lr=5e-3") == 0
    assert small_runs.saved("run")[-1] == 6 and "optimizer.lr 0.01 -> 0.005" in caplog.text
    assert "rate jumps" not in caplog.text  # the last of six steps has the lowest rate too
    assert small_runs("run", "--training.steps=12", "--optimizer.lr=5e-3") == 0
    first, second = (line["lr"] for line in small_runs.steps("run")[5:7])
    assert f"rate jumps from {first:.2e} to {second:.2e}" in caplog.text
