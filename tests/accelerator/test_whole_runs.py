"""Whole runs of the real command on an accelerator: resumed ones, float16 with loss scaling, and other cuts."""

import pytest

from tests.support.small_run import ASYNC, PREDICT, TIED, before_step, interrupt, small_runs

__all__ = ["small_runs"]

MODES = {
    "async, tied, bfloat16": [ASYNC, TIED, "--training.dtype=bfloat16"],
    "async, predict": [ASYNC, PREDICT],
    "float16 with loss scaling": ["--training.dtype=float16"],
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_that_is_interrupted_and_resumed_is_bitwise_the_uninterrupted_one(kind, small_runs, monkeypatch, mode):
    keys = [*MODES[mode], f"--engine.devices={kind}"]
    assert small_runs("whole", *keys) == 0
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, 3, interrupt)
        assert small_runs("run", *keys) == 143
    assert small_runs("run", *keys) == 0
    small_runs.assert_same("run", "whole")


@pytest.mark.parametrize("mode", MODES)
def test_another_plan_and_number_of_devices_give_the_same_run(kind, small_runs, mode):
    keys = [*MODES[mode], f"--engine.devices={kind}"]
    assert small_runs("run", *keys) == 0
    assert small_runs("whole", *keys, "--engine.plan=none", "--engine.num_devices=1") == 0
    small_runs.assert_same("run", "whole")
