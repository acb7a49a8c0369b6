"""Steps that learn nothing: what is left out, what stays as it was, and when a run ends. In this process."""

import itertools
import signal
from functools import partial

import pytest
import torch

from tests.support.small_run import ASYNC, MICRO_BATCHES, around_forward, before_step, interrupt
from torchround import trainer
from torchround.optim import SpikeBounds

STEPS = 9
LONG = [f"--training.steps={STEPS}", "--checkpoint.interval_steps=1", "--checkpoint.keep_latest_k=0"]
SPIKES = ["--training.on_spike=skip", *LONG]
nightly = pytest.mark.nightly
# The first steps have no bound, the next ones run with a window that the interruption went through.
SPIKE = 7


@pytest.fixture(autouse=True)
def short_window(monkeypatch):
    monkeypatch.setattr(trainer, "SpikeBounds", partial(SpikeBounds, window=4))


class Steeper(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss, factor):
        ctx.factor = factor
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


def change_loss(monkeypatch, change, first_step=1):
    calls = itertools.count(first_step * MICRO_BATCHES)
    around_forward(monkeypatch, -1, lambda forward: change(forward(), next(calls) // MICRO_BATCHES))


SPIKING = {
    "loss": lambda loss, step: loss * 3 if step == SPIKE else loss,
    "gradient norm": lambda loss, step: Steeper.apply(loss, 100.0 if step == SPIKE else 1.0),
}


@pytest.mark.parametrize(("kind", "mode"), [pytest.param("loss", [ASYNC], marks=nightly), ("gradient norm", [])])
def test_a_spike_leaves_all_state_as_it_was_and_the_run_continues(small_runs, monkeypatch, caplog, kind, mode):
    change_loss(monkeypatch, SPIKING[kind])
    assert small_runs("run", *SPIKES, *mode) == 0
    [warning] = [record.getMessage() for record in caplog.records if "early_end" in record.name]
    assert warning.startswith(f"step {SPIKE}: the {kind} ") and "its update is skipped" in warning
    before, after = (small_runs.state("run", step) for step in (SPIKE - 1, SPIKE))
    for name in (name for name in before if not name.startswith("master_1_old/")):
        assert torch.equal(before[name], after[name]), name
    later = small_runs.state("run", SPIKE + 1)
    assert any(not torch.equal(after[name], later[name]) for name in after)
    assert [line["skipped_steps"] for line in small_runs.steps("run")][SPIKE - 2 :] == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("mode", "stops"),
    [([ASYNC], [SPIKE - 2]), *(pytest.param(mode, [SPIKE - 2, SPIKE], marks=nightly) for mode in ([], [ASYNC]))],
)
def test_interrupted_around_a_spike_and_resumed_it_equals_an_uninterrupted_run(small_runs, monkeypatch, mode, stops):
    """The resumed run can find the spike only if the window of earlier steps went through the checkpoint."""
    with monkeypatch.context() as patch:
        change_loss(patch, SPIKING["loss"])
        assert small_runs("whole", *SPIKES, *mode) == 0
    for stop in stops:
        with monkeypatch.context() as patch:
            change_loss(patch, SPIKING["loss"])
            before_step(patch, stop, interrupt)
            assert small_runs(f"stopped-{stop}", *SPIKES, *mode) == 128 + signal.SIGTERM
        with monkeypatch.context() as patch:
            change_loss(patch, SPIKING["loss"], first_step=stop + 1)
            assert small_runs(f"stopped-{stop}", *SPIKES, *mode, "--engine.num_devices=3") == 0
        small_runs.assert_same(f"stopped-{stop}", "whole", STEPS)


def test_a_spike_may_end_the_run_with_a_diagnosis_and_the_same_command_continues(small_runs, monkeypatch, capsys):
    stops = [*SPIKES, "--training.on_spike=stop"]
    with monkeypatch.context() as patch:
        change_loss(patch, SPIKING["loss"])
        assert small_runs("run", *stops) == 1
    message = capsys.readouterr().err
    assert message.startswith('BadStepsError: a spike (training.on_spike = "stop"); the last good one: step 6.')
    assert f"\n  step {SPIKE}: the loss " in message and "its data begins after" in message
    assert "Traceback" not in message
    after = SPIKE + 1  # a step was under way when the spike was known
    assert small_runs.saved("run")[-1] == after
    assert small_runs.saved_state("run", after)["applied_updates"] == after - 1
    assert small_runs("run", *stops) == 0


@pytest.mark.parametrize("mode", [[], pytest.param([ASYNC], marks=nightly)], ids=["sync", "async"])
def test_bad_steps_in_a_row_end_the_run_with_the_state_after_the_last_good_one(small_runs, monkeypatch, capsys, mode):
    three = ["--training.max_skipped_steps=3", "--training.steps=9", "--checkpoint.interval_steps=4", *mode]
    with monkeypatch.context() as patch:
        change_loss(patch, lambda loss, step: loss * float("nan") if step not in (1, 2, 4) else loss)
        assert small_runs("run", *three, "--checkpoint.keep_latest_k=0") == 1
    message = capsys.readouterr().err
    assert "3 bad steps in a row (training.max_skipped_steps = 3); the last good one: step 4." in message
    shown = [line.split(":")[0] for line in message.splitlines() if line.startswith("  step")]
    assert shown == ["  step 5", "  step 6", "  step 7"]
    assert "the loss is not finite, micro-batches 0, 1, 2; loss nan, gradient norm nan" in message
    assert small_runs.saved("run") == [4, 8]  # a step was under way when the third one was known
    last_good, saved = small_runs.state("run", 4), small_runs.state("run", 8)
    for name in (name for name in saved if not name.startswith("master_1_old/")):
        assert torch.equal(saved[name], last_good[name]), name
    assert small_runs("run", *three) == 0


def test_float16_overflows_that_a_lower_loss_scale_cures_are_no_bad_steps(small_runs, monkeypatch, caplog):
    change_loss(monkeypatch, lambda loss, step: Steeper.apply(loss, 2.0**9))
    assert (
        small_runs("run", "--training.dtype=float16", "--training.max_skipped_steps=1", *LONG, "--training.steps=15")
        == 0
    )
    skipped = small_runs.steps("run")[-1]["skipped_steps"]
    assert 1 < skipped < 15 and caplog.text.count("overflows float16") == skipped
