"""Checkpoints whose weights and optimizer state are kept in another form: refused to resume from, read as weights."""

import pytest
import torch

from tests.support.small_run import (
    ASYNC,
    BOUNDED,
    COMPACT,
    PREDICT,
    STEPS,
    UNCORRECTED,
    fp32_weights,
    stop_before_the_first_step,
)
from torchround.checkpoint.folders import checkpoint_name
from torchround.optim.split_weights import split

pytestmark = pytest.mark.thorough

BFLOAT16 = "--training.dtype=bfloat16"
MUON = "--optimizer.name=muon"
# The forms of checkpoints: fp32 and split weights, with exact and compact state. fp16 keeps fp32 weights.
FORMS = {
    "fp32": (),
    "fp16": ("--training.dtype=float16",),
    "split": (BFLOAT16,),
    "split-async": (BFLOAT16, ASYNC, UNCORRECTED),
    "predicted": (BFLOAT16, ASYNC, PREDICT),
    "bounded": (BFLOAT16, *BOUNDED),
    "compact": (COMPACT,),
    "compact-split-async": (COMPACT, BFLOAT16, ASYNC, UNCORRECTED),
}


def begin_from(runs, before, name, *options, stopping=None):
    if not runs.saved(before):
        assert runs(before, "--training.steps=2", *FORMS[before]) == 0
    if stopping is not None:
        stop_before_the_first_step(stopping)
    return runs(name, f"--checkpoint.load_path={runs.checkpoint(before, 2)}", *options)


@pytest.mark.parametrize(
    ("before", "after", "keys"),
    [
        ("fp32", "split", ["training.dtype 'float32' -> 'bfloat16'"]),
        ("predicted", "split", ["engine.update 'async' -> 'sync'"]),
        ("split-async", "predicted", ["engine.delay_correction 'none' -> 'predict'"]),
        ("fp32", "compact", ["optimizer.state 'exact' -> 'compact'"]),
        ("compact-split-async", "split", ["engine.update 'async' -> 'sync'", "optimizer.state 'compact' -> 'exact'"]),
    ],
)
def test_a_run_does_not_resume_in_another_form_and_hears_which_keys_to_set(shared_runs, capsys, before, after, keys):
    assert begin_from(shared_runs, before, f"{before}-to-{after}", "--training.steps=4", *FORMS[after]) == 2
    message = capsys.readouterr().err
    assert all(key in message for key in keys) and "--checkpoint.load weights" in message, message


@pytest.mark.parametrize(("before", "after"), [("split-async", "split"), ("fp32", "fp16")])
def test_a_run_resumes_in_the_same_form_with_the_same_values(shared_runs, monkeypatch, before, after):
    longer = ("--training.steps=4", *FORMS[after])
    begin_from(shared_runs, before, f"{before}-to-{after}", *longer, stopping=monkeypatch)
    found, expected = shared_runs.state(f"{before}-to-{after}", 2), shared_runs.state(before, 2)
    assert len(found) > 0 and all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bounded", "split"),
        ("predicted", "compact-split-async"),
        ("split", "predicted"),
        ("fp16", "compact"),
        ("compact", "bounded"),
    ],
)
def test_a_new_stage_begins_with_the_weights_of_any_form(shared_runs, monkeypatch, before, after):
    name = f"{before}-for-{after}"
    begin_from(shared_runs, before, name, "--checkpoint.load=weights", *FORMS[after], stopping=monkeypatch)
    assert shared_runs.saved(name) == [0]
    found = shared_runs.state(name, 0)
    newest, expected = fp32_weights(found), fp32_weights(shared_runs.state(before, 2))
    assert newest.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in newest.items())
    assert not any(found[key].float().any() for key in found if key.startswith("exp_avg")), "the optimizer is not fresh"
    for key in (key for key in found if key.startswith("master_")):
        assert torch.equal(found[key], split(newest[key.replace("master_1_old", "weights")])[0])


def test_another_optimizer_is_refused_with_the_way_out_and_writes_nothing(small_runs, capsys):
    assert small_runs("run", MUON) == 0
    before = sorted(small_runs.path("run").rglob("*"))
    load = f"--checkpoint.load_path={small_runs.path('run') / 'checkpoints' / checkpoint_name(STEPS)}"
    for arguments in (("run", "--training.steps=9"), ("branch", load, "--training.steps=9")):
        capsys.readouterr()
        assert small_runs(*arguments) == 2
        message = capsys.readouterr().err
        assert "optimizer.name 'muon' -> 'adamw'" in message and "--checkpoint.load weights" in message
    assert sorted(small_runs.path("run").rglob("*")) == before and not small_runs.path("branch").exists()
    assert small_runs("branch", load, "--checkpoint.load=weights", "--training.steps=1") == 0
