"""A run that is resumed with other settings: legal changes are reported and take effect, another model is refused."""

import pytest

from tests.support.small_run import ASYNC, STEPS, TWO_ROUNDS, UNCORRECTED, small_runs, stop_after
from torchround.config import Config
from torchround.engine.store.prediction import Prediction

__all__ = ["small_runs"]


def test_from_async_to_sync_the_older_version_is_left_out_and_the_rest_is_a_sync_run_s(small_runs, monkeypatch, caplog):
    """The first step reads the same weights in both, so after it a run may turn into one that was `sync` all along."""
    assert small_runs("whole") == 0
    stop_after(1, small_runs, "run", ASYNC)
    assert small_runs("run") == 0
    small_runs.assert_same("run", "whole")
    assert "from now on engine.update 'async' -> 'sync'" in caplog.text


def test_from_sync_to_async_the_first_step_reads_the_newest_weights_and_the_next_one_older(
    small_runs, monkeypatch, caplog
):
    assert small_runs("whole") == 0
    stop_after(2, small_runs, "run")
    assert small_runs("run", ASYNC) == 0
    changed, whole = small_runs.losses("run"), small_runs.losses("whole")
    assert changed[3] == whole[3] and changed[4][0] != whole[4][0]
    assert "from now on engine.update 'sync' -> 'async'" in caplog.text


def test_a_correction_of_the_delay_that_is_new_to_a_run_is_reported(small_runs, monkeypatch, caplog):
    """A run of an earlier release has no such key in its checkpoints, and none was made. `auto` is what it stands for."""
    without_the_key = Config.model_dump

    def dumped(config, **arguments):
        found = without_the_key(config, **arguments)
        del found["engine"]["delay_correction"]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(Config, "model_dump", dumped)
        stop_after(1, small_runs, "run", ASYNC, "--engine.delay_correction=none")
    stop_after(2, small_runs, "run", ASYNC)
    assert "from now on engine.delay_correction 'none' -> 'predict'" in caplog.text
    caplog.clear()
    assert small_runs("run", ASYNC, "--engine.delay_correction=predict") == 0
    assert "from now on" not in caplog.text


def test_a_correction_that_muon_does_not_make_is_no_change(small_runs, monkeypatch, caplog, capsys):
    """With Muon `auto` means `none`: neither a resumed run nor a complete one was trained with another setting."""
    muon = (ASYNC, "--optimizer.name=muon", "--training.dtype=bfloat16")
    assert small_runs("whole", *muon) == 0
    stop_after(2, small_runs, "run", *muon)
    for tries in ("resumed", "complete"):
        assert small_runs("run", *muon, UNCORRECTED) == 0, (tries, capsys.readouterr().err)
    assert "engine.delay_correction" not in caplog.text
    small_runs.assert_same("run", "whole")


def test_a_checkpoint_whose_prediction_lacks_a_number_is_a_named_error(small_runs, monkeypatch, capsys):
    whole = Prediction.state

    def without_lr(self):
        return {name: value for name, value in whole(self).items() if name != "lr"}

    with monkeypatch.context() as patch:
        patch.setattr(Prediction, "state", without_lr)
        stop_after(2, small_runs, "run", ASYNC)
    assert small_runs("run", ASYNC) == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "step-2: invalid run state in the checkpoint: prediction is" in message


def test_other_rounds_change_a_run_by_rounding_alone(small_runs, monkeypatch):
    assert small_runs("whole") == 0
    stop_after(2, small_runs, "run")
    assert small_runs("run", TWO_ROUNDS) == 0
    changed, whole = small_runs.losses("run"), small_runs.losses("whole")
    assert changed[3][0] == pytest.approx(whole[3][0], rel=1e-6)
    # AdamW may turn the rounding of a vanishing gradient into a full step of that element. The loss hardly depends on
    # an element whose gradient vanishes: 1e-4 is a hundredth of what one update changes.
    assert changed[STEPS][0] == pytest.approx(whole[STEPS][0], rel=1e-4)


def test_another_learning_rate_and_schedule_are_used_and_reported(small_runs, monkeypatch, caplog):
    stop_after(2, small_runs, "run")
    assert small_runs("run", "--optimizer.lr=5e-3", "--lr_schedule.decay=none") == 0
    assert "from now on optimizer.lr 0.01 -> 0.005, lr_schedule.decay " in caplog.text
    assert [small_runs.losses("run")[step][2] for step in (3, 4, 5)] == [5e-3] * 3


@pytest.mark.parametrize(
    ("change", "differs"),
    [
        ("--model.flavor=tied", "model.flavor 'untied' -> 'tied'"),
        ("--lora.rank=2", "lora.rank 0 -> 2"),
        ("--training.dtype=bfloat16", ""),
    ],
)
def test_another_model_is_refused_with_what_differs_and_other_number_formats_are_not(
    small_runs, capsys, change, differs
):
    assert small_runs("run") == 0
    code = small_runs("run", "--training.steps=6", change)
    message = capsys.readouterr().err
    assert code == (2 if differs else 0) and differs in message and "Traceback" not in message, message


def test_frozen_weights_of_another_number_format_are_refused_with_the_key(small_runs, capsys):
    assert small_runs("run", "--lora.rank=2") == 0
    assert small_runs("run", "--lora.rank=2", "--training.steps=6", "--training.dtype=bfloat16") == 2
    [message] = capsys.readouterr().err.splitlines()
    assert "is float32 [" in message and "(training.dtype 'float32' -> 'bfloat16'). Resume with" in message
