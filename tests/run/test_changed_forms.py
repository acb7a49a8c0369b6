"""Runs that resume from, or begin with, checkpoints whose weights and optimizer state are kept in another form."""

import json
import signal

import pytest
import torch

from tests.support.hostile_cases import forge_file
from tests.support.small_run import (
    ASYNC,
    BOUNDED,
    COMPACT,
    PREDICT,
    STEPS,
    UNCORRECTED,
    fp32_weights,
    shared_runs,
    small_runs,
    stop_before_the_first_step,
)

__all__ = ["shared_runs", "small_runs"]
pytestmark = pytest.mark.thorough

BFLOAT16 = "--training.dtype=bfloat16"
MUON = "--optimizer.name=muon"
# The forms of checkpoints: fp32 and split weights, with exact and compact state. fp16 keeps fp32 weights.
FORMS = {
    "fp32": (),
    "fp32-async": (ASYNC, UNCORRECTED),
    "fp16": ("--training.dtype=float16",),
    "split": (BFLOAT16,),
    "split-async": (BFLOAT16, ASYNC, UNCORRECTED),
    "predicted": (BFLOAT16, ASYNC, PREDICT),
    "bounded": (BFLOAT16, *BOUNDED),
    "compact": (COMPACT,),
    "compact-split": (COMPACT, BFLOAT16),
    "compact-split-async": (COMPACT, BFLOAT16, ASYNC, UNCORRECTED),
}
ROUNDED, CONTINUED = "(exp_avg, exp_avg_sq) is rounded to 8 bits", "(exp_avg, exp_avg_sq) continues in float32"


def values_of(state):
    return {name: tensor for name, tensor in state.items() if name.startswith("exp_avg")}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


# Every form becomes split weights; every form of state, update and dtype is left and entered once.
CHANGES = [
    *((before, "split") for before in ("fp32", "fp16", "predicted", "bounded", "compact-split-async")),
    *(("fp32-async", "predicted"), ("split", "fp32"), ("split-async", "compact-split-async")),
    *(("compact", "fp32-async"), ("compact-split", "bounded"), ("predicted", "compact")),
]
BY_DEFAULT = [("predicted", "split"), ("split", "fp32"), ("compact-split-async", "split"), ("compact-split", "bounded")]
BY_DEFAULT += [("fp32", "split"), ("predicted", "compact")]
nightly = pytest.mark.nightly
STAGES = [
    ("bounded", "split"),
    ("predicted", "compact-split-async"),
    ("compact-split", "predicted"),
    ("fp16", "compact"),
]


def begin_from(runs, monkeypatch, before, name, *options):
    """Begin run `name` from the last checkpoint of a run in form `before`, and stop it before its first step."""
    if not runs.saved(before):
        assert runs(before, "--training.steps=2", *FORMS[before]) == 0
    load = f"--checkpoint.load_path={runs.path(before)}/checkpoints/step-2"
    stop_before_the_first_step(monkeypatch)
    assert runs(name, load, *options) == 128 + signal.SIGTERM


@pytest.mark.parametrize(
    ("before", "after"), [pytest.param(*change, marks=() if change in BY_DEFAULT else nightly) for change in CHANGES]
)
def test_a_run_resumes_in_another_form_with_the_same_values_and_says_what_is_lost(
    shared_runs, monkeypatch, caplog, before, after
):
    name = f"{before}-to-{after}"
    begin_from(shared_runs, monkeypatch, before, name, "--training.steps=4", *FORMS[after])
    assert shared_runs.saved(name) == [2]
    found, expected = shared_runs.state(name, 2), shared_runs.state(before, 2)
    assert_equal(fp32_weights(found), fp32_weights(expected))
    was, is_now = ("compact" in form for form in (before, after))
    for key in found.keys() & expected.keys():
        if key.startswith("master_"):
            assert torch.equal(found[key], expected[key].to(found[key].dtype)), key
    if was == is_now:  # `test_saved_forms.py` asks how values are converted
        assert_equal(values_of(found), values_of(expected))
    assert (ROUNDED in caplog.text) == (is_now and not was)
    assert (CONTINUED in caplog.text) == (was and not is_now)


@pytest.mark.parametrize(("before", "after"), STAGES)
def test_a_new_stage_begins_with_the_weights_of_any_form(shared_runs, monkeypatch, caplog, before, after):
    name = f"{before}-for-{after}"
    begin_from(shared_runs, monkeypatch, before, name, "--checkpoint.load=weights", *FORMS[after])
    assert shared_runs.saved(name) == [0]
    found = shared_runs.state(name, 0)
    assert_equal(fp32_weights(found), fp32_weights(shared_runs.state(before, 2)))
    assert not any(tensor.float().any() for tensor in values_of(found).values()), "the optimizer is not fresh"
    older = {key: tensor for key, tensor in found.items() if key.startswith("master_")}
    newest = fp32_weights(found)
    assert_equal(older, {key: newest[key.replace("master_1_old", "weights")].bfloat16() for key in older})
    assert ROUNDED not in caplog.text and CONTINUED not in caplog.text


def test_another_optimizer_is_refused_with_the_way_out_and_writes_nothing(small_runs, capsys):
    assert small_runs("run", MUON) == 0
    before = sorted(small_runs.path("run").rglob("*"))
    load = f"--checkpoint.load_path={small_runs.path('run') / 'checkpoints' / f'step-{STEPS}'}"
    for arguments in (("run", "--training.steps=9"), ("branch", load, "--training.steps=9")):
        capsys.readouterr()
        assert small_runs(*arguments) == 2
        message = capsys.readouterr().err
        assert "optimizer.name 'muon' -> 'adamw'" in message and "--checkpoint.load weights" in message
    assert sorted(small_runs.path("run").rglob("*")) == before and not small_runs.path("branch").exists()
    assert small_runs("branch", load, "--checkpoint.load=weights", "--training.steps=1") == 0


def test_a_checkpoint_without_an_optimizer_s_name_is_of_exact_adamw(small_runs, caplog):
    """Releases before the choice of optimizers wrote neither name nor state format."""
    assert small_runs("run") == 0
    state = small_runs.saved_state("run")
    del state["config"]["optimizer"]["name"], state["config"]["optimizer"]["state"]
    forge_file(small_runs.checkpoint("run", STEPS) / "state.json", json.dumps(state).encode())
    assert small_runs("run", COMPACT, "--training.steps=6") == 0
    assert "from now on training.steps 5 -> 6, optimizer.state 'exact' -> 'compact'" in caplog.text
    assert ROUNDED in caplog.text
